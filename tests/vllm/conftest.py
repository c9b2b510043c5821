"""Settings of vLLM for every test here: what a small machine is fast with."""

import os
from collections.abc import Iterator

import pytest

SETTINGS = {
    # Engines run in the process that asks for them, where tests can look at them.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Models this small are slowed down by threads, on a machine of few cores by a factor of forty.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Compiling takes longer than all that these tests compute.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    """Skips where there is no vLLM; a variable that is set already is left alone."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            if name not in os.environ:
                patch.setenv(name, value)
        pytest.importorskip("vllm", reason="needs the environment that tests/vllm/environment.sh builds")
        yield
