"""Small checkpoints as they lie on a disk, of every family, with a tokenizer; and ways to spoil copies of them."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hybridspec.checker.sample_texts import PROBES
from tests.families import FAMILIES, TOKENS, _skip_if_old, build, is_known, model_type

#: More than the tokenizer has tokens, as published checkpoints do.
ROWS = 400
SPECIAL = ["<pad>", "<bos>", "<eos>"]
ROLES = ["<|user|>", "<|assistant|>"]
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE with special tokens first and roles last; all merges stand for frequent pairs of the probes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(PROBES.values(), trainer)
    tokenizer.add_special_tokens([AddedToken(role, special=True) for role in ROLES])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    write_json(folder / "tokenizer_config.json", names | {"tokenizer_class": "PreTrainedTokenizerFast"})
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def write_checkpoint(folder: Path, name: str, shard_size: str = "5GB", **changes: Any) -> Path:
    """A checkpoint of a family of :mod:`tests.families` as transformers writes it; skips what is too new."""
    if not is_known(name):
        _skip_if_old(f"has no {model_type(name)}", KeyError(name))
    arguments = TOKENS | FAMILIES[name] | {"vocab_size": ROWS}
    if "unpadded_vocab_size" in arguments:
        arguments["unpadded_vocab_size"] = ROWS
    if getattr(CONFIG_MAPPING[model_type(name)], "num_mtp_layers", None):
        # A prediction head that is announced by default, and that transformers does not build.
        arguments["num_mtp_layers"] = 0
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            model = build(name, arguments | changes)
        except Exception as error:
            _skip_if_old(f"refuses the config: {' '.join(str(error).split())}", error)
    model.save_pretrained(folder, max_shard_size=shard_size)
    write_tokenizer(folder)
    return folder


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def edit(file: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Spoils a JSON file: ``change`` alters its value in place, or returns another."""

    def spoil(folder: Path) -> None:
        value = read_json(folder / file) if (folder / file).exists() else {}
        write_json(folder / file, change(value) or value)

    return spoil


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Spoils the tensors of an unsharded checkpoint."""

    def spoil(folder: Path) -> None:
        path = folder / "model.safetensors"
        content = load_file(path)
        change(content)
        save_file(content, path, metadata={"format": "pt"})

    return spoil


def truncate(file: str, keep: Callable[[int, int], int]) -> Callable[[Path], None]:
    """Cuts a safetensors file; ``keep`` gives the bytes to keep from the size of the header and of the file."""

    def spoil(folder: Path) -> None:
        path = next(iter(sorted(folder.glob(file))))
        data = path.read_bytes()
        path.write_bytes(data[: keep(8 + struct.unpack("<Q", data[:8])[0], len(data))])

    return spoil


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a family's checkpoint once; do not change what it gives."""
    written: dict[str, Path] = {}

    def get(name: str, **changes: Any) -> Path:
        key = f"{name} {sorted(changes.items())}"
        if key not in written:
            written[key] = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), name, **changes)
        return written[key]

    return get


@pytest.fixture
def spoilt(checkpoints: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a family's checkpoint with something wrong in it."""

    def get(name: str, spoil: Callable[[Path], None], **changes: Any) -> Path:
        folder = tmp_path / "copy"
        shutil.copytree(checkpoints(name, **changes), folder)
        spoil(folder)
        return folder

    return get
