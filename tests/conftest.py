"""One torch thread, quiet transformers, and tiny random models for every test."""

import os
import signal
from collections.abc import Callable

# Triton decides when it is first imported whether kernels run in its interpreter; without a GPU nothing else can.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from hybridspec.runtime.options import RollbackMode
from hybridspec.runtime.runner import TargetRunner
from tests.examples import register
from tests.tiny import noisy_copy, tiny_model

torch.set_num_threads(1)
# A shell that starts the tests in the background hands down an ignored Ctrl-C, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Tables come out as wide as where there is no terminal, whatever the terminal that runs the tests.
os.environ.pop("COLUMNS", None)
transformers.logging.set_verbosity_error()
register()

#: Names that tests ask for -> what `tiny_model` builds. All share one vocabulary, so that any two are a pair.
MODELS: dict[str, dict] = {
    "plain": {"layers": 4, "seed": 1},
    "deep": {"layers": 8, "seed": 2},
    "grouped": {"layers": 4, "seed": 3, "value_heads_per_key_head": 2},
    "draft": {"layer_types": ("linear_attention", "full_attention"), "seed": 4},
    "dense": {"layer_types": ("full_attention", "full_attention"), "seed": 5},
}


@pytest.fixture(scope="session")
def make_model() -> Callable[..., PreTrainedModel]:
    """Builds a tiny model by name (see ``MODELS``), or a noisy copy of it, whose guesses are right now and then."""

    def build(name: str = "plain", noise: float = 0.0, **changes: object) -> PreTrainedModel:
        arguments = MODELS[name] | changes
        return noisy_copy(noise, **arguments) if noise else tiny_model(**arguments)

    return build


@pytest.fixture(scope="session")
def make_runner(make_model: Callable[..., PreTrainedModel]) -> Callable[..., TargetRunner]:
    """The same models wrapped in a runner, by name and rollback mode."""

    def build(
        name: str = "plain", rollback: RollbackMode = "tape", noise: float = 0.0, **changes: object
    ) -> TargetRunner:
        return TargetRunner(make_model(name, noise, **changes), rollback=rollback)

    return build
