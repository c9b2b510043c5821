"""Segmented verification: the target's pass over a block is cut between layers, and a doomed tail is dropped early.

At each cut a probe guesses, from the hidden states so far, what the target will say after each token of the block. A
drafted token that it finds too unlikely is dropped with all that follow it, before the remaining layers run; the layers
below are rolled back to what the others processed. It helps where a draft is wrong often and a wide verify pass costs
much more than a narrow one; on a memory-bound machine it cannot.

Under greedy decoding a token may be dropped freely: its position gets the target's choice anyway. Under sampling a
token that was drawn from q is dropped because of its own value, so those that stay are draws from the thinned proposal
r(x) = q(x) f(x) / sum q f, with f(x) = 1 where the probe lets x through, else 0; acceptance must use r in place of q,
and a dropped position gets a fresh sample of the target (docs/exactness.md).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hybridspec.decoding.proposal import Proposal
from hybridspec.decoding.verifier import Verifier
from hybridspec.errors import InputError, UnsupportedLayerError
from hybridspec.runtime.runner import TargetRunner
from hybridspec.runtime.session import Session

#: ``(cut, hidden [T, d]) -> logits [T, vocab]`` up to a monotone change of each row.
Probe = Callable[[int, Tensor], Tensor]


class SegmentedVerification(Verifier):
    """Cuts for one target, a probe, and how sure the probe must be.

    Args:
        probe: see :mod:`hybridspec.drafts.full_attention.token_probes` for the target's own final norm and
            head, and one fitted to it.
        cuts: indices of the decoder layers before which a block may be cut.
        margins: a drafted token is dropped if its probe logit lies more than this below the row's largest; one for
            all cuts, or one for each.

    Raises:
        InputError: cuts or margins are out of range.
        UnsupportedLayerError: the target's layers cannot be cut, or its rollback mode copies whole caches.
    """

    def __init__(
        self, target: TargetRunner, probe: Probe, cuts: Sequence[int], margins: float | Sequence[float]
    ) -> None:
        self.layers = target.layers
        if target.rollback == "recompute":
            raise UnsupportedLayerError(
                f"{target.name} takes tokens back by rollback='recompute', which cannot cut a pass between layers: "
                "segmented verification needs 'tape' or 'slots'."
            )
        if not cuts or sorted(set(cuts)) != list(cuts) or not 0 < cuts[0] <= cuts[-1] < len(self.layers):
            raise InputError(
                f"cuts must be rising layer indices from 1 to {len(self.layers) - 1} of {target.name}, not {list(cuts)}"
            )
        margins = [float(margins)] * len(cuts) if isinstance(margins, int | float) else [float(m) for m in margins]
        if len(margins) != len(cuts) or min(margins) < 0:
            raise InputError(f"margins must be one number of at least 0, or one for each of {len(cuts)} cuts")
        self.target, self.probe, self.cuts, self.margins = target, probe, tuple(cuts), dict(zip(cuts, margins))  # noqa: B905
        check_cuts(self)

    def verify(self, session: Session, last: int, proposal: Proposal) -> tuple[Tensor, Proposal]:
        """The logits and drafted tokens that were not dropped, with their thinned distributions."""
        if not proposal.tokens:
            return session.verify([last]), proposal
        screen = Screen(self, proposal.tokens)
        logits = session.verify([last, *proposal.tokens], screen.watching)
        stayed = len(logits) - 1
        probabilities = proposal.probabilities
        if probabilities is not None:
            probabilities = thinned(probabilities[:stayed], [mask[:stayed] for mask in screen.masks])
        return logits, Proposal(proposal.tokens[:stayed], probabilities)


class Screen:
    """One pass: which rows of the block are still running, and what each cut lets through."""

    def __init__(self, segments: SegmentedVerification, drafted: Sequence[int]) -> None:
        self.segments, self.drafted = segments, list(drafted)
        self.total = self.rows = len(drafted) + 1
        #: For each cut that was reached, ``[tokens still running, vocab]``: lets this token through.
        self.masks: list[Tensor] = []

    def look(self, cut: int, hidden: Tensor) -> None:
        """At ``cut`` with ``hidden [rows, d]``: drops the first drafted token that the probe finds too unlikely, and
        what follows it.
        """
        count = self.rows - 1
        if not count:
            return
        logits = self.segments.probe(cut, hidden[:count])
        mask = logits >= logits.max(-1, keepdim=True).values - self.segments.margins[cut]
        self.masks.append(mask.cpu())
        passed = mask[torch.arange(count), self.drafted[:count]].tolist()
        self.rows = passed.index(False) + 1 if False in passed else self.rows

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While it is open, one pass of the target is looked at, and cut."""
        layers, cuts = self.segments.layers, self.segments.cuts
        with ExitStack() as stack:
            for index in range(cuts[0], len(layers)):
                handle = layers[index].register_forward_pre_hook(self._hook(index, index in cuts), with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def _hook(self, index: int, is_cut: bool) -> Callable:
        def before(_: nn.Module, arguments: tuple, options: dict) -> tuple[tuple, dict] | None:
            if is_cut:
                hidden = arguments[0] if arguments else options["hidden_states"]
                if hidden.ndim != 3:
                    raise UnsupportedLayerError(
                        f"layer {index} takes hidden states of shape {tuple(hidden.shape)}, which no probe reads: "
                        "segmented verification is not for this model."
                    )
                self.look(index, hidden[0])
            if self.rows == self.total:
                return None
            return shortened(arguments, self.total, self.rows), shortened(options, self.total, self.rows)

        return before


def thinned(q: Tensor, masks: Sequence[Tensor]) -> Tensor:
    """``q [n, vocab]`` restricted to what every mask ``[n, vocab]`` lets through, normalised."""
    for mask in masks:
        width = min(q.shape[-1], mask.shape[-1])
        allowed = torch.zeros_like(q)
        allowed[:, :width] = mask[:, :width].to(q.dtype)
        q = q * allowed
    return q / q.sum(-1, keepdim=True)


def shortened(value: Any, total: int, rows: int) -> Any:
    """A layer's arguments for a block of ``total`` tokens, for the first ``rows`` of it: hidden states ``[B, T, d]``,
    rotary embeddings ``[B, T, d]``, positions ``[..., T]``, masks ``[B, 1, T, S]``. What was cut already stays.
    """
    if isinstance(value, Tensor):
        dropped = total - rows
        if value.ndim == 4 and value.shape[-2] == total:
            return value[..., :rows, : value.shape[-1] - dropped]
        if not value.is_floating_point() and value.ndim <= 3 and value.shape[-1] >= total > 0:
            return value[..., : value.shape[-1] - dropped]
        if value.ndim >= 2 and value.shape[1] > rows:
            return value[:, :rows] if value.shape[1] <= total else value
        return value
    if isinstance(value, tuple | list):
        return type(value)(shortened(v, total, rows) for v in value)
    if type(value) is dict:
        return {k: shortened(v, total, rows) for k, v in value.items()}
    return value


def check_cuts(segments: SegmentedVerification) -> None:
    """Feeds a block whose tail is dropped at each cut, and compares logits and what follows with a pass that never saw
    the tail.

    Raises:
        UnsupportedLayerError: they differ: this model's layers cannot be cut.
    """
    target = segments.target
    block = [t % target.vocab_size for t in (3, 5, 7, 11, 13)]
    for i, cut in enumerate(segments.cuts):
        rows = 1 + i % (len(block) - 1)
        try:
            with target.start([1, 2]) as cutting, target.start([1, 2]) as whole:
                screen = Screen(segments, block[1:])
                screen.look = _dropping(screen, cut, rows)
                short, long = cutting.verify(block, screen.watching), whole.verify(block[:rows])
                cutting.commit(rows)
                whole.commit(rows)
                after = [(s.verify(block)) for s in (cutting, whole)]
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise UnsupportedLayerError(
                f"{target.name} ({target.config.model_type}): a pass cannot be cut before layer {cut}: {error}"
            ) from error
        scale = float(long.abs().max()) or 1.0
        wrong = max(float((a - b).abs().max()) / scale for a, b in ((short, long), after))
        if wrong > (1e-3 if long.dtype == torch.float32 else 0.2):
            raise UnsupportedLayerError(
                f"{target.name} ({target.config.model_type}): logits are off by {wrong:.2g} when a pass is cut before "
                f"layer {cut}. Segmented verification is not for this model."
            )


def _dropping(screen: Screen, cut: int, rows: int) -> Callable[[int, Tensor], None]:
    def look(at: int, _: Tensor) -> None:
        if at == cut:
            screen.rows = rows

    return look
