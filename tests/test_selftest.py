"""Load time: a model whose tokens cannot be taken back exactly is refused by name, whatever the reason; one whose can
be is not.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hybridspec.errors import UnsupportedLayerError
from hybridspec.hooks import adapters, mixers
from hybridspec.recurrence import selective_scan
from hybridspec.recurrence import tape as tape_module
from hybridspec.recurrence.rg_lru import StateTape
from hybridspec.runtime import session
from hybridspec.runtime.model import LoadedModel
from hybridspec.runtime.runner import TargetRunner
from hybridspec.runtime.selftest import check_rollback
from hybridspec.state import cache, layers, pass_context
from hybridspec.state.base import PassOutput
from hybridspec.state.block import Block
from hybridspec.state.cache import RollbackCache
from tests import reference
from tests.comparison import assert_close
from tests.families import CLAMPED, family_model, family_runner, some_tokens
from tests.tiny import tiny_model

MakeRunner = Callable[..., TargetRunner]
Patch = pytest.MonkeyPatch


def test_gated_delta_and_dense_models_pass() -> None:
    check_rollback(TargetRunner(tiny_model()))
    check_rollback(family_runner("qwen3", "tape"))


def test_half_precision_passes() -> None:
    check_rollback(TargetRunner(copy.deepcopy(tiny_model()).bfloat16()))


def test_half_precision_with_experts_that_flip_passes() -> None:
    """In bf16 this model sends most tokens to other experts than in one pass; no state is wrong."""
    model = copy.deepcopy(family_model("minimax+full_first")).bfloat16()
    for mode in ("tape", "recompute"):
        TargetRunner(model, rollback=mode)


def test_a_context_that_ends_before_the_test_cuts_it_short(monkeypatch: Patch) -> None:
    runner = TargetRunner(tiny_model(context=16))
    stale_states(monkeypatch)
    with pytest.raises(UnsupportedLayerError, match="after a rollback"):
        check_rollback(runner)


@pytest.mark.parametrize(("name", "layer"), [("zaya", "Zaya"), ("rwkv", "RwkvBlock"), ("xlstm", "xLSTMBlock")])
def test_an_unknown_recurrence_is_refused_by_layer_and_class(name: str, layer: str) -> None:
    with pytest.raises(UnsupportedLayerError, match=rf"layer 0 \({layer}.*recompute"):
        TargetRunner(family_model(name), rollback="tape")


def test_what_the_test_cannot_run_is_refused(monkeypatch: Patch) -> None:
    runner = TargetRunner(tiny_model())

    def fail(*_: object, **__: object) -> None:
        raise ValueError("no such argument")

    monkeypatch.setattr(runner, "run", fail)
    with pytest.raises(UnsupportedLayerError, match=r"could not run.*no such argument.*recompute"):
        check_rollback(runner)


def test_recompute_serves_what_the_tape_does_not() -> None:
    with pytest.warns(UserWarning, match="recompute"):
        runner = TargetRunner(family_model("zaya"))
    assert runner.rollback == "recompute"
    assert_right(runner)


def assert_right(runner: TargetRunner) -> None:
    """Several tokens on top of a state, before and after a rejection."""
    tokens = some_tokens(20)
    expected = reference.next_logits(runner.model, tokens)
    with runner.start(tokens[:9]) as session:
        assert_close(session.verify([*tokens[8:12], 5, 6])[:4], expected[8:12], "logits", 5e-5)
        session.commit(4)
        assert_close(session.verify(tokens[12:]), expected[12:], "logits", 5e-5)


def stale_states(patch: Patch) -> None:
    """What transformers does today: the recurrent state keeps the rejected tokens."""
    right = tape_module.rollback
    patch.setattr(cache, "rollback", lambda state, tape, keep: right(state, tape, tape.length))


def no_state_kept(patch: Patch) -> None:
    right = tape_module.rollback
    patch.setattr(cache, "rollback", lambda state, tape, keep: right(None, tape, keep))


def one_token_too_few(patch: Patch) -> None:
    right = tape_module.rollback
    patch.setattr(cache, "rollback", lambda state, tape, keep: right(state, tape, max(0, keep - 1)))


def last_of_two_blocks_only(patch: Patch) -> None:
    right = tape_module.join
    patch.setattr(cache, "join", lambda tapes: right(tapes[-1:]))


def stale_windows(patch: Patch) -> None:
    right = layers.RecurrentLayer._windows
    patch.setattr(layers.RecurrentLayer, "_windows", lambda self, rejected, own: right(self, 0, own))


def stale_keys(patch: Patch) -> None:
    """The rejected tokens' keys stay in place of the kept ones'."""
    right = layers.AttentionLayer.go_to

    def go_to(self: layers.AttentionLayer, state: layers.LayerState, length: int) -> None:
        seen = self.length
        right(self, state, length)
        if 0 < length < seen:
            buffer = self.buffer
            with torch.inference_mode():
                buffer.keys[..., length - 1 - buffer.start, :] = buffer.keys[..., seen - 1 - buffer.start, :]

    patch.setattr(layers.AttentionLayer, "go_to", go_to)


def restarting_positions(patch: Patch) -> None:
    right = LoadedModel.run

    def run(self: LoadedModel, kept: object, block: Block, *more: object) -> PassOutput:
        return right(self, kept, Block.rows_of(block.tokens), *more)

    patch.setattr(LoadedModel, "run", run)


def scan_from_zeros(patch: Patch) -> None:
    """transformers' Mamba-1 in a long chunk."""
    right = selective_scan.scan
    patch.setattr(selective_scan, "scan", lambda *block: right(*block[:5], None))


