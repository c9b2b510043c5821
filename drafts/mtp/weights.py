"""Reads the tensors of a multi-token-prediction head, by their published names, and refuses what does not fit."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from hybridspec.drafts.mtp.head import PredictionHead, layout_of
from hybridspec.errors import ModelLoadError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def load_head(model: PreTrainedModel, tensors: Mapping[str, Tensor] | Path) -> PredictionHead:
    """The head of ``model`` in its dtype and on its device, ready to draft.

    Args:
        tensors: by published name, or the checkpoint folder (or one file) that holds them.

    Raises:
        InputError, UnsupportedLayerError: the family has no head that is known here.
        ModelLoadError: a tensor is missing, misshapen, quantized or left over; names file and tensor.
    """
    config = model.config.get_text_config(decoder=True)
    layout = layout_of(config)
    found = Found(tensors, layout.prefix(config))
    if not found.tensors:
        heads = getattr(config, layout.announced, None)
        announced = f"config.json announces a head ({layout.announced} = {heads}), but " if heads else ""
        raise ModelLoadError(
            f"{found.place}: {announced}no tensor is called {layout.prefix(config)}*. Quantized and fine-tuned copies "
            "often leave the head out: take it from the original checkpoint with mtp:path=FOLDER."
        )
    with torch.device("meta"):
        head = PredictionHead(model)
    kept = "|".join(getattr(head.decoder, "_keep_in_fp32_modules_strict", None) or ()).replace("*", r"\w+")
    state = {}
    for name, wanted in head.state_dict().items():
        tensor = found.take(layout.published(name, config), tuple(wanted.shape))
        precise = kept and re.search(rf"(^|\.)({kept})(\.|$)", name)
        state[name] = tensor.to(model.device, torch.float32 if precise else model.dtype)
    found.check_nothing_left(layout.unread)
    head.load_state_dict(state, assign=True)
    return head.eval().requires_grad_(False)


def published_tensors(head: PredictionHead, model: PreTrainedModel) -> dict[str, Tensor]:
    """The head's tensors by their published names; experts stay packed."""
    config = model.config.get_text_config(decoder=True)
    return {head.layout.published(name, config): tensor.detach() for name, tensor in head.state_dict().items()}


class Found:
    """The tensors below a root, and which file each came from."""

    def __init__(self, source: Mapping[str, Tensor] | Path, root: str) -> None:
        below = re.compile(rf"(?:^|\.)({re.escape(root)}.*)")
        self.place = str(source) if isinstance(source, Path) else "tensors"
        self.tensors: dict[str, Tensor] = {}
        self.origin: dict[str, str] = {}
        self._taken: set[str] = set()
        for origin, name, tensor in _entries(source, below) if isinstance(source, Path) else _given(source):
            if match := below.search(name):
                self.tensors[match[1]], self.origin[match[1]] = tensor, origin

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor ``name``, its experts packed into one if they are published one by one."""
        packed = re.fullmatch(r"(.*\.experts\.)(gate_up_proj|up_proj|down_proj)", name)
        if packed is None or name in self.tensors:
            return self._one(name, shape)
        parts = ["gate_proj", "up_proj"] if packed[2] == "gate_up_proj" else [packed[2]]
        rows = (shape[1] // len(parts), *shape[2:])
        return torch.stack(
            [
                torch.cat([self._one(f"{packed[1]}{expert}.{part}.weight", rows) for part in parts])
                for expert in range(shape[0])
            ]
        )

    def _one(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelLoadError(
                f"{self.place}: the multi-token-prediction head has no tensor {name}, though {next(iter(self.tensors))}"
                " is there. Copy the checkpoint again."
            )
        self._taken.add(name)
        if tensor.dtype not in FLOATS:
            raise ModelLoadError(
                f"{self.origin[name]}: {name} is stored as {tensor.dtype}, and quantized heads are not read. Take the "
                "head from the original checkpoint with mtp:path=FOLDER."
            )
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"{self.origin[name]}: {name} has shape {list(tensor.shape)}, this model's head needs {list(shape)}. "
                "Is it another model's?"
            )
        return tensor

    def check_nothing_left(self, unread: tuple[str, ...]) -> None:
        """A tensor without a place means a head that works in another way than ours."""
        left = sorted(self.tensors.keys() - self._taken - set(unread))
        if left:
            raise ModelLoadError(
                f"{self.origin[left[0]]}: {left[0]} ({len(left)} tensors in all) has no place in the "
                "multi-token-prediction head that is known here, so it would draft wrongly."
            )


def _given(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Tensor]]:
    yield from (("tensors", name, tensor) for name, tensor in tensors.items())


def _entries(source: Path, below: re.Pattern[str]) -> Iterator[tuple[str, str, Tensor]]:
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    if not files:
        raise ModelLoadError(f"{source}: no *.safetensors, which the head of mtp is read from.")
    for path in files:
        try:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    if below.search(name):
                        yield str(path), name, opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: not a readable safetensors file ({error}). Copy it again.") from error
