"""A few tokens at load time: is the rollback of this very model, on this version of transformers, exact?"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, takewhile, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from hybridspec.errors import UnsupportedLayerError
from hybridspec.runtime.model import LoadedModel
from hybridspec.runtime.session import Session, SessionPass
from hybridspec.state.block import Block
from hybridspec.state.recompute import RecomputeCache

#: Largest difference, relative to the spread of what is compared, that rounding explains. Over all families it stays
#: under 6e-6 in fp32 and, unless most tokens get other experts, 0.08 in bf16; the mistakes of transformers' own
#: continuations are 0.1 to 2.
TOLERANCE = 2e-4
HALF_TOLERANCE = 0.2


class SelfTestStep(NamedTuple):
    """So many tokens of a text are prefilled in the short or in the long form, or verified in blocks and committed.

    ``wrong`` tokens follow the last block, and blocks of nothing else follow that; all are taken back.
    """

    prefill: int = 0
    advance: int = 0
    verify: tuple[int, ...] = ()
    wrong: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return self.prefill + self.advance + sum(self.verify)


#: A prefill; a partial and a full rejection, and several tokens after each; rejections with blocks pending, within the
#: last and before it; a chunk in the long form on top of a state, short enough that the state is not forgotten in it.
PLAN = (
    SelfTestStep(prefill=4),
    SelfTestStep(verify=(3,), wrong=(3,)),
    SelfTestStep(verify=(0,), wrong=(2,)),
    SelfTestStep(verify=(2, 1), wrong=(2,)),
    SelfTestStep(advance=5),
    SelfTestStep(verify=(2, 1), wrong=(1, 2)),
    SelfTestStep(verify=(3,)),
)


class Difference(NamedTuple):
    what: str
    size: float
    allowed: float


def check_rollback(runner: LoadedModel) -> None:
    """Walks through :data:`PLAN`, as far as the model's context goes, and compares at each step.

    The logits' reference is one pass over the text without a cache; that of the recurrent states a session that saw no
    wrong token.

    Raises:
        UnsupportedLayerError: they differ, or the model does not run this way at all.
    """
    ends = dict(zip(PLAN, accumulate(step.tokens for step in PLAN), strict=True))
    plan = list(takewhile(lambda step: ends[step] + sum(step.wrong) <= runner.max_length, PLAN))
    text = [1 + (i * 7919) % (runner.vocab_size - 1) for i in range(sum(step.tokens for step in plan))]
    advice = (
        "No rollback mode serves this model yet." if runner.rollback == "recompute" else "Try rollback='recompute'."
    )
    try:
        differences = list(_differences(runner, plan, text))
    except Exception as error:
        raise UnsupportedLayerError(
            f"{runner.name}: the rollback self-test could not run ({type(error).__name__}: {error}). {advice}"
        ) from error
    for what, size, allowed in differences:
        if not size <= allowed:
            raise UnsupportedLayerError(
                f"{runner.name}: after a rollback the {what} of this {runner.config.model_type!r} model are off by "
                f"{size:.2g} of their spread. {advice}"
            )


def _differences(runner: LoadedModel, plan: Sequence[SelfTestStep], text: list[int]) -> Iterator[Difference]:
    half = runner.model.dtype.itemsize < 4
    tolerance = HALF_TOLERANCE if half else TOLERANCE
    with torch.inference_mode():
        whole = runner.model(input_ids=torch.tensor([text], device=runner.model.device), use_cache=False).logits[0]
    references = [(whole, tolerance)]
    if runner.clamps_steps:
        # Decoding computes something else than the many-token path.
        references = [(whole, HALF_TOLERANCE), (_decoded(runner, plan, text, whole), tolerance)]
    with Session(runner) as session, Session(runner) as undisturbed:
        for step in plan:
            logits = _take(session, step, text, step.wrong)
            _take(undisturbed, step, text)
            end = session.length
            for expected, allowed in references if len(logits) else ():
                sizes = _relative(logits, expected[end - len(logits) : end])
                # Rounding alone may flip a choice of experts, in fp32 seldom at more than one token; a wrong state
                # shows at every token.
                size = sizes.min() if half else sizes.median()
                yield Difference("logits", float(size), allowed)
            for ours, theirs in zip(_states(session), _states(undisturbed), strict=True):
                yield Difference("states", float(_relative(ours, theirs)), tolerance)


def _take(session: Session, step: SelfTestStep, text: list[int], wrong: Sequence[int] = ()) -> Tensor:
    """Logits of the verified tokens of the text."""
    rest = iter(text[session.length :])
    session.prefill(list(islice(rest, step.prefill)))
    if step.advance:
        session.advance(list(islice(rest, step.advance)))
    blocks = [list(islice(rest, tokens)) for tokens in step.verify]
    if wrong:
        blocks = [*blocks[:-1], blocks[-1] + text[: wrong[0]], *(text[:tokens] for tokens in wrong[1:])]
    logits = [
        session.verify(block)[:tokens] for block, tokens in zip_longest(blocks, step.verify, fillvalue=0) if block
    ]
    session.commit(sum(step.verify))
    return torch.cat(logits) if logits else torch.empty(0)


def _decoded(runner: LoadedModel, plan: Sequence[SelfTestStep], text: list[int], whole: Tensor) -> Tensor:
    """``whole`` with the logits that the model itself computes for verified tokens, one at a time."""
    cache, position, decoded = RecomputeCache(runner.one_by_one, clamps_steps=True), 0, whole.clone()
    for step in plan:
        for purpose, tokens in (("prefill", step.prefill + step.advance), ("verify", sum(step.verify))):
            if tokens:
                end = position + tokens
                block = Block.chain(text[position:end], position, runner.device)
                logits = cache.run(block, purpose, SessionPass(runner, position))[0]
                decoded[end - len(logits) : end] = logits
                position = end
    return decoded


def _states(session: Session) -> list[Tensor]:
    """Recurrent states that the cache shows, each flat."""
    return [state.flatten() for state in session.cache.recurrent_states()]


def _relative(ours: Tensor, theirs: Tensor) -> Tensor:
    """Root mean square of the difference over the last axis, in units of the spread."""
    ours, theirs = ours.float(), theirs.float()
    return (ours - theirs).square().mean(-1).sqrt() / theirs.std(-1, correction=0).clamp(min=1e-9)
