"""Mixers whose forward pass is replaced while a session records: nobody else notices, and sessions do not meet, though
transformers keeps RecurrentGemma's state on the modules; and a cache that MiniMax takes for its own.
"""

import copy
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.minimax.modeling_minimax import MiniMaxCache, MiniMaxLightningAttention
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock

from hybridspec.hooks import mixers
from hybridspec.runtime.session import Session
from hybridspec.state.cache import RollbackCache
from hybridspec.state.layers import AttentionLayer, RecurrentLayer
from hybridspec.state.pass_context import recording
from tests import reference
from tests.comparison import assert_close, assert_holds, held_tensors
from tests.families import MODES, family_model, family_runner, some_tokens

CLASSES = {
    "minimax+linear_first": MiniMaxLightningAttention,
    "minimax+full_first": MiniMaxLightningAttention,
    "recurrent_gemma": RecurrentGemmaRecurrentBlock,
}
TOLERANCE = 5e-5
PROMPT = some_tokens(4)

every_model = pytest.mark.parametrize("name", CLASSES)
every_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture
def unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes as transformers ships them, whatever was wrapped before; put back as they were afterwards."""
    for kind in set(CLASSES.values()):
        native = getattr(kind.forward, "__hybridspec_native__", kind.forward)
        assert not hasattr(native, "__hybridspec_native__"), f"{kind.__name__} was wrapped twice"
        monkeypatch.setattr(kind, "forward", native)


def generate(model: PreTrainedModel, count: int = 8) -> torch.Tensor:
    """transformers' own loop: logits of each of ``count`` tokens, prefill and one-token steps."""
    options = {"do_sample": False, "pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}
    ids = torch.tensor([PROMPT * 3])
    return torch.cat(model.generate(ids, max_new_tokens=count, min_new_tokens=count, **options).logits)


def states_on_modules(model: PreTrainedModel) -> Iterator[object]:
    for module in model.modules():
        yield from (vars(module).get(name) for name in ("conv1d_state", "recurrent_states"))


@every_model
@pytest.mark.usefixtures("unwrapped")
def test_a_wrapped_model_computes_the_same_bits(name: str) -> None:
    model, kind = family_model(name), CLASSES[name]
    ids = torch.tensor([PROMPT * 20])
    before = (model(input_ids=ids, use_cache=False).logits, generate(model))
    assert mixers.attach(model) == {kind.__module__}
    assert hasattr(kind.forward, "__hybridspec_native__")
    after = (model(input_ids=ids, use_cache=False).logits, generate(model))
    assert all(map(torch.equal, before, after))


@every_model
@pytest.mark.usefixtures("unwrapped")
def test_attaching_twice_wraps_once(name: str) -> None:
    kind = CLASSES[name]
    mixers.attach(family_model(name))
    forward = kind.forward
    assert mixers.attach(copy.deepcopy(family_model(name))) == {kind.__module__}
    assert kind.forward is forward
    assert not hasattr(forward.__hybridspec_native__, "__hybridspec_native__")


def test_models_without_such_a_mixer_are_left_alone() -> None:
    assert not mixers.attach(family_model("qwen3"))
    assert not family_runner("qwen3", "recompute").new_cache().cache


def test_a_block_that_does_not_know_its_layer_is_told() -> None:
    model = copy.deepcopy(family_model("recurrent_gemma"))
    mixers.attach(model)
    blocks = [m for m in model.modules() if isinstance(m, RecurrentGemmaRecurrentBlock)]
    assert [block.layer_idx for block in blocks] == [0, 1, 3, 4]


@every_model
def test_our_layers_are_where_the_mixers_are(name: str) -> None:
    """transformers 5.16 itself makes attention layers for the recurrent blocks of RecurrentGemma."""
    layers = RollbackCache(family_model(name).config).layers
    kinds = ["linear"] * 3 + ["attention"] if name == "minimax+linear_first" else ["attention", "linear"] * 2
    if name == "recurrent_gemma":
        kinds = ["linear", "linear", "attention"] * 2
    assert [{RecurrentLayer: "linear", AttentionLayer: "attention"}[type(layer)] for layer in layers] == kinds


@every_model
def test_a_recorded_pass_does_not_run_the_original(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests here would pass if nothing was ever wrapped: a session must not run the native mixer."""
    runner, kind = family_runner(name, "tape"), CLASSES[name]

    def native(*_: object, **__: object) -> None:
        raise AssertionError("the native mixer ran")

    monkeypatch.setattr(kind, "forward", mixers._when_recording(native, mixers.MIXERS[kind.__name__]))
    session = runner.start(PROMPT)
    session.verify([5, 6, 7])
    session.commit(2)
    session.prefill(some_tokens(40))
    with pytest.raises(AssertionError, match="native mixer"):
        runner.model(input_ids=torch.tensor([PROMPT]))


@every_model
def test_a_recorded_pass_without_a_cache_runs_the_original(name: str) -> None:
    model = family_runner(name, "tape").model
    expected = reference.next_logits(model, PROMPT)
    with recording():
        assert torch.equal(reference.next_logits(model, PROMPT), expected)


@every_model
@every_mode
@pytest.mark.parametrize("chunk", [33, 64, 65, 200])
def test_long_chunks_on_top_of_a_state(name: str, mode: str, chunk: int) -> None:
    """Around the border between the recorded form and long chunks, and around that of the parts of a long chunk."""
    runner = family_runner(name, mode)
    tokens = some_tokens(206)
    with Session(runner) as session:
        session.prefill(tokens[:3])
        session.prefill(tokens[3:203], chunk=chunk)
        expected = reference.next_logits(runner.model, tokens)[203:]
        assert_close(session.verify(tokens[203:]), expected, "logits", TOLERANCE)


@every_model
@every_mode
def test_interleaved_sessions_and_generate_do_not_meet(name: str, mode: str) -> None:
    """Two sequences on one model with pending blocks open at the same time, and transformers' own loop in between."""
    runner = family_runner(name, mode)
    native = generate(runner.model)
    sessions = [runner.start(PROMPT[: 2 + i]) for i in range(2)]
    committed = [PROMPT[: 1 + i] for i in range(2)]
    for step in range(4):
        blocks = [some_tokens(3, seed=10 * step + i) for i in range(2)]
        for session, block in zip(sessions, blocks, strict=True):
            session.verify(block)
        assert torch.equal(generate(runner.model), native)
        for i in (1, 0):
            keep = (step + i) % 4
            sessions[i].commit(keep)
            committed[i] = committed[i] + blocks[i][:keep]
    for session, tokens in zip(sessions, committed, strict=True):
        assert_holds(session, tokens)


@every_mode
def test_nothing_is_left_on_the_modules(mode: str) -> None:
    runner = family_runner("recurrent_gemma", mode)
    generate(runner.model)
    before = list(states_on_modules(runner.model))
    assert sum(isinstance(state, torch.Tensor) for state in before) == 8, "window and state of four blocks"
    with runner.start(PROMPT) as session:
        session.verify([5, 6, 7])
        session.commit(1)
        session.prefill(some_tokens(40))
        session.verify([8])
        after = list(states_on_modules(runner.model))
    assert all(a is b for a, b in zip(after, before, strict=True))
    assert not any("_rnn_scan" in vars(module) for module in runner.model.modules())


@pytest.mark.parametrize("name", ["minimax+linear_first", "recurrent_gemma"])
@pytest.mark.parametrize("mode", ["tape", "recompute"])
def test_many_threads_share_one_model(name: str, mode: str) -> None:
    """Three sessions at once, switched as often as Python can."""
    runner = family_runner(name, mode)
    texts = [some_tokens(60, seed) for seed in range(3)]

    def logits(text: list[int]) -> torch.Tensor:
        with runner.start(text[:3]) as session:
            session.prefill(text[2:40])
            rows = []
            for start in range(40, 58, 3):
                rows.append(session.verify(text[start : start + 3])[:2])
                session.commit(2)
                session.prefill(text[start + 2 : start + 3])
        return torch.cat(rows)

    alone = [logits(text) for text in texts]
    together: dict[int, torch.Tensor] = {}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [
            threading.Thread(target=lambda i=i: together.__setitem__(i, logits(texts[i]))) for i in range(len(texts))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert all(torch.equal(together[i], alone[i]) for i in range(len(texts)))


@pytest.mark.parametrize("name", ["minimax+linear_first", "minimax+full_first"])
def test_padding_on_the_left_stays_out_of_the_state(name: str) -> None:
    """A batch of two rows, one of them shorter: no session does that, assisted generation may."""
    runner = family_runner(name, "tape")
    ids = torch.tensor([some_tokens(9, seed=1), some_tokens(9, seed=2)])
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    cache = runner.new_cache()
    with torch.inference_mode():
        expected = runner.model(input_ids=ids, use_cache=False, **inputs).logits
        with recording():
            actual = runner.model(input_ids=ids, **inputs, **{runner.cache_argument: cache}).logits
    cache.end_block(9)
    cache.commit([range(9)] * 2)
    shown = mask.bool()
    assert_close(actual[shown], expected[shown], "logits", TOLERANCE)
    alone = runner.start([*ids[0, 4:].tolist(), 0])
    for ours, theirs in zip(cache.recurrent, alone.cache.recurrent, strict=True):
        assert_close(ours.recurrent_states.get(0)[:1], theirs.recurrent_states.get(0), "state", TOLERANCE)


class Stranger(RollbackCache):
    """As the cache of assisted generation: a subclass with something of its own."""

    is_croppable = True

    def crop(self, tokens_to_remove: int) -> str:
        return f"ours, {tokens_to_remove}"


@pytest.mark.parametrize("kind", [RollbackCache, Stranger])
@pytest.mark.parametrize("name", ["minimax+linear_first", "minimax+full_first"])
def test_the_cache_is_what_minimax_insists_on_and_ours_in_all_it_does(kind: type, name: str) -> None:
    cache = kind(family_model(name).config, slots=True)
    for each in (cache, copy.deepcopy(cache)):
        assert isinstance(each, MiniMaxCache)
        assert isinstance(each, kind)
        assert type(each) is type(kind(family_model(name).config))
        assert type(each).commit is RollbackCache.commit
        assert each._slots == []
        assert len(each) == len(each.layers) == 4
    if kind is Stranger:
        assert cache.is_croppable
        assert cache.crop(-1) == "ours, -1"


def test_other_models_get_the_plain_class() -> None:
    assert type(RollbackCache(family_model("qwen3").config)) is RollbackCache
    assert type(Stranger(family_model("recurrent_gemma").config)) is Stranger


@every_model
@every_mode
def test_states_are_fp32_in_a_bf16_model(name: str, mode: str) -> None:
    """Also those of MiniMax, which transformers keeps in the model's dtype."""
    runner = family_runner(name, mode)
    session = Session(copy.copy(runner))
    session.runner.model = copy.deepcopy(runner.model).bfloat16()
    session.prefill(some_tokens(40))
    session.verify([5, 6, 7])
    session.commit(2)
    states = [x for key, x in held_tensors(session).items() if key.endswith("state")]
    assert len(states) == {"minimax+linear_first": 3, "minimax+full_first": 2, "recurrent_gemma": 4}[name]
    assert {state.dtype for state in states} == {torch.float32}
