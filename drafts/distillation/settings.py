"""What a distillation is to make, and how it tells how far it is."""

from collections.abc import Callable
from dataclasses import dataclass

from hybridspec.errors import InputError

#: ``progress(stage, share of the stage that is done, what is known)``.
Progress = Callable[[str, float, str], None]


@dataclass(frozen=True)
class DistillationSettings:
    """What to make.

    Args:
        layers: how many of the target's layers the draft gets, chosen by
            :func:`~hybridspec.drafts.distillation.layer_choice.choose_layers`; None: a twelfth.
        keep_layers: their numbers, instead.
        minutes: time for the target's outputs and the training, over all sittings.
        k: draft length of the held-out measurement.
        rows: windows of corpus text in a step; as many of the target's outputs come beside them.
        length: tokens of a window.
        rate: factor on the learning rates.
        prompts: held-out prompts to decode, each by ``new_tokens``.
        train_shared: train embeddings, norm and head too, instead of keeping the target's.
    """

    layers: int | None = None
    keep_layers: tuple[int, ...] | None = None
    minutes: float = 10.0
    k: int = 4
    rows: int = 2
    length: int = 256
    seed: int = 0
    rate: float = 1.0
    prompts: int = 14
    new_tokens: int = 48
    train_shared: bool = False

    def __post_init__(self) -> None:
        for name, least in (("k", 1), ("rows", 1), ("length", 8), ("prompts", 1), ("new_tokens", 2), ("seed", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name in ("minutes", "rate"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.layers is not None and self.keep_layers is not None:
            raise InputError("give a number of layers or the layers to keep, not both")

    def identity(self) -> dict:
        """What a call must have in common with an earlier one; budget and measurement may differ."""
        return {name: getattr(self, name) for name in ("rows", "length", "seed", "rate", "train_shared")}
