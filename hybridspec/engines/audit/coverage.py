"""What an oracle did, from its log: which numbers of accepted tokens occurred, and which kinds of batches."""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Coverage:
    """Counts of a run.

    Args:
        accepted: number of accepted tokens of a full block -> steps.
        empty: steps of a row that had no draft.
        ragged: calls in which rows drafted differently many tokens.
        lost: steps of a row after its history had left the true one.
    """

    accepted: dict[int, int]
    empty: int
    ragged: int
    lost: int
    k: int

    @property
    def missing(self) -> list[int]:
        return [n for n in range(self.k + 1) if not self.accepted.get(n)]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"missing": self.missing}


def read_coverage(log: Path, k: int) -> Coverage:
    """From what :class:`hybridspec_audit_oracle.Oracle` wrote."""
    accepted: Counter[int] = Counter()
    empty = ragged = lost = 0
    for line in log.read_text().splitlines() if log.exists() else ():
        rows = json.loads(line)
        for sequence, drafted, kept, now in rows:
            lost += sequence < 0
            if sequence >= 0:
                empty += now == 0
                if drafted == k:
                    accepted[kept] += 1
        ragged += len({now for _, _, _, now in rows}) > 1
    return Coverage(dict(sorted(accepted.items())), empty, ragged, lost, k)
