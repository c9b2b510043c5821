"""The situations in which engines were seen to go wrong, and what each asks of the engine."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One situation.

    Args:
        overrides: keyword arguments of the engine, over the user's.
        ragged: rows of a batch draft differently many tokens, some none.
        rounds: how often the same prompts are generated from; the second finds the first one's prefixes.
    """

    name: str
    overrides: dict[str, Any] = field(default_factory=dict)
    ragged: bool = True
    rounds: int = 1


def oracle_cases(k: int, batch: int) -> list[Case]:
    """The cases of the oracle: drafts of ``k`` tokens, up to ``batch`` sequences together."""
    plain = {"enable_prefix_caching": False}
    # Room for a few rows' drafts and a small part of a prompt.
    tokens = max(64, 2 * batch * (k + 1))
    return [
        Case("one at a time", {**plain, "max_num_seqs": 1}, ragged=False),
        Case("batch", {**plain, "max_num_seqs": batch}),
        Case(
            "chunked prefill",
            {
                **plain,
                "max_num_seqs": batch,
                "max_num_batched_tokens": tokens,
                "enable_chunked_prefill": True,
            },
        ),
        Case("prefix caching", {"enable_prefix_caching": True, "max_num_seqs": batch}, rounds=2),
    ]


CASE_NAMES = [case.name for case in oracle_cases(1, 1)]
AS_GIVEN = "as configured"
