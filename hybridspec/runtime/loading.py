"""Reading a checkpoint folder: what it must hold, its model and its tokenizer."""

from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from hybridspec.errors import InputError, ModelLoadError
from hybridspec.runtime.options import LoadOptions


def load_checkpoint(folder: Path, options: LoadOptions) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """The model, in the type and on the device that ``options`` name, and its tokenizer.

    Raises:
        ModelLoadError: the folder or a part of it is missing or broken; names it and says what to do.
        InputError: torch has no such device.
    """
    check_folder(folder)
    try:
        device = torch.device(options.device)
    except RuntimeError as error:
        raise InputError(f"device must be one of torch such as cuda, not {options.device!r}: {error}") from error
    disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=options.torch_dtype, local_files_only=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ModelLoadError(
            f"{folder}: transformers could not load this checkpoint: {error}. "
            "If one of its *.safetensors or tokenizer files is cut short, copy it again."
        ) from error
    # transformers fills what is missing with random numbers and a line in a log.
    broken = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
    if broken:
        raise ModelLoadError(
            f"{folder}: missing or misshapen tensors in the weights, {len(broken)} in all, the first {broken[0]}. "
            "Copy the checkpoint again."
        )
    return model.to(device), tokenizer


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint folder, or of a name in the local cache.

    Raises:
        ModelLoadError: it cannot be read.
    """
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=True)
    except Exception as error:
        # Tokenizer files break in every way there is.
        raise ModelLoadError(f"{source}: its tokenizer cannot be read: {error}") from error


def check_folder(folder: Path) -> None:
    """Raises :class:`ModelLoadError` unless ``folder`` holds a config, weights and a tokenizer."""
    if not folder.is_dir():
        raise ModelLoadError(
            f"{folder}: no such folder. Give a local checkpoint folder (config.json, *.safetensors, tokenizer)."
        )
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder}: config.json is missing. Is this a Hugging Face checkpoint folder?")
    try:
        AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ModelLoadError(f"{folder / 'config.json'}: {error}") from error
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise ModelLoadError(f"{folder}: no weights (*.safetensors). Was the download complete, or Git LFS not pulled?")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ModelLoadError(f"{folder}: no tokenizer (tokenizer.json). Copy it from the model's source.")


def folder_fingerprint(folder: Path) -> str:
    """A checkpoint folder with name, size and time of its weight files, which are not read."""
    files = sorted(folder.glob("*.safetensors"))
    return " ".join([str(folder), *(f"{f.name}:{f.stat().st_size}:{f.stat().st_mtime_ns}" for f in files)])
