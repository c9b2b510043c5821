"""Probes for segmented verification: guesses of the target's next token from the hidden states between its layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybridspec.checkpoints.config_layers import read_config
from hybridspec.drafts.full_attention.segments import Probe, SegmentedVerification
from hybridspec.errors import InputError, UnsupportedLayerError
from hybridspec.runtime.runner import TargetRunner

#: What families call the norm that their head reads through.
FINAL_NORMS = ("norm", "final_layernorm", "norm_f", "final_norm", "embedding_norm", "ln_f")


class FinalHead:
    """The target's own final norm and head on hidden states of any layer: nothing to fit, poor in the lower layers."""

    def __init__(self, target: TargetRunner) -> None:
        decoder = target.model.get_decoder()
        norm = next((getattr(decoder, name) for name in FINAL_NORMS if hasattr(decoder, name)), None)
        if norm is None:
            raise UnsupportedLayerError(f"{target.name}: no final norm is known here. Fit a probe instead.")
        self.norm, self.head = norm, target.model.get_output_embeddings()

    @torch.inference_mode()
    def __call__(self, cut: int, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden))


@dataclass
class LinearProbe:
    """A linear map for each cut from normalised hidden states ``[d]`` to what the head reads, then the head.

    The tuned lens (Belrose et al., arXiv 2303.08112), fitted by least squares instead of by gradient descent.
    """

    head: nn.Module
    #: cut -> ``[d + 1, d]``, the last row added.
    maps: dict[int, Tensor]

    @torch.inference_mode()
    def __call__(self, cut: int, hidden: Tensor) -> Tensor:
        weights = self.maps[cut]
        return self.head((normalised(hidden) @ weights[:-1] + weights[-1]).to(hidden.dtype))


def normalised(hidden: Tensor) -> Tensor:
    """``[T, d]`` with a root mean square of 1 in each row, fp32: the scale of hidden states grows with depth."""
    hidden = hidden.float()
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)


def attention_cuts(target: TargetRunner) -> list[int]:
    """Behind each full-attention layer, but for one that is the last layer.

    Raises:
        InputError: there is none.
    """
    layout = read_config(target.config.to_dict()).layout
    kinds = layout.kinds if layout else ()
    full = [i + 1 for i, kind in enumerate(kinds) if kind in ("full_attention", "hybrid")]
    cuts = [cut for cut in full if cut < len(kinds)]
    if not cuts:
        raise InputError(f"{target.name} has no full-attention layer to cut behind: name the cuts as layer indices")
    return cuts


@torch.inference_mode()
def fit_segments(
    target: TargetRunner,
    texts: Sequence[Sequence[int]],
    cuts: Sequence[int] | None = None,
    keep: float = 0.98,
    ridge: float = 1e-3,
) -> SegmentedVerification:
    """Probes and margins from token sequences like those to come: a few thousand tokens and one pass over them.

    Args:
        cuts: layer indices; default: behind each full-attention layer.
        keep: share of the target's own choices that each cut must let through, on the second half of the texts (the
            probe is fitted on the first).
        ridge: regularisation of the least squares, relative to the inputs' mean square.

    Raises:
        InputError: too few tokens, or ``keep`` is not a share.
    """
    if not 0.0 < keep <= 1.0:
        raise InputError(f"keep must be a share above 0 and at most 1, not {keep}")
    cuts = list(cuts) if cuts is not None else attention_cuts(target)
    inputs, outputs = _hidden_states(target, texts, cuts)
    if len(outputs) < 64:
        raise InputError(f"a probe needs at least 64 tokens of text to be fitted, not {len(outputs)}")
    half = len(outputs) // 2
    head = target.model.get_output_embeddings()
    choices = head(outputs[half:]).argmax(-1)
    probe = LinearProbe(head, {})
    margins = []
    for cut in cuts:
        x = torch.cat([normalised(inputs[cut]), torch.ones(len(outputs), 1, device=outputs.device)], -1)
        known, wanted = x[:half].double(), outputs[:half].double()
        square = known.mT @ known
        square += ridge * square.diagonal().mean() * torch.eye(len(square), dtype=square.dtype, device=square.device)
        probe.maps[cut] = torch.linalg.solve(square, known.mT @ wanted).float()
        logits = probe(cut, inputs[cut][half:]).float()
        below = logits.max(-1).values - logits.gather(-1, choices.unsqueeze(-1))[:, 0]
        margins.append(float(below.quantile(keep)))
    return SegmentedVerification(target, probe, cuts, margins)


def _hidden_states(
    target: TargetRunner, texts: Sequence[Sequence[int]], cuts: Sequence[int]
) -> tuple[dict[int, Tensor], Tensor]:
    """Hidden states ``[N, d]`` at each cut, and those that the head reads, of all tokens of all texts."""
    layers = target.layers
    found: dict[int, list[Tensor]] = {cut: [] for cut in cuts}
    final: list[Tensor] = []
    handles = []
    for cut in cuts:
        if not 0 < cut < len(layers):
            raise InputError(f"cuts must be layer indices from 1 to {len(layers) - 1} of {target.name}, not {cut}")

        def before(_: nn.Module, arguments: tuple, options: dict, kept: list = found[cut]) -> None:
            kept.append((arguments[0] if arguments else options["hidden_states"])[0].clone())

        handles.append(layers[cut].register_forward_pre_hook(before, with_kwargs=True))
    try:
        for text in texts:
            # Its last token is never fed.
            target.start(
                [*text, text[-1]], lambda session: session.observers.append(lambda _, hidden: final.append(hidden))
            ).close()
    finally:
        for handle in handles:
            handle.remove()
    return {cut: torch.cat(parts) for cut, parts in found.items()}, torch.cat(final)


__all__ = ["FinalHead", "LinearProbe", "Probe", "attention_cuts", "fit_segments"]
