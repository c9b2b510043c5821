"""The checkpoint's own multi-token-prediction head drafts from the target's hidden states.

When to use it: the checkpoint publishes a head (Qwen3-Next, Qwen3.5 and its MoE, Qwen4-Exp, Nemotron-H, Bailing
hybrid), for it was trained with the model and needs no second one. It costs K passes of the head per step, each one or
two decoder layers and the language-model head, and a pass over the accepted tokens, which rides on the first of the K.

A head predicts one token; more come from applying it to its own hidden states, as vLLM does, and acceptance falls with
each. Those entries never stay: after verification the head's keys and values are computed again from the target's
hidden states. Prompts pay too: the head reads each of their positions, at the first draft.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hybridspec.decoding.draft import Draft, Drafting, Proceed
from hybridspec.decoding.proposal import Proposal
from hybridspec.decoding.sampling import Sampling, distribution
from hybridspec.drafts.mtp.head import PredictionHead, watch_streams
from hybridspec.drafts.mtp.weights import load_head
from hybridspec.errors import IncompatiblePairError, InputError, SessionError
from hybridspec.runtime.runner import TargetRunner
from hybridspec.runtime.session import Session, flat_ids
from hybridspec.state.cache import RollbackCache

#: Positions that the head reads at a time when it catches up with a prompt.
CHUNK = 512


class MultiTokenPredictionDraft(Draft):
    """Drafts with the head of ``target``, which it serves alone.

    Args:
        path: a folder or file that holds the head, if not the target's own folder.
        tensors: the head by its published names, for a target made from a model object.

    Raises:
        InputError: the target's family has no head, or nothing tells where its weights are.
        UnsupportedLayerError: it has several heads, or a recurrent one.
        ModelLoadError: the checkpoint lacks the head, or it does not fit; names file and tensor.
    """

    name = "mtp"
    reads_target = True

    def __init__(
        self, target: TargetRunner, path: str | Path | None = None, tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        folder = path or target.path
        if tensors is None and folder is None:
            raise InputError(
                f"mtp reads its head from a checkpoint, and {target.name} was made from a model object: "
                "give path= or tensors="
            )
        self.target = target
        self.head = load_head(target.model, Path(folder) if tensors is None else tensors)

    @classmethod
    def create(cls, target: TargetRunner, path: str = "") -> "MultiTokenPredictionDraft":
        return cls(target, path or None)

    def check_pair(self, target: TargetRunner) -> None:
        if target.model is not self.target.model:
            raise IncompatiblePairError(
                f"this mtp head belongs to {self.target.name} and cannot draft for {target.name}: make one for it"
            )

    def start(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        generator: torch.Generator | None = None,
        target: Session | None = None,
    ) -> "MultiTokenPredictionDrafting":
        if target is None:
            raise InputError("mtp drafts from the target's hidden states, so it runs only beside our own target")
        self.check_pair(target.runner)
        return MultiTokenPredictionDrafting(self.head, target, flat_ids(prompt), sampling, generator)


class Seen(NamedTuple):
    """The target's hidden states ``[T, d]`` from position ``start`` on, as they came."""

    start: int
    pieces: tuple[Tensor, ...] = ()

    @property
    def end(self) -> int:
        return self.start + sum(map(len, self.pieces))

    def between(self, start: int, end: int) -> Tensor:
        return torch.cat(self.pieces)[start - self.start : end - self.start]

    def before(self, position: int) -> "Seen":
        if position == self.end:
            return self
        return Seen(self.start, (self.between(self.start, position),) if position > self.start else ())

    def since(self, position: int) -> "Seen":
        return Seen(position, (self.between(position, self.end),) if position < self.end else ())


