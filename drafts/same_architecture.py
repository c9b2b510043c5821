"""A smaller model of the target's family drafts token by token, with its own exact rollback.

When to use it: a trained sibling exists (same tokenizer). It costs K forward passes of the small model per step, so
it pays where its step is under about a tenth of the target's. A hybrid draft keeps recurrent state, which must be
rolled back like the target's: a stale draft state never shows in the output, only as low acceptance.
"""

from collections.abc import Sequence

import torch

from hybridspec.drafts.base import Draft, Drafting, Proposal
from hybridspec.errors import IncompatiblePairError
from hybridspec.runner import TargetRunner
from hybridspec.sampling import Sampling, draw
from hybridspec.session import Session


class SameArchitectureDraft(Draft):
    """Drafts with ``runner``, a small model; :class:`TargetRunner` serves drafts as it serves targets."""

    def __init__(self, runner: TargetRunner) -> None:
        self.runner = runner
        self.name = runner.name
        self._checked: TargetRunner | None = None

    def start(
        self, prompt: Sequence[int], sampling: Sampling, generator: torch.Generator | None = None
    ) -> "SameArchitectureDrafting":
        return SameArchitectureDrafting(self.runner.start(prompt), prompt[-1], sampling, generator)

    def check_pair(self, target: TargetRunner) -> None:
        """Raises :class:`IncompatiblePairError` unless both models number the same tokens alike."""
        if target is self._checked:
            return
        if self.runner.vocab_size != target.vocab_size:
            raise IncompatiblePairError(
                f"vocab_size differs: {target.vocab_size} in target {target.name}, "
                f"{self.runner.vocab_size} in draft {self.name}"
            )
        if target.tokenizer is None or self.runner.tokenizer is None:
            self._checked = target
            return
        ours, theirs = target.tokenizer.get_vocab(), self.runner.tokenizer.get_vocab()
        if ours != theirs:
            differing = sorted(t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t))
            first = differing[0]
            raise IncompatiblePairError(
                f"the tokenizers of target {target.name} and draft {self.name} differ in {len(differing)} tokens, "
                f"for example {first!r}: id {ours.get(first)} in the target, {theirs.get(first)} in the draft"
            )
        self._checked = target


class SameArchitectureDrafting(Drafting):
    """The draft's session lags by the tokens in ``_next``: those committed that it has not been fed."""

    def __init__(
        self, session: Session, last_token: int, sampling: Sampling, generator: torch.Generator | None
    ) -> None:
        self._session = session
        self._next = [last_token]
        self._fed = 0
        self._proposed: list[int] = []
        self._sampling, self._generator = sampling, generator

    def propose(self, k: int) -> Proposal:
        tokens: list[int] = []
        rows = []
        block = self._next
        k = min(k, self._session.room - len(block) + 1)
        while len(tokens) < k:
            logits = self._session.verify(block)[-1:]
            self._fed += len(block)
            if self._sampling.greedy:
                token = int(logits.argmax())
            else:
                rows.append(self._sampling.probabilities(logits))
                token = draw(rows[-1][0], self._generator)
            tokens.append(token)
            block = [token]
        self._proposed = tokens
        return Proposal(tokens, torch.cat(rows) if rows else None)

    def accept(self, accepted: int, token: int) -> None:
        committed = self._next + self._proposed[:accepted]
        keep = min(len(committed), self._fed)
        self._session.commit(keep)
        self._next = [*committed[keep:], token]
        self._fed, self._proposed = 0, []

    def snapshot(self) -> object:
        return self._session.snapshot(), list(self._next)

    def restore(self, mark: object) -> None:
        session_mark, following = mark
        self._session.restore(session_mark)
        self._next, self._fed, self._proposed = list(following), 0, []

    def close(self) -> None:
        self._session.close()
