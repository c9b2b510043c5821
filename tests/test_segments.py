"""Segmented verification: dropping a tail between layers changes neither what is kept nor what comes out."""

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridspec.decoding.loop import decode
from hybridspec.decoding.proposal import Proposal
from hybridspec.decoding.sampling import Sampling
from hybridspec.decoding.step import Statistics
from hybridspec.drafts.full_attention import segments as module
from hybridspec.drafts.full_attention.segments import Screen, SegmentedVerification
from hybridspec.drafts.full_attention.token_probes import FinalHead, attention_cuts, fit_segments
from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.errors import InputError, UnsupportedLayerError
from hybridspec.runtime.runner import TargetRunner
from tests.chi_square import FALSE_ALARM, p_value
from tests.comparison import assert_close, assert_holds
from tests.drafting import generate
from tests.families import FAMILIES, WITHOUT_TAPE, family_runner, some_tokens
from tests.test_sampling_distribution import PROMPT, SAMPLES, VOCABULARY, exact

MakeRunner = Callable[..., TargetRunner]
#: Families that are cut in the default run; the others with ``-m slow``.
QUICK = ("qwen3_next", "bamba", "jamba", "falcon_h1", "kimi_linear", "lfm2")


def random_probe(vocabulary: int, seed: int = 0) -> Callable[[int, Tensor], Tensor]:
    """Lets any token through about as often as not; a fixed function of the hidden states, as a probe must be."""
    weights: dict[int, Tensor] = {}

    def probe(cut: int, hidden: Tensor) -> Tensor:
        if cut not in weights:
            generator = torch.Generator().manual_seed(seed + cut)
            weights[cut] = 20 * torch.randn(hidden.shape[-1], vocabulary, generator=generator)
        return (hidden @ weights[cut]).sin()

    return probe


def segmented(target: TargetRunner, cuts: Sequence[int] = (1, 3), margin: float = 1.2) -> SegmentedVerification:
    return SegmentedVerification(target, random_probe(target.vocab_size), cuts, margin)


@pytest.mark.parametrize("mode", ["tape", "slots"])
def test_what_is_kept_is_as_if_the_tail_had_never_been(make_runner: MakeRunner, mode: str) -> None:
    runner = make_runner("plain", mode)
    segments = segmented(runner)
    rng, dropped = random.Random(3), 0
    tokens = some_tokens(6)
    session = runner.start(tokens)
    tokens = tokens[:-1]
    for _ in range(12):
        last, *drafted = (rng.randrange(96) for _ in range(rng.randint(2, 7)))
        logits, proposal = segments.verify(session, last, Proposal(drafted))
        stayed = len(proposal.tokens)
        dropped += len(drafted) - stayed
        assert proposal.tokens == drafted[:stayed]
        assert session.cache.pending == len(logits) == stayed + 1
        with runner.start([*tokens, 0]) as whole:
            assert_close(logits, whole.verify([last, *drafted])[: stayed + 1], "logits", 2e-5)
        keep = rng.randint(0, stayed + 1)
        session.commit(keep)
        tokens += [last, *drafted][:keep]
        assert session.tokens == tokens
    assert dropped > 10
    assert_holds(session, tokens)


def test_pending_blocks_add_up(make_runner: MakeRunner) -> None:
    """A block that was cut, then a whole one, then a commit within the first."""
    runner = make_runner("plain")
    segments = segmented(runner, margin=0.5)
    session = runner.start([4, 5, 6])
    _, proposal = segments.verify(session, 6, Proposal([9, 8, 7, 6, 5]))
    assert len(proposal.tokens) < 5
    session.verify([11, 12])
    assert session.cache.pending == len(proposal.tokens) + 3
    session.commit(1)
    assert_holds(session, [4, 5, 6])


@pytest.mark.parametrize("margin", [0.0, 0.5, 1.5])
def test_greedy_output_is_the_targets(make_runner: MakeRunner, margin: float) -> None:
    target, draft = make_runner("plain"), SameArchitectureDraft(make_runner("plain", noise=0.05))
    prompt = some_tokens(9)
    expected = generate(target, prompt, 32).tokens
    for cuts in ((1,), (2, 3), (1, 2, 3)):
        statistics = Statistics()
        options = {"k": 5, "max_new_tokens": 32, "stop_tokens": frozenset(), "statistics": statistics}
        tokens = decode(target, prompt, draft=draft, verifier=segmented(target, cuts, margin), **options)
        assert [t.id for t in tokens] == expected
        assert statistics.drafted > 20


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in FAMILIES if n not in WITHOUT_TAPE]
)
def test_every_family_is_cut_exactly_or_refused(name: str) -> None:
    """The check at construction is what refuses; what passes it must decode as the target does."""
    target = family_runner(name, "tape")
    count = target.config.num_hidden_layers
    try:
        segments = segmented(target, sorted({1, count - 1}))
    except UnsupportedLayerError as error:
        assert name not in QUICK, error
        assert target.name in str(error)
        return
    draft = SameArchitectureDraft(family_runner(name, "tape", noise=0.06))
    prompt = some_tokens(9)
    options = {"k": 4, "max_new_tokens": 16, "stop_tokens": frozenset()}
    tokens = [t.id for t in decode(target, prompt, draft=draft, verifier=segments, **options)]
    assert tokens == generate(target, prompt, 16).tokens


