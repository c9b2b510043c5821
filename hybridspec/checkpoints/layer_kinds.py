"""Kinds of layers by transformers' names, and sequences of them.

A sequence is read from a config (:mod:`hybridspec.checkpoints.config_layers`) or from the names of tensors
(:mod:`hybridspec.checkpoints.tensor_layers`): plain Python on plain data. Nothing is built, no weight is read, and a
model type that transformers does not know is read all the same.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

ATTENTION = frozenset(
    {
        "full_attention",
        "sliding_attention",
        "chunked_attention",
        "window_attention",
        "indexed_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "minimax_m3_sparse",
        "reference_sliding_attention",
    }
)
HYBRID = frozenset({"hybrid", "hybrid_sliding"})
RECURRENT = frozenset({"linear_attention"})
#: Every name that a sequence may hold.
KNOWN = ATTENTION | HYBRID | RECURRENT | {"conv", "mlp", "moe", "dense", "sparse"}


@dataclass(frozen=True)
class LayerLayout:
    """A layer sequence.

    Attributes:
        kinds: one transformers layer type per layer; None for a layer that could not be told.
        source: the field or rule that it was read from.
        mixers: what mixes tokens in each layer, by its tensors; empty if read from a config.
    """

    kinds: tuple[str | None, ...]
    source: str
    mixers: tuple[str | None, ...] = ()

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def compact(self) -> str:
        """Runs, with a repeated pattern named once: ``6 x (3 linear_attention + 1 full_attention)``."""
        return compact(self.kinds)

    def counts(self) -> dict[str, int]:
        return dict(Counter(kind or "unknown" for kind in self.kinds))

    @property
    def recurrent(self) -> bool:
        """Some layer keeps a state or a window that a cache crop does not take back."""
        return any(kind in RECURRENT | HYBRID | {"conv"} for kind in self.kinds)


def runs(kinds: Sequence[str | None]) -> list[tuple[str, int]]:
    """Neighbours of one kind, counted."""
    found: list[tuple[str, int]] = []
    for kind in kinds:
        name = kind or "unknown"
        if found and found[-1][0] == name:
            found[-1] = (name, found[-1][1] + 1)
        else:
            found.append((name, 1))
    return found


def compact(kinds: Sequence[str | None]) -> str:
    best = " + ".join(f"{count} {kind}" for kind, count in runs(kinds)) or "no layers"
    for period in range(2, len(kinds) // 2 + 1):
        repeats = len(kinds) // period
        if list(kinds[: period * repeats]) == list(kinds[:period]) * repeats:
            pattern = " + ".join(f"{count} {kind}" for kind, count in runs(kinds[:period]))
            rest = runs(kinds[period * repeats :])
            text = " + ".join([f"{repeats} x ({pattern})", *(f"{count} {kind}" for kind, count in rest)])
            # The shortest period comes first; a single run repeats nothing.
            return text if len(runs(kinds)) > 1 else best
    return best


def agree(config: str | None, tensors: str | None) -> bool:
    """Whether a layer type of a config and one that tensor names imply can be the same layer."""
    if config is None or tensors is None or config == tensors:
        return True
    if config in HYBRID and tensors == "hybrid":
        return True
    if {config, tensors} & {"compressed_sparse_attention", "heavily_compressed_attention"}:
        return tensors == "full_attention" and config == "sliding_attention"
    if config in {"dense", "sparse"}:
        return tensors in {"mlp", "moe"}
    # An indexer shows in the names; that it is missing or idle is told by the tensors one by one.
    return config in ATTENTION and tensors in ATTENTION


def first_difference(config: Sequence[str | None], tensors: Sequence[str | None]) -> int | None:
    """The first index where the two cannot be the same layer, or where one of them ends."""
    for index, (theirs, ours) in enumerate(zip(config, tensors, strict=False)):
        if not agree(theirs, ours):
            return index
    return None if len(config) == len(tensors) else min(len(config), len(tensors))
