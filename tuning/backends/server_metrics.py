"""What vLLM's ``/metrics`` says of a span of time: differences of its cumulative counters."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

SAMPLE = re.compile(r"^(vllm:\w+)(?:\{(.*)\})?\s+([-+.\deE]+|[+-]?Inf|NaN)\s*(?:\d+)?$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
#: Counters end in this in the text format of Prometheus, and older versions left it out.
TOTAL = "_total"
#: A histogram with one entry for each row.
ROWS = "inter_token_latency_seconds"


@dataclass(frozen=True)
class Totals:
    """Counters of one moment, or their differences over a span; sums over the engines of the server.

    Attributes:
        requests: finished ones.
        tokens: generated.
        rows: steps of a request behind its first token; None where the server does not tell.
        decode_seconds: of all rows; requests that run together count each their own.
        drafts, drafted: steps of a request that had a draft, and drafted tokens.
        accepted: drafted tokens that were accepted, by position. As many positions as the server's K; () without
            speculation.
    """

    requests: int
    tokens: int
    rows: int | None
    decode_seconds: float
    drafts: int
    drafted: int
    accepted: tuple[int, ...]

    @classmethod
    def read(cls, text: str, model: str | None = None) -> "Totals":
        """From the text format of Prometheus; of one model if the server has several."""
        sums: dict[str, float] = {}
        positions: dict[int, float] = {}
        for name, labels, value in SAMPLE.findall(text):
            found = dict(LABEL.findall(labels))
            if model is not None and found.get("model_name", model) != model:
                continue
            name = name.removeprefix("vllm:").removesuffix(TOTAL)
            if name == "spec_decode_num_accepted_tokens_per_pos":
                place = int(found["position"])
                positions[place] = positions.get(place, 0.0) + float(value)
            else:
                sums[name] = sums.get(name, 0.0) + float(value)
        return cls(
            int(sums.get("request_success", 0)),
            int(sums.get("generation_tokens", 0)),
            int(sums[f"{ROWS}_count"]) if f"{ROWS}_count" in sums else None,
            sums.get(f"{ROWS}_sum", 0.0),
            int(sums.get("spec_decode_num_drafts", 0)),
            int(sums.get("spec_decode_num_draft_tokens", 0)),
            tuple(int(positions.get(i, 0)) for i in range(max(positions, default=-1) + 1)),
        )

    def since(self, before: "Totals") -> "Totals":
        """The span between two moments."""
        earlier: Mapping[int, int] = dict(enumerate(before.accepted))
        return Totals(
            self.requests - before.requests,
            self.tokens - before.tokens,
            None if self.rows is None else self.rows - (before.rows or 0),
            self.decode_seconds - before.decode_seconds,
            self.drafts - before.drafts,
            self.drafted - before.drafted,
            tuple(n - earlier.get(i, 0) for i, n in enumerate(self.accepted)),
        )
