"""What vLLM's ``/metrics`` says: cumulative counters of a moment, or their differences over a span of time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from hybridspec.acceptance_counts import AcceptanceCounts

#: vLLM's names begin with this, and counters end in the other, which older versions left out.
PREFIX, TOTAL = "vllm:", "_total"
#: A histogram with one entry for each row.
ROWS = "inter_token_latency_seconds"
BY_POSITION = "spec_decode_num_accepted_tokens_per_pos"


@dataclass(frozen=True)
class ServerCounters:
    """Counters of one moment, or their differences over a span; sums over the engines of the server.

    Attributes:
        requests: finished ones.
        tokens: generated.
        rows: steps of a request behind its first token; None where the server does not tell.
        decode_seconds: of all rows; requests that run together count each their own.
        drafts, drafted: steps of a request that had a draft, and drafted tokens.
        accepted: drafted tokens that were accepted, by position. As many positions as the server's K; () without
            speculation.
        accepted_tokens: all of them.
    """

    requests: int
    tokens: int
    rows: int | None
    decode_seconds: float
    drafts: int
    drafted: int
    accepted: tuple[int, ...]
    accepted_tokens: int

    @classmethod
    def read(cls, text: str, model: str | None = None) -> "ServerCounters":
        """From the text format of Prometheus; of one model if the server has several. Lines in another format count
        for nothing.
        """
        sums: dict[str, float] = {}
        positions: dict[int, float] = {}
        for name, labels, value in _samples(text):
            if model is not None and labels.get("model_name", model) != model:
                continue
            if name == BY_POSITION:
                place = int(labels["position"])
                positions[place] = positions.get(place, 0.0) + value
            else:
                sums[name] = sums.get(name, 0.0) + value
        return cls(
            int(sums.get("request_success", 0)),
            int(sums.get("generation_tokens", 0)),
            int(sums[f"{ROWS}_count"]) if f"{ROWS}_count" in sums else None,
            sums.get(f"{ROWS}_sum", 0.0),
            int(sums.get("spec_decode_num_drafts", 0)),
            int(sums.get("spec_decode_num_draft_tokens", 0)),
            tuple(int(positions.get(i, 0)) for i in range(max(positions, default=-1) + 1)),
            int(sums.get("spec_decode_num_accepted_tokens", 0)),
        )

    def since(self, before: "ServerCounters") -> "ServerCounters":
        """The span between two moments."""
        earlier = dict(enumerate(before.accepted))
        return ServerCounters(
            self.requests - before.requests,
            self.tokens - before.tokens,
            None if self.rows is None else self.rows - (before.rows or 0),
            self.decode_seconds - before.decode_seconds,
            self.drafts - before.drafts,
            self.drafted - before.drafted,
            tuple(n - earlier.get(i, 0) for i, n in enumerate(self.accepted)),
            self.accepted_tokens - before.accepted_tokens,
        )

    @property
    def counts(self) -> AcceptanceCounts:
        """Of the steps that had a draft: the server drafts all K tokens or none."""
        return AcceptanceCounts(self.drafts, (self.drafts,) * len(self.accepted), self.accepted)

    def to_dict(self) -> dict[str, Any]:
        """What concerns speculation."""
        return {
            "drafts": self.drafts,
            "draft_tokens": self.drafted,
            "accepted_tokens": self.accepted_tokens,
            "acceptance_by_position": self.counts.by_position if self.drafts else [],
        }


def prefix_caching(text: str) -> bool | None:
    """Whether the server caches prefixes; None where it does not say."""
    labels = next((labels for name, labels, _ in _samples(text) if name == "cache_config_info"), {})
    told = labels.get("enable_prefix_caching")
    return None if told is None else told == "True"


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name without prefix and ending, labels and value of each of vLLM's samples.

    Line by line, so that one that cannot be read hides no other.
    """
    for line in text.splitlines():
        if not line.startswith(PREFIX):
            continue
        try:
            samples = [sample for family in text_string_to_metric_families(line) for sample in family.samples]
        except ValueError:
            continue
        for sample in samples:
            yield sample.name.removeprefix(PREFIX).removesuffix(TOTAL), sample.labels, sample.value