class MultiTokenPredictionDrafting(Drafting):
    """Entry i of the head stands for position i: the target's hidden state there and the token after it.

    Committed entries come from hidden states of verified tokens only. Those after a step wait in ``_seen`` until the
    next draft; drafted entries stay pending in the cache until :meth:`accept`, which drops them.
    """

    def __init__(
        self,
        head: PredictionHead,
        target: Session,
        prompt: list[int],
        sampling: Sampling,
        generator: torch.Generator | None,
    ) -> None:
        self._head, self._target = head, target
        self._limit = target.runner.max_length
        self._cache: RollbackCache | None = RollbackCache(head.config)
        # Every committed token and the one that follows them.
        self._tokens = list(prompt)
        self._proposed: list[int] = []
        self._seen = Seen(0)
        # What the last committed entry gave: logits and the hidden state to go on with.
        self._last: tuple[Tensor, Tensor] | None = None
        self._sampling, self._generator = sampling, generator
        self._streams: Tensor | None = None
        decoder = target.runner.model.get_decoder()
        self._hook = watch_streams(decoder, self._see_streams) if head.streams > 1 else None
        target.observers.append(self._observe)

    def _see_streams(self, streams: Tensor) -> None:
        self._streams = streams[0]

    def _observe(self, position: int, hidden: Tensor) -> None:
        """A forward pass of the target. One that starts earlier than the last ended says what was taken back."""
        if not self._seen.start <= position <= self._seen.end:
            raise SessionError(
                f"the target went to position {position} without its draft, which follows from {self._seen.start} to "
                f"{self._seen.end}: restore both"
            )
        seen = self._seen.before(position)
        self._seen = Seen(seen.start, (*seen.pieces, hidden if self._streams is None else self._streams))

    def propose(self, k: int, proceed: Proceed | None = None) -> Proposal:
        tokens: list[int] = []
        rows = []
        last = len(self._tokens) - 1
        k = min(k, self._limit - 1 - last)
        # A first token has no position before it whose hidden state would predict.
        if last > 0 and k > 0:
            self._open().abort()
            self._catch_up(last)
            logits, hidden = self._last
            while len(tokens) < k:
                token, row = self._sampling.choose(logits, self._generator)
                tokens.append(token)
                if row is not None:
                    rows.append(row)
                if len(tokens) == k or (proceed is not None and not proceed(distribution(logits, row))):
                    break
                logits, hidden = self._run([token], hidden)
        self._proposed = tokens
        return Proposal(tokens, torch.cat(rows) if rows else None)

    def _catch_up(self, end: int) -> None:
        """Commits the entries of all positions before ``end``."""
        cache = self._open()
        if self._seen.end < end:
            raise SessionError(f"the target was fed {self._seen.end} tokens and its draft told of {end}")
        if cache.length < end:
            tokens, hidden = self._tokens[cache.length + 1 : end + 1], self._seen.between(cache.length, end)
            for start in range(0, len(tokens), CHUNK):
                part = tokens[start : start + CHUNK]
                self._last = self._run(part, hidden[start : start + CHUNK])
                cache.commit([range(len(part))])
        self._seen = self._seen.since(end)

    @torch.inference_mode()
    def _run(self, tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Pending entries of ``tokens`` after hidden states ``[T, d]``.

        Returns:
            Of the last entry: logits ``[1, vocab]``, and the hidden state ``[1, d]`` to go on with.
        """
        cache = self._open()
        cache.begin_block()
        try:
            ids = torch.tensor([tokens], device=hidden.device)
            read, following = self._head(ids, hidden.unsqueeze(0), cache.length + cache.pending, cache)
            logits = self._head.logits(read[0, -1:])
            cache.end_block(len(tokens))
        except BaseException:
            cache.abort()
            raise
        return logits, following[0, -1:]

    def accept(self, accepted: int, token: int) -> None:
        self._open().abort()
        self._tokens += [*self._proposed[:accepted], token]
        self._proposed = []

    def snapshot(self) -> object:
        return self._open().snapshot(), tuple(self._tokens), self._seen, self._last

    def restore(self, mark: object) -> None:
        state, tokens, self._seen, self._last = mark
        self._open().restore(state)
        self._tokens, self._proposed = list(tokens), []

    def close(self) -> None:
        if self._observe in self._target.observers:
            self._target.observers.remove(self._observe)
        if self._hook is not None:
            self._hook.remove()
        self._cache, self._seen, self._last, self._streams = None, Seen(0), None, None

    def _open(self) -> RollbackCache:
        if self._cache is None:
            raise SessionError("this draft is closed: start a new one")
        return self._cache
