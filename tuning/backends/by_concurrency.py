"""The best K for each number of requests at a time, as profiles hold it."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from hybridspec.tuning.configuration import PLAIN
from hybridspec.tuning.decision import decide
from hybridspec.tuning.measurement import Measurement
from hybridspec.tuning.profile_building import describe_acceptance, largest_k
from hybridspec.tuning.study import WorkloadResult


def one_draft(results: Mapping[int, WorkloadResult]) -> str | None:
    """The draft that wins at most concurrencies, of equals the one at the lowest; None if plain decoding always wins.

    An engine serves all of them with one draft.
    """
    winners = [r.answer.configuration.draft for _, r in sorted(results.items()) if r.answer]
    counts = Counter(draft for draft in winners if draft)
    return max(counts, key=counts.__getitem__) if counts else None


def table(results: Mapping[int, WorkloadResult]) -> dict[str, dict[str, Any]] | None:
    """Concurrency -> K, speed-up and acceptance with the draft of :func:`one_draft`; None as long as nothing was
    measured.
    """
    draft = one_draft(results)
    rows = {str(c): entry(result, draft) for c, result in sorted(results.items()) if result.answer}
    return rows or None


def entry(result: WorkloadResult, draft: str | None) -> dict[str, Any]:
    """What one concurrency came to; another draft that is faster there is named under ``faster``."""
    own = {c: samples for c, samples in result.samples.items() if c.draft == draft}
    answer = decide(own) if own else None
    # Where the draft was not tried, it had no prospect.
    chosen, reason = (answer.configuration, answer.reason) if answer else (PLAIN, result.answer.reason)
    best = result.measurements.get(chosen)
    any_measured = next(iter(result.measurements.values()), None)
    surveyed = result.survey.drafts.get(draft) if result.survey and draft else None
    row = {
        "k": largest_k(chosen),
        "draft": chosen.draft or None,
        "length": chosen.length,
        **speed(best, any_measured),
        "acceptance": describe_acceptance(surveyed) if surveyed else None,
        "predicted": result.survey.predicted.get(chosen) if result.survey else None,
        "reason": reason,
    }
    overall = result.answer.configuration
    if overall.draft and overall.draft != draft:
        row["faster"] = {"draft": overall.draft, "k": largest_k(overall), **speed(result.best, None)}
    return row


def speed(best: Measurement | None, plain: Measurement | None) -> dict[str, Any]:
    """``best`` is None for plain decoding; ``plain`` is any measurement that holds its speed."""
    rate = best.tokens_per_second if best else plain.plain_tokens_per_second if plain else None
    return {
        "speedup": best.speedup if best else 1.0,
        "interval_90": list(best.interval) if best else None,
        "acceptance_length": best.acceptance_length if best else None,
        "tokens_per_second": rate,
    }
