"""A way of decoding: which draft, which draft-length rule, and how its blocks are verified."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridspec.decoding.acceptance import Verification
from hybridspec.decoding.draft import Draft
from hybridspec.decoding.draft_length import DraftLength
from hybridspec.decoding.options import DecodeOptions
from hybridspec.decoding.verifier import Verifier, WholeBlock
from hybridspec.drafts.full_attention.token_probes import fit_segments
from hybridspec.drafts.registry import make_draft, make_length
from hybridspec.runtime.runner import TargetRunner


@dataclass(frozen=True)
class Configuration:
    """``draft`` and ``length`` as :func:`~hybridspec.drafts.registry.make_draft` and ``make_length`` read them."""

    draft: str
    length: str
    segments: bool = False
    verification: Verification = "token"

    @property
    def plain(self) -> bool:
        return self.length == "0"

    @property
    def complexity(self) -> int:
        """Plain decoding, then a fixed K, then a rule that adapts, then cut passes: of two that are as fast, the
        simpler is kept.
        """
        return 0 if self.plain else 1 + (not self.length.isdecimal()) + 2 * self.segments

    @property
    def label(self) -> str:
        """For tables: the draft, the rule, and what differs from the defaults."""
        if self.plain:
            return "plain decoding"
        length = f"K={self.length}" if self.length.isdecimal() else self.length
        extra = [", segmented"] * self.segments + [", block verification"] * (self.verification == "block")
        return f"{self.draft} {length}{''.join(extra)}"


#: Decoding without a draft.
PLAIN = Configuration("", "0")


class Bench:
    """A target and what its configurations need: each draft is loaded once, probes are fitted once.

    Args:
        texts: token sequences that probes for segmented verification are fitted to.
        drafts: those that are loaded already, by spec.
    """

    def __init__(
        self, target: TargetRunner, texts: Sequence[Sequence[int]] = (), drafts: Mapping[str, Draft] | None = None
    ) -> None:
        self.target, self.texts = target, texts
        self._drafts: dict[str, Draft] = dict(drafts or {})
        self._segmented: Verifier | None = None

    def draft(self, spec: str) -> Draft:
        if spec not in self._drafts:
            self._drafts[spec] = make_draft(spec, self.target)
        return self._drafts[spec]

    def length(self, configuration: Configuration) -> DraftLength:
        """A fresh rule, which has learnt nothing yet."""
        return make_length(configuration.length)

    def verifier(self, configuration: Configuration) -> Verifier:
        if not configuration.segments:
            return WholeBlock()
        if self._segmented is None:
            self._segmented = fit_segments(self.target, self.texts)
        return self._segmented

    def options(self, configuration: Configuration, max_new_tokens: int) -> DecodeOptions:
        """Those of the configuration, with a fresh rule."""
        return DecodeOptions(
            self.length(configuration),
            max_new_tokens,
            verification=configuration.verification,
            verifier=self.verifier(configuration),
        )
