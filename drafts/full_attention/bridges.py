"""Bridges: small adapters in the place of a target's recurrent layers, and the folder they are kept in.

A folder holds ``bridges.safetensors`` and ``bridges.json`` (for which weights, which layers, how trained).
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hybridspec.drafts.full_attention.reduced import Cut, cut, normed
from hybridspec.errors import IncompatiblePairError, InputError, ModelLoadError
from hybridspec.runtime.runner import TargetRunner

SETTINGS, WEIGHTS = "bridges.json", "bridges.safetensors"


class Bridge(nn.Module):
    """Residual gated MLP, h + gain * down(silu(gate x) * (up x)), on the normed hidden state and its context.

    The short convolutions it stands for look a few tokens back; the context is what a bridge has instead.
    """

    def __init__(self, width: int, window: int, inner: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(window * width))
        self.gate = nn.Linear(window * width, inner, bias=False)
        self.up = nn.Linear(window * width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.gain = nn.Parameter(torch.ones(width))
        nn.init.zeros_(self.down.weight)

    def forward(self, hidden_states: Tensor, context: Tensor | None) -> Tensor:
        """``[B, T, d]`` -> ``[B, T, d]``; ``context`` is ``[B, T, (window - 1) d]``."""
        x = normed(hidden_states)
        if context is not None:
            x = torch.cat([x, context], -1)
        x = x * self.scale
        return hidden_states + self.gain * self.down(F.silu(self.gate(x)) * self.up(x))


@dataclass
class BridgeSettings:
    """What ``bridges.json`` says.

    Attributes:
        target: model type and :func:`fingerprint` of the weights that the bridges were trained on.
        kept_layers, runs: see :class:`~hybridspec.drafts.full_attention.reduced.Cut`.
        width, window, inner: sizes of each bridge.
        training: where they come from: corpus, tokens, steps, minutes, losses, versions.
    """

    target: dict[str, str]
    kept_layers: list[int]
    runs: list[list[int]]
    width: int
    window: int
    inner: int
    training: dict[str, Any] = field(default_factory=dict)


def fingerprint(target: TargetRunner) -> str:
    """Tells weights apart in whatever dtype they are loaded: names, shapes and 64 entries of each tensor, in bf16."""
    digest = hashlib.sha256()
    for name, parameter in target.model.named_parameters():
        flat = parameter.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // 64)][:64].to(torch.bfloat16).cpu()
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(some.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:32]


def describe(target: TargetRunner, window: int, inner: int) -> BridgeSettings:
    """Settings of bridges for ``target``.

    Raises:
        UnsupportedLayerError: see :func:`hybridspec.drafts.full_attention.reduced.cut`.
    """
    layout: Cut = cut(target)
    return BridgeSettings(
        target={"model_type": target.config.model_type, "fingerprint": fingerprint(target)},
        kept_layers=list(layout.kept),
        runs=[list(run) for run in layout.runs],
        width=layout.width,
        window=window,
        inner=inner,
    )


def make_bridges(settings: BridgeSettings) -> nn.ModuleList:
    """Untrained bridges, which hand the hidden states on as they are."""
    return nn.ModuleList(Bridge(settings.width, settings.window, settings.inner) for _ in settings.runs)


def save_bridges(folder: Path, bridges: nn.ModuleList, settings: BridgeSettings) -> None:
    """Writes both files, the weights in fp16."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.detach().half().contiguous() for k, v in bridges.state_dict().items()}, folder / WEIGHTS)
    (folder / SETTINGS).write_text(json.dumps(asdict(settings), indent=2) + "\n", encoding="utf-8")


def read_settings(folder: Path) -> BridgeSettings:
    """Reads ``bridges.json``.

    Raises:
        ModelLoadError: missing or malformed; names file and field.
    """
    path = folder / SETTINGS
    if not path.is_file():
        raise ModelLoadError(f"{path}: no such file. Give a folder that `hybridspec bridges` wrote.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path}: not valid JSON: {error}") from error
    kinds = {"target": dict, "kept_layers": list, "runs": list, "width": int, "window": int, "inner": int}
    for name, kind in kinds.items():
        if not isinstance(content, dict) or not isinstance(content.get(name), kind):
            raise ModelLoadError(f'{path}: field "{name}" is missing or no {kind.__name__}. Train the bridges again.')
    return BridgeSettings(**{k: v for k, v in content.items() if k in BridgeSettings.__dataclass_fields__})


def load_bridges(folder: Path, target: TargetRunner) -> tuple[nn.ModuleList, BridgeSettings]:
    """Bridges for ``target``, in its dtype and on its device.

    Raises:
        ModelLoadError: a file is missing or broken.
        IncompatiblePairError: they were trained for other weights or layers; names the field.
    """
    settings = read_settings(folder)
    ours = describe(target, settings.window, settings.inner)
    for name in ("target", "kept_layers", "runs", "width"):
        made, wanted = getattr(settings, name), getattr(ours, name)
        if made != wanted:
            raise IncompatiblePairError(
                f'{folder / SETTINGS}: "{name}" is {made}, and target {target.name} has {wanted}. '
                "Bridges fit only the weights they were trained on: train some with `hybridspec bridges`."
            )
    path = folder / WEIGHTS
    bridges = make_bridges(settings)
    try:
        bridges.load_state_dict(load_file(path))
    except Exception as error:
        raise ModelLoadError(f"{path}: cannot be loaded: {error}. Train the bridges again.") from error
    return bridges.to(device=target.device, dtype=target.model.dtype).requires_grad_(False).eval(), settings


def check_sizes(window: int, inner: int) -> None:
    """Raises :class:`InputError` unless both are at least 1."""
    for name, value in (("window", window), ("inner", inner)):
        if value < 1:
            raise InputError(f"{name} must be at least 1, not {value}")
