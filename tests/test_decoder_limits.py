"""Where the loop ends or refuses: contexts that fill up, options without sense, generators that nobody finishes."""

from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from hybridspec.decoding.draft_length import FixedLength
from hybridspec.decoding.loop import continue_decoding, decode
from hybridspec.decoding.options import DecodeOptions
from hybridspec.decoding.proposal import Proposal
from hybridspec.decoding.sampling import Sampling
from hybridspec.decoding.step import Statistics
from hybridspec.drafts.same_architecture import SameArchitectureDraft, SameArchitectureDrafting
from hybridspec.errors import ContextLengthError, IncompatiblePairError, InputError, SessionError
from hybridspec.runtime.runner import TargetRunner
from hybridspec.runtime.session import Session

MakeRunner = Callable[..., TargetRunner]
PROMPT = [5, 17, 40, 8, 61, 2, 33, 90, 14, 27]
NEVER: frozenset[int] = frozenset()
every_mode = pytest.mark.parametrize("mode", ["tape", "recompute"])


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """Every session that is started."""
    sessions: list[Session] = []
    start = TargetRunner.start

    def spy(self: TargetRunner, prompt: list[int], *attach: object) -> Session:
        sessions.append(start(self, prompt, *attach))
        return sessions[-1]

    monkeypatch.setattr(TargetRunner, "start", spy)
    return sessions


def assert_closed(sessions: list[Session], count: int) -> None:
    assert len(sessions) == count
    for session in sessions:
        with pytest.raises(SessionError, match="closed"):
            session.snapshot()


@every_mode
@pytest.mark.parametrize("k", [1, 5, 14])
def test_k_is_clipped_to_the_room_that_is_left(make_runner: MakeRunner, mode: str, k: int) -> None:
    """The output fills the context to its last place; a block of K would not fit any more."""
    target = make_runner("plain", mode, context=24)
    expected = [t.id for t in decode(target, PROMPT, max_new_tokens=14, stop_tokens=NEVER)]
    statistics = Statistics()
    options = {"k": k, "max_new_tokens": 14, "stop_tokens": NEVER, "statistics": statistics}
    tokens = [t.id for t in decode(target, PROMPT, draft=SameArchitectureDraft(target), **options)]
    assert tokens == expected
    assert len(tokens) == 14
    assert statistics.acceptance_rate == 1.0


@every_mode
@pytest.mark.parametrize("context", [11, 13, 20])
def test_a_draft_with_a_shorter_context_falls_silent(make_runner: MakeRunner, mode: str, context: int) -> None:
    """It proposes as long as it can, then the target goes on alone. The output does not change."""
    target, draft = make_runner("plain", mode), make_runner("plain", mode, context=context)
    expected = [t.id for t in decode(target, PROMPT, max_new_tokens=16, stop_tokens=NEVER)]
    statistics = Statistics()
    options = {"k": 3, "max_new_tokens": 16, "stop_tokens": NEVER, "statistics": statistics}
    assert [t.id for t in decode(target, PROMPT, draft=SameArchitectureDraft(draft), **options)] == expected
    assert statistics.accepted == statistics.drafted > 0
    assert statistics.steps[-2].drafted == 0


@every_mode
def test_the_loop_fills_the_context_before_it_gives_up(make_runner: MakeRunner, mode: str) -> None:
    """On a session that is nearly full: blocks shrink to the room, and every token that fits comes out."""
    target = make_runner("plain", mode, context=20)
    expected = [t.id for t in decode(target, PROMPT, max_new_tokens=10, stop_tokens=NEVER)]
    with target.start(PROMPT) as session:
        drafting = SameArchitectureDraft(make_runner("plain", mode)).start(PROMPT, Sampling())
        options = DecodeOptions(FixedLength(4), 100, stop_tokens=NEVER)
        tokens = continue_decoding(session, drafting, PROMPT[-1], options, Statistics())
        taken: list[int] = []
        with pytest.raises(ContextLengthError):
            for token in tokens:
                taken.append(token.id)
        # The token after the last place needs no place itself.
        assert taken[:10] == expected
        assert len(taken) == 11
        assert session.room == 0


