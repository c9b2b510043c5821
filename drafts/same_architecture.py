"""A smaller model drafts token by token, with its own exact rollback.

When to use it: a trained sibling with the same tokenizer exists, a hybrid or a dense model, of the target's family or
another (``hybridspec distill`` makes one). It costs K forward passes of the small model per step, so it pays where its
step is under about a tenth of the target's. A hybrid draft keeps recurrent state, which must be rolled back like the
target's: a stale draft state never shows in the output, only as low acceptance.
"""

from collections.abc import Sequence

import torch

from hybridspec import embedded
from hybridspec.decoding.draft import Draft, Drafting, Proceed
from hybridspec.decoding.proposal import Proposal
from hybridspec.decoding.sampling import Sampling, distribution
from hybridspec.decoding.target import Target
from hybridspec.errors import IncompatiblePairError, InputError
from hybridspec.runtime.runner import TargetRunner
from hybridspec.runtime.session import Session, flat_ids


class SameArchitectureDraft(Draft):
    """Drafts with ``runner``, a small model; :class:`TargetRunner` serves drafts as it serves targets."""

    def __init__(self, runner: TargetRunner) -> None:
        if not isinstance(runner, TargetRunner):
            raise InputError(f"a draft model runs in a TargetRunner: wrap the {type(runner).__name__} in one")
        self.runner = runner
        self.name = runner.name
        self._checked: Target | None = None

    @classmethod
    def create(cls, target: Target, path: str) -> "SameArchitectureDraft":
        """Loads the draft from a checkpoint folder, or an embedded one by its name, to run like the target."""
        return cls(TargetRunner.from_pretrained(embedded.DRAFTS.get(path, path), options=target.options))

    def start(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        generator: torch.Generator | None = None,
        target: Session | None = None,
    ) -> "SameArchitectureDrafting":
        shared = self.runner.vocab_size
        if target is not None:
            shared = min(shared, target.runner.vocab_size)
        prompt = [min(token, shared - 1) for token in flat_ids(prompt)]
        return SameArchitectureDrafting(self.runner.start(prompt), prompt[-1], shared, sampling, generator)

    def check_pair(self, target: Target) -> None:
        """Raises :class:`IncompatiblePairError` unless both models number the same tokens alike.

        Where both have a tokenizer, a different number of rows beyond it is padding, which is no difference.
        """
        if target is self._checked:
            return
        unknown = target.tokenizer is None or self.runner.tokenizer is None
        if self.runner.vocab_size != target.vocab_size and (
            unknown or len(target.tokenizer) > min(target.vocab_size, self.runner.vocab_size)
        ):
            raise IncompatiblePairError(
                f"vocab_size differs: {target.vocab_size} in target {target.name}, "
                f"{self.runner.vocab_size} in draft {self.name}"
            )
        if unknown:
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
    """The draft's session lags by the tokens in ``_next``: those committed that it has not been fed.

    ``vocabulary`` is what both models know: rows beyond it are never drafted, and a token beyond it (padding that the
    target chose) is fed as the last one within.
    """

    def __init__(
        self,
        session: Session,
        last_token: int,
        vocabulary: int,
        sampling: Sampling,
        generator: torch.Generator | None,
    ) -> None:
        self._session, self._vocabulary = session, vocabulary
        self._next = [last_token]
        self._fed = 0
        self._proposed: list[int] = []
        self._sampling, self._generator = sampling, generator

    def propose(self, k: int, proceed: Proceed | None = None) -> Proposal:
        tokens: list[int] = []
        rows = []
        block = self._next
        k = min(k, self._session.room - len(block) + 1)
        while len(tokens) < k:
            logits = self._session.verify(block)[-1:, : self._vocabulary]
            self._fed += len(block)
            token, row = self._sampling.choose(logits, self._generator)
            tokens.append(token)
            if row is not None:
                rows.append(row)
            if proceed is not None and len(tokens) < k and not proceed(distribution(logits, row)):
                break
            block = [token]
        self._proposed = tokens
        return Proposal(tokens, torch.cat(rows) if rows else None)

    def accept(self, accepted: int, token: int) -> None:
        committed = self._next + self._proposed[:accepted]
        keep = min(len(committed), self._fed)
        self._session.commit(keep)
        self._next = [*committed[keep:], min(token, self._vocabulary - 1)]
        self._fed, self._proposed = 0, []

    def snapshot(self) -> object:
        return self._session.snapshot(), list(self._next)

    def restore(self, mark: object) -> None:
        session_mark, following = mark
        self._session.restore(session_mark)
        self._next, self._fed, self._proposed = list(following), 0, []

    def close(self) -> None:
        self._session.close()