class Pair:
    """A target over nine tokens, a draft, and segments that drop about half of what it drafts."""

    def __init__(self, make_runner: MakeRunner) -> None:
        self.target = make_runner("plain", vocabulary=VOCABULARY, seed=21, spread=0.2)
        draft = make_runner("draft", layer_types=("full_attention",), vocabulary=VOCABULARY, seed=22, spread=0.2)
        self.draft = SameArchitectureDraft(draft)
        self.segments = segmented(self.target, (1, 2), margin=1.0)

    def counted(self, verification: str, samples: int = SAMPLES) -> np.ndarray:
        generator = torch.Generator().manual_seed(99)
        counts = np.zeros((VOCABULARY, VOCABULARY))
        options = {"k": 2, "max_new_tokens": 3, "stop_tokens": frozenset(), "sampling": Sampling(1.0)}
        for _ in range(samples):
            tokens = decode(
                self.target,
                PROMPT,
                draft=self.draft,
                verifier=self.segments,
                verification=verification,
                generator=generator,
                **options,
            )
            first, second = next(tokens), next(tokens)
            tokens.close()
            counts[first.id, second.id] += 1
        return counts


@pytest.fixture(scope="module")
def pair(make_runner: MakeRunner) -> Pair:
    return Pair(make_runner)


@pytest.mark.parametrize("verification", ["token", "block"])
def test_sampled_output_follows_the_target(pair: Pair, verification: str) -> None:
    counts = pair.counted(verification)
    assert p_value(counts, exact(pair.target, Sampling(1.0))) > FALSE_ALARM


def test_the_same_test_catches_dropping_without_thinning(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "thinned", lambda q, masks: q)
    assert p_value(pair.counted("token"), exact(pair.target, Sampling(1.0))) < FALSE_ALARM


def test_a_fitted_probe_lets_the_targets_own_tokens_through(make_runner: MakeRunner) -> None:
    """Of a text that it was not fitted to, about the share it was told to keep; of random tokens far fewer."""
    target = make_runner("deep")
    prompts = [some_tokens(4, seed) for seed in range(14)]
    texts = [[*p, *generate(target, p, 60).tokens] for p in prompts]
    segments = fit_segments(target, texts[:12], keep=0.9)
    assert segments.cuts == (4,)
    passed: dict[str, list[float]] = {"own": [], "random": []}
    for text in texts[12:]:
        for name, drafted in (("own", text[5:61]), ("random", some_tokens(56, 77))):
            with target.start(text[:5]) as session:
                screen = Screen(segments, text[5:61])
                hidden: list[Tensor] = []
                screen.look = lambda _, h, hidden=hidden: hidden.append(h)
                session.verify(text[4:61], screen.watching)
            logits = segments.probe(4, hidden[0])[:-1]
            below = logits.max(-1).values - logits[torch.arange(len(drafted)), drafted]
            passed[name].append(float((below <= segments.margins[4]).float().mean()))
    assert min(passed["own"]) > 0.7
    assert max(passed["random"]) < 0.7


def test_a_probe_needs_text(make_runner: MakeRunner) -> None:
    with pytest.raises(InputError, match="64 tokens"):
        fit_segments(make_runner("deep"), [some_tokens(20)])
    with pytest.raises(InputError, match="keep"):
        fit_segments(make_runner("deep"), [some_tokens(80)], keep=1.5)


def test_cuts_lie_behind_full_attention_layers(make_runner: MakeRunner) -> None:
    assert attention_cuts(make_runner("deep")) == [4]
    with pytest.raises(InputError, match="no full-attention layer to cut behind"):
        attention_cuts(make_runner("plain"))


def test_the_final_head_of_the_last_hidden_state_is_the_target(make_runner: MakeRunner) -> None:
    target = make_runner("plain")
    hidden: list[Tensor] = []
    layer = target.layers[-1]
    handle = layer.register_forward_hook(lambda _, __, output: hidden.append(output))
    with target.start([3, 4]) as session:
        logits = session.verify([4, 5, 6])
    handle.remove()
    assert torch.equal(FinalHead(target)(4, hidden[-1][0] if hidden[-1].ndim == 3 else hidden[-1]), logits)


@pytest.mark.parametrize("cuts", [(), (0,), (4,), (2, 1), (1, 1)], ids=str)
def test_cuts_out_of_range_are_refused(make_runner: MakeRunner, cuts: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="cuts"):
        segmented(make_runner("plain"), cuts)


def test_margins_out_of_range_are_refused(make_runner: MakeRunner) -> None:
    target = make_runner("plain")
    for margins in (-1.0, [1.0], [1.0, -1.0]):
        with pytest.raises(InputError, match="margins"):
            SegmentedVerification(target, random_probe(96), (1, 2), margins)


def test_copies_of_whole_caches_cannot_be_cut(make_runner: MakeRunner) -> None:
    with pytest.raises(UnsupportedLayerError, match="recompute"):
        segmented(make_runner("plain", "recompute"))
