"""Drafts by looking the last tokens up in the text so far, and copying what followed them.

When to use it: the output repeats its input or itself, as in edits of code, summaries, extraction, logs. It costs
next to nothing per step (no model, no memory but the tokens), so a miss costs only the wider verify pass; where
nothing repeats it proposes nothing and decoding is plain. The idea is prompt lookup decoding (Saxena, 2023), which
transformers and vLLM ("ngram") have too.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional

from hybridspec.decoding.draft import Draft, Drafting, Proceed
from hybridspec.decoding.proposal import Proposal
from hybridspec.decoding.sampling import Sampling
from hybridspec.decoding.target import Target
from hybridspec.errors import InputError
from hybridspec.runtime.session import Session, flat_ids


class PromptLookupDraft(Draft):
    """Looks for the longest n-gram first, and among its occurrences takes the latest.

    Args:
        longest, shortest: n-gram lengths to look for, in tokens.
        window: how many tokens back an occurrence may lie; 0 is no limit.
    """

    has_doubts = False

    def __init__(self, longest: int = 4, shortest: int = 2, window: int = 0) -> None:
        if not 1 <= shortest <= longest:
            raise InputError(f"n-grams need 1 <= shortest <= longest, not shortest {shortest} and longest {longest}")
        if window < 0:
            raise InputError(f"window must be 0 (no limit) or more tokens, not {window}")
        self.name = "prompt-lookup"
        self.lengths = range(longest, shortest - 1, -1)
        self.window = window

    @classmethod
    def create(cls, target: Target, longest: int = 4, shortest: int = 2, window: int = 0) -> "PromptLookupDraft":
        return cls(longest, shortest, window)

    def start(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        generator: torch.Generator | None = None,
        target: Session | None = None,
    ) -> "PromptLookupDrafting":
        return PromptLookupDrafting(self, flat_ids(prompt), sampling)


class PromptLookupDrafting(Drafting):
    """The committed tokens, and where each n-gram of them ends."""

    def __init__(self, draft: PromptLookupDraft, prompt: list[int], sampling: Sampling) -> None:
        self._lengths, self._window, self._sampling = draft.lengths, draft.window, sampling
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._proposed: list[int] = []
        self._extend(prompt)

    def _extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._tokens.append(token)
            for gram in self._last_grams():
                self._ends.setdefault(gram, []).append(len(self._tokens))

    def _last_grams(self) -> list[tuple[int, ...]]:
        return [tuple(self._tokens[-n:]) for n in self._lengths if n <= len(self._tokens)]

    def _occurrence(self) -> int | None:
        """Where what follows the latest earlier occurrence of the longest known n-gram begins."""
        here = len(self._tokens)
        for gram in self._last_grams():
            # The last end is the n-gram itself.
            ends = self._ends[gram]
            if len(ends) > 1 and (not self._window or here - ends[-2] <= self._window):
                return ends[-2]
        return None

    def propose(self, k: int, proceed: Proceed | None = None) -> Proposal:
        begin = self._occurrence()
        if begin is None:
            self._proposed = []
            return Proposal()
        text = list(self._tokens)
        for i in range(k):
            # Past the present end it copies its own copy: a text that repeats itself goes on repeating.
            text.append(text[begin + i])
        self._proposed = text[len(self._tokens) :]
        if self._sampling.greedy:
            return Proposal(self._proposed)
        # A certain choice is a distribution too; as narrow as the tokens allow, the rest of the vocabulary is zero.
        return Proposal(self._proposed, functional.one_hot(torch.tensor(self._proposed)).float())

    def accept(self, accepted: int, token: int) -> None:
        self._extend([*self._proposed[:accepted], token])
        self._proposed = []

    def snapshot(self) -> int:
        return len(self._tokens)

    def restore(self, mark: int) -> None:
        while len(self._tokens) > mark:
            for gram in self._last_grams():
                self._ends[gram].pop()
            self._tokens.pop()
        self._proposed = []

    def close(self) -> None:
        self._tokens, self._ends = [], {}