def mixer_from_zeros(patch: Patch) -> None:
    right = mixers._run

    def run(now: pass_context.PassContext, layer: layers.RecurrentLayer, *rest: object) -> Tensor:
        if now.purpose == "advance":
            layer.set_state(None)
        return right(now, layer, *rest)

    patch.setattr(mixers, "_run", run)


def verify_as_a_prefill(patch: Patch) -> None:
    """With the clamp of time steps, which decoding does not have."""
    right = pass_context.recording
    patch.setattr(cache, "recording", lambda purpose, block: right(purpose.replace("verify", "prefill"), block))


def next_token_seen(patch: Patch) -> None:
    """Logits of a block that are off by one, but for its last token."""
    right = LoadedModel.run

    def run(self: LoadedModel, *arguments: object, **options: object) -> PassOutput:
        logits = right(self, *arguments, **options).logits
        return PassOutput(torch.cat([logits[:, 1:], logits[:, -1:]], 1))

    patch.setattr(LoadedModel, "run", run)


def slightly_off(patch: Patch) -> None:
    """By less than what the clamp of time steps does to one pass over the text."""
    right = LoadedModel.run

    def run(self: LoadedModel, *arguments: object, **options: object) -> PassOutput:
        logits = right(self, *arguments, **options).logits
        return PassOutput(logits + 0.002 * logits.flip(-1))

    patch.setattr(LoadedModel, "run", run)


def picked_one_too_late(patch: Patch) -> None:
    right = StateTape.rollback
    patch.setattr(StateTape, "rollback", lambda self, state, keep: right(self, state, min(keep + 1, self.length)))


