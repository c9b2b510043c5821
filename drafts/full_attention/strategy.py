"""The target drafts for itself with its full-attention layers alone.

When to use it: a hybrid target has no smaller sibling. Runs of recurrent layers are left out, or replaced by trained
bridges (``hybridspec bridges``). A bridge aims at the target's own hidden states, so the draft reads the target's keys
and values for everything committed: it has no prefill, and no recurrent state is touched while drafting.

What it costs: K passes through the kept layers, embeddings, final norm and head. That is a draft ratio c of about the
share of layers kept, far above a small sibling's, so acceptance must be high to pay. Without bridges most sequential
hybrids fall apart: ``hybridspec probe`` tells beforehand.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from hybridspec.decoding.draft import Draft, Drafting, Proceed
from hybridspec.decoding.proposal import Proposal
from hybridspec.decoding.sampling import Sampling, distribution
from hybridspec.drafts.full_attention.bridges import load_bridges
from hybridspec.drafts.full_attention.reduced import ReducedModel
from hybridspec.errors import IncompatiblePairError, InputError, SessionError
from hybridspec.runtime.runner import TargetRunner
from hybridspec.runtime.session import Session, flat_ids
from hybridspec.state.cache import RollbackCache
from hybridspec.state.layers import LayerState


class FullAttentionDraft(Draft):
    """Drafts with the full-attention layers of ``target``; serves no other.

    Args:
        bridges: one for each run of layers that is left out; None skips the runs.
        window: number of tokens that a bridge sees.

    Raises:
        UnsupportedLayerError: the target's layers or its rollback mode do not allow it; says why.
    """

    reads_target = True

    def __init__(self, target: TargetRunner, bridges: Sequence[nn.Module] | None = None, window: int = 1) -> None:
        self.reduced = ReducedModel(target, bridges, window)
        self.name = "full-attention" if bridges is not None else "full-attention without bridges"

    @classmethod
    def create(cls, target: TargetRunner, bridges: str = "auto") -> "FullAttentionDraft":
        """For ``target``, with the bridges of a folder; ``none`` skips the runs, and ``auto`` does so unless the target
        is the embedded one, whose bridges are shipped.
        """
        from hybridspec import embedded

        if bridges == "auto":
            bridges = str(embedded.BRIDGES) if target.path == embedded.TARGET else "none"
        if bridges == "none":
            return cls(target)
        modules, settings = load_bridges(Path(bridges), target)
        return cls(target, modules, settings.window)

    def check_pair(self, target: TargetRunner) -> None:
        if target is not self.reduced.target:
            raise IncompatiblePairError(
                f"this full-attention draft was made from another target than {target.name}: make one for each target"
            )

    def start(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        generator: torch.Generator | None = None,
        target: Session | None = None,
    ) -> "FullAttentionDrafting":
        if target is None:
            raise InputError("a full-attention draft reads its target's session, and there is none here")
        self.check_pair(target.runner)
        return FullAttentionDrafting(self.reduced, target, flat_ids(prompt)[-1], sampling, generator)


class FullAttentionDrafting(Drafting):
    """Holds the last committed token, which the target's session has not been fed; the rest is the session's."""

    def __init__(
        self,
        reduced: ReducedModel,
        session: Session,
        last: int,
        sampling: Sampling,
        generator: torch.Generator | None,
    ) -> None:
        self._reduced, self._session, self._last = reduced, session, last
        self._sampling, self._generator = sampling, generator
        self._cache = RollbackCache(reduced.target.config)

    def propose(self, k: int, proceed: Proceed | None = None) -> Proposal:
        theirs = self._session.cache
        if theirs.pending:
            raise SessionError("commit the pending block before drafting from the target's keys and values")
        history = [*self._session.tokens[-self._reduced.window :], self._last]
        position = self._session.length
        tokens: list[int] = []
        rows = []
        k = min(k, self._session.room)
        try:
            for ours, layer in zip(self._cache.attention, theirs.attention, strict=True):
                # The same buffer: what is drafted goes behind the committed columns, where the next block will go.
                ours.go_to(layer.state(0, own=False), position)
            while len(tokens) < k:
                logits = self._reduced.forward(self._cache, history[-1:], position + len(tokens), history[:-1])
                token, row = self._sampling.choose(logits, self._generator)
                tokens.append(token)
                history.append(token)
                if row is not None:
                    rows.append(row)
                if proceed is not None and len(tokens) < k and not proceed(distribution(logits, row)):
                    break
        finally:
            for ours in self._cache.attention:
                ours.go_to(LayerState(), 0)
        return Proposal(tokens, torch.cat(rows) if rows else None)

    def accept(self, accepted: int, token: int) -> None:
        self._last = token

    def snapshot(self) -> object:
        return self._last

    def restore(self, mark: object) -> None:
        self._last = mark

    def close(self) -> None:
        """Nothing is held."""
