"""A checkpoint folder that cannot run is refused with its path and a reason, before anything starts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hybridspec.decoding.loop import decode
from hybridspec.errors import HybridspecError, InputError, ModelLoadError, UnsupportedLayerError
from hybridspec.runtime.runner import TargetRunner
from tests.tiny import VOCABULARY


@pytest.fixture(scope="module")
def checkpoint(make_model: Callable[..., PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete folder: config, safetensors, tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny-hybrid"
    make_model("draft").save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(checkpoint, tmp_path / "broken-one"))


def weights(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(weights(folder))
    change(tensors)
    save_file(tensors, weights(folder), metadata={"format": "pt"})


def truncate(folder: Path) -> None:
    content = weights(folder).read_bytes()
    weights(folder).write_bytes(content[: len(content) // 2])


def lfs_pointer(folder: Path) -> None:
    weights(folder).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def missing_shard(folder: Path) -> None:
    tensors = load_file(weights(folder))
    weights(folder).rename(folder / "model-00001-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00002-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


#: What is done to a complete folder -> a word that the message must hold besides the path.
BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda f: shutil.rmtree(f), "no such folder"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{'a': "), "config.json"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "config.json"),
    "unknown model type": (lambda f: change_config(f, model_type="no-such-model"), "no-such-model"),
    "no model type": (lambda f: (f / "config.json").write_text("{}"), "config.json"),
    "no weights": (lambda f: weights(f).unlink(), "weights"),
    "half of the weights' bytes": (truncate, ""),
    "empty weights": (lambda f: weights(f).write_bytes(b""), ""),
    "LFS pointer": (lfs_pointer, ""),
    "missing shard": (missing_shard, "00002-of-00002"),
    "weights of other shapes": (lambda f: change_config(f, intermediate_size=48), ""),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), ""),
}


def test_a_complete_folder_runs(checkpoint: Path, make_model: Callable[..., PreTrainedModel]) -> None:
    """Or else every refusal below could have another reason than the one it is tested for."""
    for rollback in ("tape", "recompute"):
        runner = TargetRunner.from_pretrained(str(checkpoint), rollback=rollback)
        assert runner.name == "tiny-hybrid"
        prompt = runner.encode("w5 w17 w40")
        assert prompt == [5, 17, 40]
        tokens = [t.id for t in decode(runner, prompt, max_new_tokens=6, stop_tokens=frozenset())]
        original = TargetRunner(make_model("draft"))
        assert tokens == [t.id for t in decode(original, prompt, max_new_tokens=6, stop_tokens=frozenset())]


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_folder_is_refused_by_path(folder: Path, name: str) -> None:
    break_it, word = BREAKS[name]
    break_it(folder)
    with pytest.raises(ModelLoadError) as caught:
        TargetRunner.from_pretrained(folder)
    assert str(folder) in str(caught.value)
    assert word in str(caught.value)


def test_a_missing_tensor_is_refused_by_name(folder: Path) -> None:
    """transformers makes up random numbers for it, with a warning in a log."""
    change_weights(folder, lambda tensors: tensors.pop("model.layers.0.linear_attn.out_proj.weight"))
    with pytest.raises(ModelLoadError, match=r"broken-one.*layers\.0\.linear_attn\.out_proj"):
        TargetRunner.from_pretrained(folder)


def test_weights_that_nothing_reads_are_allowed(folder: Path) -> None:
    """Checkpoints carry vision towers and prediction heads that a text model leaves out."""
    change_weights(folder, lambda tensors: tensors.update({"mtp.fc.weight": torch.zeros(2, 2)}))
    assert TargetRunner.from_pretrained(folder).vocab_size == VOCABULARY


def test_a_file_is_not_a_folder(checkpoint: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json: no such folder"):
        TargetRunner.from_pretrained(checkpoint / "config.json")


def test_a_layer_without_rollback_is_refused_by_name(folder: Path) -> None:
    change_config(folder, layer_types=["linear_attention", "holographic_attention"])
    with pytest.raises(HybridspecError, match="holographic_attention"):
        TargetRunner.from_pretrained(folder)


def test_an_unknown_layer_type_is_named(make_model: Callable[..., PreTrainedModel]) -> None:
    model = make_model("draft", seed=6)
    model.config.layer_types = ["linear_attention", "holographic_attention"]
    for rollback in ("tape", "auto", "recompute"):
        with pytest.raises(UnsupportedLayerError, match="holographic_attention"):
            TargetRunner(model, rollback=rollback)


@pytest.mark.parametrize("rollback", ["slot", "TAPE", "", None])
def test_an_unknown_rollback_is_refused(make_model: Callable[..., PreTrainedModel], rollback: str | None) -> None:
    with pytest.raises(InputError, match="auto, tape, slots, recompute"):
        TargetRunner(make_model("draft"), rollback=rollback)


def test_an_unknown_rollback_is_refused_before_the_weights_are_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("minutes of loading for a typing error")

    monkeypatch.setattr("hybridspec.runtime.loading.AutoModelForCausalLM.from_pretrained", fail)
    with pytest.raises(InputError, match="slot"):
        TargetRunner.from_pretrained(checkpoint, rollback="slot")


def test_a_text_that_gives_no_token_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = TargetRunner.from_pretrained(checkpoint)
    for text in ("", "  \n"):
        with pytest.raises(InputError, match="empty"):
            runner.encode(text)
    monkeypatch.setattr(runner, "tokenizer", lambda _: {"input_ids": []})
    with pytest.raises(InputError):
        runner.encode("\N{ZERO WIDTH SPACE}")


def test_stop_tokens_of_every_form(make_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("draft")
    runner = TargetRunner(model)
    assert runner.stop_tokens == frozenset()
    monkeypatch.setattr(model.config, "eos_token_id", 7)
    assert runner.stop_tokens == {7}
    monkeypatch.setattr(model.generation_config, "eos_token_id", [3, 4])
    assert runner.stop_tokens == {3, 4}
    monkeypatch.setattr(model.generation_config, "eos_token_id", 0)
    assert runner.stop_tokens == {0}