DEFECTS: list[tuple[Callable[[Patch], None], list[str]]] = [
    (stale_states, ["qwen3_next", "kimi_linear", "jamba", "bamba", "minimax+linear_first", "recurrent_gemma"]),
    (no_state_kept, ["qwen3_next", "mamba", "falcon_h1", "minimax+full_first"]),
    (one_token_too_few, ["qwen3_next", "zamba", "mamba2", "recurrent_gemma"]),
    (last_of_two_blocks_only, ["qwen3_next", "kimi_linear", "falcon_mamba", "bamba", "minimax+linear_first"]),
    (stale_windows, ["qwen3_next", "jamba", "bamba", "recurrent_gemma", "lfm2", "lfm3", "inkling_text"]),
    (stale_keys, ["qwen3_next", "minimax+full_first", "lfm2", "qwen3", "gemma3_text"]),
    (restarting_positions, ["qwen3_next", "minimax+linear_first", "recurrent_gemma", "bamba", "qwen3"]),
    (scan_from_zeros, ["mamba", "falcon_mamba", "jamba", "zamba"]),
    (mixer_from_zeros, ["minimax+linear_first", "minimax+full_first", "recurrent_gemma"]),
    (verify_as_a_prefill, sorted(CLAMPED)),
    (next_token_seen, ["qwen3_next", "qwen3"]),
    (slightly_off, ["qwen3_next", *sorted(CLAMPED)]),
    (picked_one_too_late, ["recurrent_gemma"]),
]


@pytest.mark.parametrize(
    ("defect", "name"),
    [pytest.param(defect, name, id=f"{defect.__name__}-{name}") for defect, names in DEFECTS for name in names],
)
def test_a_wrong_rollback_is_caught(monkeypatch: Patch, defect: Callable[[Patch], None], name: str) -> None:
    runner = family_runner(name, "tape")
    check_rollback(runner)
    defect(monkeypatch)
    with pytest.raises(UnsupportedLayerError, match=f"after a rollback the .*{runner.config.model_type}"):
        check_rollback(runner)


@pytest.mark.parametrize("spoilt", [1, 2])
def test_one_token_of_three_may_be_off(monkeypatch: Patch, spoilt: int) -> None:
    """Rounding may flip a choice of experts; a wrong state would show at every token."""
    runner = family_runner("qwen3_5_text", "tape")
    right = session.Session.verify

    def verify(self: session.Session, block: list[int]) -> Tensor:
        logits = right(self, block).clone()
        if len(block) >= 3:
            logits[:spoilt] += torch.randn_like(logits[:spoilt])
        return logits

    monkeypatch.setattr(session.Session, "verify", verify)
    if spoilt == 1:
        check_rollback(runner)
    else:
        with pytest.raises(UnsupportedLayerError, match="logits"):
            check_rollback(runner)


def without_what_is_known(patch: Patch) -> None:
    """As for a model that nobody has looked at: its mixers and its scan have no entry here."""
    patch.setattr(mixers, "MIXERS", {})
    patch.setattr(adapters, "starts_from_zeros", lambda _: False)


@pytest.mark.parametrize("name", ["mamba", "jamba", "zamba", "minimax+linear_first"])
def test_a_model_that_continues_wrongly_is_fed_one_by_one(monkeypatch: Patch, name: str) -> None:
    """transformers' own continuation with several tokens ignores the state or looks at the wrong positions. The last
    layer of this MiniMax is the one that is wrong, so that the next token's logits are right.
    """
    without_what_is_known(monkeypatch)
    runner = TargetRunner(copy.deepcopy(family_model(name)), rollback="recompute")
    assert runner.one_by_one
    assert_right(runner)
    runner.one_by_one = False
    with pytest.raises(AssertionError):
        assert_right(runner)


def test_what_fails_one_by_one_too_is_refused(monkeypatch: Patch) -> None:
    """RecurrentGemma returns no cache: only our own layers can keep its past."""
    without_what_is_known(monkeypatch)
    with pytest.raises(UnsupportedLayerError, match="No rollback mode"):
        TargetRunner(copy.deepcopy(family_model("recurrent_gemma")), rollback="recompute")


@pytest.mark.parametrize("name", ["mamba", "minimax+linear_first", "recurrent_gemma"])
def test_half_precision_leaves_nothing_to_luck(name: str) -> None:
    """The mistakes of these are as small as what half precision does to others: they are known by their code."""
    runner = TargetRunner(copy.deepcopy(family_model(name)).bfloat16(), rollback="recompute")
    assert runner.one_by_one or isinstance(runner.new_cache().cache, RollbackCache)
