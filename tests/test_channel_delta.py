"""The short form of Kimi delta attention and its rollback equal the token-by-token rule, with a decay by channel."""

import pytest
import torch
from hypothesis import strategies as st

from hybridspec.recurrence import channel_delta
from hybridspec.recurrence.gated_delta import l2_normalise
from tests import recurrences, reference
from tests.recurrences import BETAS, DECAYS, KEYS, Block, Family, assert_near

KDA = Family(
    channel_delta.verify,
    reference.kimi_delta_attention,
    token_axes={"query": -2, "key": -2, "value": -2, "log_decay": -2, "beta": -1},
)


def make_block(shape: tuple[int, int, int], sizes: tuple[int, int], kinds: tuple[str, str, str], state: bool) -> Block:
    """A block of ``shape`` [B, H, T] with key and value ``sizes`` and the named ``kinds`` of key, decay and beta."""
    batch, heads, _ = shape
    key_size, value_size = sizes
    key, decay, beta = kinds
    arguments = {
        "query": l2_normalise(torch.randn(*shape, key_size)) * key_size**-0.5,
        "key": l2_normalise(KEYS[key](*shape, key_size)),
        "value": torch.randn(*shape, value_size),
        "log_decay": DECAYS[decay](*shape, key_size),
        "beta": BETAS[beta](*shape),
    }
    return Block(KDA, arguments, torch.randn(batch, heads, key_size, value_size) if state else None)


@st.composite
def blocks(draw: st.DrawFn, longest: int = 16) -> Block:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, longest)))
    sizes = (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    kinds = tuple(draw(st.sampled_from(sorted(table))) for table in (KEYS, DECAYS, BETAS))
    return make_block(shape, sizes, kinds, draw(st.booleans()))


@pytest.mark.parametrize("tokens", [1, 2, 12])
def test_a_forgotten_state_leaves_no_trace_and_no_nan(tokens: int) -> None:
    torch.manual_seed(tokens)
    block = make_block((2, 2, tokens), (6, 5), ("random", "all of it", "random"), state=True)
    recurrences.check_forgotten_state(block)


def test_equal_decays_of_all_channels_are_the_gated_delta_rule() -> None:
    """The two papers' rules meet there, and so must the two twins."""
    torch.manual_seed(0)
    block = make_block((2, 2, 9), (6, 5), ("random", "weak", "random"), state=True)
    shared = block.arguments["log_decay"][..., :1]
    block.arguments["log_decay"] = shared.expand_as(block.arguments["key"])
    outputs, states = reference.gated_delta_rule(**block.arguments | {"log_decay": shared[..., 0]}, state=block.state)
    actual, tape = block.verify()
    assert_near(actual, outputs, 1.0, "outputs")
    assert_near(tape.rollback(block.state, 5), states[5], 1.0, "state")


@pytest.mark.parametrize("tokens", [1, 7])
def test_agrees_with_transformers_one_token_at_a_time(tokens: int) -> None:
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    torch.manual_seed(tokens)
    block = make_block((2, 3, tokens), (8, 5), ("random", "weak", "random"), state=True)
    # transformers has tokens before heads, and scales the query itself.
    given = {name: x.transpose(1, 2) for name, x in block.arguments.items()}
    given["g"], given["query"] = given.pop("log_decay"), given["query"] * 8**0.5
    outputs, state = kimi.recurrent_kimi_delta_attention(**given, initial_state=block.state, output_final_state=True)
    actual, tape = block.verify()
    assert_near(actual, outputs.transpose(1, 2), 1.0, "outputs")
    assert_near(tape.rollback(block.state, tokens), state, 1.0, "state")
