"""The short form of the gated delta rule and its rollback equal the token-by-token rule, whatever shapes and decays."""

import pytest
import torch
from hypothesis import strategies as st
from transformers.models.qwen3_5 import modeling_qwen3_5

from hybridspec.recurrence import gated_delta
from tests import recurrences, reference
from tests.recurrences import BETAS, DECAYS, KEYS, Block, Family, assert_near

GATED_DELTA = Family(
    gated_delta.verify,
    reference.gated_delta_rule,
    token_axes={"query": -2, "key": -2, "value": -2, "log_decay": -1, "beta": -1},
)


def make_block(shape: tuple[int, int, int], sizes: tuple[int, int], kinds: tuple[str, str, str], state: bool) -> Block:
    """A block of ``shape`` [B, H, T] with key and value ``sizes`` and the named ``kinds`` of key, decay and beta."""
    batch, heads, _ = shape
    key_size, value_size = sizes
    key, decay, beta = kinds
    arguments = {
        "query": gated_delta.l2_normalise(torch.randn(*shape, key_size)) * key_size**-0.5,
        "key": gated_delta.l2_normalise(KEYS[key](*shape, key_size)),
        "value": torch.randn(*shape, value_size),
        "log_decay": DECAYS[decay](*shape),
        "beta": BETAS[beta](*shape),
    }
    return Block(GATED_DELTA, arguments, torch.randn(batch, heads, key_size, value_size) if state else None)


@st.composite
def blocks(draw: st.DrawFn, longest: int = 20) -> Block:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, longest)))
    sizes = (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    kinds = tuple(draw(st.sampled_from(sorted(table))) for table in (KEYS, DECAYS, BETAS))
    return make_block(shape, sizes, kinds, draw(st.booleans()))


@pytest.mark.parametrize("tokens", [32, 64])
def test_longest_blocks_of_the_short_form(tokens: int) -> None:
    """The prefill goes up to 32 tokens through this form, a verify block as far as a user likes."""
    torch.manual_seed(tokens)
    block = make_block((1, 2, tokens), (8, 8), ("random", "weak", "random"), state=True)
    recurrences.check_outputs_and_every_rollback(block)


@pytest.mark.parametrize("tokens", [1, 2, 20])
def test_a_forgotten_state_leaves_no_trace_and_no_nan(tokens: int) -> None:
    torch.manual_seed(tokens)
    block = make_block((1, 2, tokens), (6, 5), ("random", "all of it", "random"), state=True)
    recurrences.check_forgotten_state(block)


@pytest.mark.parametrize("tokens", [1, 7])
def test_agrees_with_transformers_one_token_at_a_time(tokens: int) -> None:
    torch.manual_seed(tokens)
    block = make_block((2, 3, tokens), (8, 5), ("random", "weak", "random"), state=True)
    # transformers has tokens before heads, and scales the query itself.
    given = {name: x.transpose(1, 2) for name, x in block.arguments.items()}
    given["g"], given["query"] = given.pop("log_decay"), given["query"] * 8**0.5
    outputs, state = modeling_qwen3_5.torch_recurrent_gated_delta_rule(
        **given, initial_state=block.state, output_final_state=True
    )
    actual, tape = block.verify()
    assert_near(actual, outputs.transpose(1, 2), 1.0, "outputs")
    assert_near(tape.rollback(block.state, tokens), state, 1.0, "state")


def test_normalisation_matches_the_formula_and_survives_zero() -> None:
    torch.manual_seed(2)
    vectors = torch.randn(3, 7)
    vectors[1] = 0.0
    expected = vectors.double() / torch.sqrt((vectors.double() ** 2).sum(-1, keepdim=True) + 1e-6)
    assert torch.allclose(gated_delta.l2_normalise(vectors).double(), expected, atol=1e-6)
