"""How good a draft is on held-out prompts: real speculative decoding, and argmax agreement."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from hybridspec.decoding.loop import decode
from hybridspec.decoding.step import Statistics
from hybridspec.drafts.distillation.domain_score import score
from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.runtime.runner import TargetRunner


@dataclass(frozen=True)
class HeldOut:
    """Figures of one draft on held-out text.

    ``acceptance_rate``, ``acceptance_length`` and ``acceptance_by_position`` are those of greedy decoding with draft
    length ``k``; ``agreement`` is the share of held-out positions where target and draft have the same argmax, and
    ``overlap`` the mean of 1 - total variation, which is acceptance of one token at temperature 1. Losses are those of
    the text, in nats per token.
    """

    k: int
    prompts: int
    tokens: int
    acceptance_rate: float | None
    acceptance_length: float
    acceptance_by_position: list[float]
    acceptance_by_source: dict[str, float | None]
    agreement: float
    overlap: float
    target_loss: float
    draft_loss: float


def measure(
    target: TargetRunner,
    draft: TargetRunner,
    prompts: Sequence[tuple[str, list[int]]],
    windows: Tensor,
    k: int,
    max_new_tokens: int,
    progress: Callable[[str, float], None] = lambda *_: None,
) -> HeldOut:
    """Decodes ``prompts`` (source, token ids) greedily; compares both models on ``windows [n, T + 1]``."""
    strategy = SameArchitectureDraft(draft)
    by_source: dict[str, Statistics] = {}
    tokens = 0
    for number, (source, prompt) in enumerate(prompts):
        progress(f"held-out prompt {number + 1} of {len(prompts)}", number / len(prompts))
        statistics = by_source.setdefault(source, Statistics())
        options = {"k": k, "max_new_tokens": max_new_tokens, "statistics": statistics}
        tokens += sum(1 for _ in decode(target, prompt, draft=strategy, **options))
    pooled = Statistics([step for statistics in by_source.values() for step in statistics.steps])
    scores = score(target.model, {"draft": draft.model}, windows, bytes_per_token=0.0)
    return HeldOut(
        k=k,
        prompts=len(prompts),
        tokens=tokens,
        acceptance_rate=pooled.acceptance_rate,
        acceptance_length=pooled.acceptance_length,
        acceptance_by_position=pooled.acceptance_by_position(),
        acceptance_by_source={source: statistics.acceptance_rate for source, statistics in by_source.items()},
        agreement=scores.agreement["draft"],
        overlap=scores.acceptance["draft"],
        target_loss=scores.target_loss,
        draft_loss=scores.draft_loss["draft"],
    )