REFUSED = {
    "K beyond the context": ({"k": 15}, ContextLengthError, "K = 15"),
    "output beyond the context": ({"max_new_tokens": 15}, ContextLengthError, "at most 14"),
    "no tokens": ({"max_new_tokens": 0}, InputError, "max_new_tokens"),
    "negative K": ({"k": -1}, InputError, "-1"),
    "K without a draft": ({"k": 2, "draft": None}, InputError, "draft"),
    "empty prompt": ({"prompt": []}, InputError, "empty"),
    "prompt beyond the context": ({"prompt": [1] * 25, "k": 0, "max_new_tokens": 1}, ContextLengthError, "25"),
    "prompt outside the vocabulary": ({"prompt": [1, 96, 2]}, InputError, "96"),
    "last token outside the vocabulary": ({"prompt": [1, 2, 96]}, InputError, "96"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused(make_runner: MakeRunner, opened: list[Session], name: str) -> None:
    changes, error, message = REFUSED[name]
    target = make_runner("plain", context=24)
    options = {"k": 2, "max_new_tokens": 4, "draft": SameArchitectureDraft(target), "prompt": PROMPT} | changes
    with pytest.raises(error, match=message):
        list(decode(target, options.pop("prompt"), **options))
    assert_closed(opened, len(opened))


@every_mode
def test_a_generator_closed_early_frees_both_sessions(
    make_runner: MakeRunner, opened: list[Session], mode: str
) -> None:
    target = make_runner("plain", mode)
    tokens = decode(target, PROMPT, draft=SameArchitectureDraft(target), k=4, max_new_tokens=40, stop_tokens=NEVER)
    taken = [next(tokens) for _ in range(3)]
    assert len(taken) == 3
    assert all("closed" not in repr(session) for session in opened)
    tokens.close()
    assert_closed(opened, 2)


def test_a_generator_that_ends_or_is_dropped_frees_both_sessions(
    make_runner: MakeRunner, opened: list[Session]
) -> None:
    target = make_runner("plain")
    options = {"draft": SameArchitectureDraft(target), "k": 4, "max_new_tokens": 6, "stop_tokens": NEVER}
    list(decode(target, PROMPT, **options))
    assert_closed(opened, 2)
    tokens = decode(target, PROMPT, **options)
    next(tokens)
    del tokens
    assert_closed(opened, 4)


@pytest.mark.parametrize("part", ["target", "draft", "acceptance"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_exception_anywhere_frees_both_sessions(
    make_runner: MakeRunner,
    opened: list[Session],
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    error: type[BaseException],
) -> None:
    target, draft = make_runner("plain"), make_runner("plain", noise=0.1)
    tokens = decode(target, PROMPT, draft=SameArchitectureDraft(draft), k=4, max_new_tokens=40, stop_tokens=NEVER)
    next(tokens)

    def fail(*_: object, **__: object) -> None:
        raise error("on purpose")

    if part == "acceptance":
        monkeypatch.setattr("hybridspec.decoding.acceptance.greedy", fail)
    else:
        monkeypatch.setattr({"target": target, "draft": draft}[part].model.lm_head, "forward", fail)
    with pytest.raises(error, match="on purpose"):
        list(tokens)
    assert_closed(opened, 2)


def test_a_draft_that_cannot_start_frees_the_target(make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its context is shorter than the prompt."""
    target, draft = make_runner("plain"), make_runner("plain", context=6)
    closed, close = [], Session.close

    def spy(session: Session) -> None:
        closed.append(session.runner)
        close(session)

    monkeypatch.setattr(Session, "close", spy)
    with pytest.raises(ContextLengthError):
        list(decode(target, PROMPT, draft=SameArchitectureDraft(draft), k=2, max_new_tokens=4))
    assert target in closed


def test_a_draft_that_proposes_too_much_cannot_lengthen_the_output(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strategies come from other packages too: one that ignores K must not run past max_new_tokens for ever."""
    target = make_runner("plain")
    expected = [t.id for t in decode(target, PROMPT, max_new_tokens=8, stop_tokens=NEVER)]
    propose = SameArchitectureDrafting.propose

    def too_much(self: SameArchitectureDrafting, k: int, *_: object) -> Proposal:
        return propose(self, k + 3)

    monkeypatch.setattr(SameArchitectureDrafting, "propose", too_much)
    tokens = decode(target, PROMPT, draft=SameArchitectureDraft(target), k=2, max_new_tokens=8, stop_tokens=NEVER)
    assert [t.id for t in (next(tokens, None) for _ in range(30)) if t is not None] == expected


def test_pairs_must_share_one_vocabulary(make_runner: MakeRunner) -> None:
    target = make_runner("plain")
    SameArchitectureDraft(make_runner("draft")).check_pair(target)
    with pytest.raises(IncompatiblePairError, match=r"96.*64"):
        SameArchitectureDraft(make_runner("draft", vocabulary=64)).check_pair(target)


class Vocabulary:
    """As much of a tokenizer as the pair check reads."""

    def __init__(self, **tokens: int) -> None:
        self.get_vocab = lambda: tokens


def test_pairs_must_number_their_tokens_alike(make_model: Callable[..., PreTrainedModel]) -> None:
    model = make_model("draft")
    target = TargetRunner(model, Vocabulary(a=0, b=1, c=2))
    SameArchitectureDraft(TargetRunner(model, Vocabulary(c=2, b=1, a=0))).check_pair(target)
    for other in (Vocabulary(a=0, b=2, c=1), Vocabulary(a=0, b=1), Vocabulary(a=0, b=1, c=2, d=3)):
        with pytest.raises(IncompatiblePairError, match="'[bcd]'"):
            SameArchitectureDraft(TargetRunner(model, other)).check_pair(target)
