"""The speculative loop: draft, verify, accept, commit."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal, NamedTuple

import torch

from hybridspec.decoding import acceptance
from hybridspec.decoding.acceptance import Verification
from hybridspec.decoding.draft import Draft, Drafting
from hybridspec.decoding.draft_length import DraftLength, FixedLength
from hybridspec.decoding.options import DecodeOptions
from hybridspec.decoding.proposal import Proposal
from hybridspec.decoding.sampling import Sampling
from hybridspec.decoding.step import Statistics, Step
from hybridspec.decoding.verifier import Verifier, WholeBlock
from hybridspec.errors import ContextLengthError, InputError
from hybridspec.runtime.runner import TargetRunner
from hybridspec.runtime.session import Session, flat_ids

Origin = Literal["draft", "target"]


class Token(NamedTuple):
    """One generated token and where it came from: an accepted ``draft``, or the ``target`` (bonus or correction)."""

    id: int
    origin: Origin


def check_length(target: TargetRunner, prompt: Sequence[int], max_new_tokens: int, k: int) -> None:
    """Raises before any work when prompt, output and one block cannot fit into the target's context."""
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    if k < 0:
        raise InputError(f"the draft length K must be 0 (plain decoding) or more, not {k}")
    if len(prompt) + k > target.max_length:
        raise ContextLengthError(
            f"K = {k} is beyond the context: the prompt has {len(prompt)} tokens and {target.name} takes "
            f"{target.max_length}. Choose a smaller K or a shorter prompt."
        )
    if len(prompt) + max_new_tokens > target.max_length:
        raise ContextLengthError(
            f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones exceed the context of "
            f"{target.max_length} of {target.name}. Ask for at most {target.max_length - len(prompt)} new tokens."
        )


def decode(
    target: TargetRunner,
    prompt: Sequence[int],
    *,
    draft: Draft | None = None,
    k: int | DraftLength = 0,
    max_new_tokens: int = 128,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    verification: Verification = "token",
    verifier: Verifier = WholeBlock(),  # noqa: B008 - holds nothing
    generator: torch.Generator | None = None,
    stop_tokens: frozenset[int] | None = None,
    statistics: Statistics | None = None,
) -> Iterator[Token]:
    """Generates from ``prompt``. The tokens are the target's own: token for token under greedy, in distribution when
    sampling.

    Args:
        k: draft length, or a rule of :mod:`hybridspec.drafts.length`; 0 is plain decoding in the same runtime.
        verification, verifier, generator, stop_tokens: see :class:`~hybridspec.decoding.options.DecodeOptions`.
        statistics: filled while tokens are taken.

    Raises:
        InputError: empty prompt, ``k`` without a draft, or an argument of another type.
        ContextLengthError: prompt, output or block beyond the context.
    """
    length = FixedLength(k) if isinstance(k, int) else k
    if not isinstance(length, DraftLength):
        raise InputError(f"k must be a whole number or a draft-length rule, not {k!r}")
    if not isinstance(verifier, Verifier):
        raise InputError(f"verifier must be a Verifier of hybridspec.decoding.verifier, not {verifier!r}")
    options = DecodeOptions(length, max_new_tokens, sampling, verification, verifier, generator, stop_tokens)
    prompt = flat_ids(prompt)
    check_length(target, prompt, max_new_tokens, length.demanded)
    if length.longest and draft is None:
        raise InputError(f"K = {length.longest} needs a draft: give one, or K = 0 for plain decoding")
    if draft is not None:
        if not hasattr(draft, "check_pair"):
            raise InputError(
                f"a {type(draft).__name__} is no draft strategy: wrap it, as in SameArchitectureDraft(runner)"
            )
        draft.check_pair(target)
    with open_pair(target, draft if length.longest else None, prompt, options) as (session, drafting):
        yield from continue_decoding(
            session, drafting, prompt[-1], options, Statistics() if statistics is None else statistics
        )


@contextmanager
def open_pair(
    target: TargetRunner, draft: Draft | None, prompt: Sequence[int], options: DecodeOptions
) -> Iterator[tuple[Session, Drafting | None]]:
    """A target's session and a draft's on ``prompt``; the draft may attach itself before the target is fed.

    Of the options only ``sampling`` and ``generator`` count, which the draft shares.
    """
    with ExitStack() as stack:
        drafting = None

        def attach(session: Session) -> None:
            nonlocal drafting
            if draft is not None:
                drafting = stack.enter_context(draft.start(prompt, options.sampling, options.generator, session))

        session = stack.enter_context(target.start(prompt, attach))
        yield session, drafting


def continue_decoding(
    session: Session, drafting: Drafting | None, last: int, options: DecodeOptions, statistics: Statistics
) -> Iterator[Token]:
    """The loop itself, on open sessions that hold every token but ``last``."""
    clock, length = time.perf_counter, options.length
    stop_tokens = session.runner.stop_tokens if options.stop_tokens is None else options.stop_tokens
    proceed = length.proceed if length.looks_at_drafts else None
    remaining = options.max_new_tokens
    while remaining:
        begun = clock()
        wanted = min(length.limit(), remaining - 1, session.room - 1)
        proposal = drafting.propose(wanted, proceed).first(wanted) if wanted > 0 else Proposal()
        drafted, count = clock(), len(proposal.tokens)
        logits, proposal = options.verifier.verify(session, last, proposal)
        verdict = acceptance.verdict(logits, proposal, options.sampling, options.verification, options.generator)
        verified = clock()
        session.commit(verdict.accepted + 1)
        if drafting is not None:
            drafting.accept(*verdict)
        step = Step(count, verdict.accepted, drafted - begun, verified - drafted, clock() - verified)
        statistics.steps.append(step)
        length.observe(step)
        last = verdict.token
        for token in [*(Token(t, "draft") for t in proposal.tokens[: verdict.accepted]), Token(last, "target")]:
            yield token
            remaining -= 1
            if token.id in stop_tokens:
                return
