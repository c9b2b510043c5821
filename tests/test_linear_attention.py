"""The short form of decayed linear attention (lightning) and its rollback equal the token-by-token recurrence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridspec.recurrence import linear_attention
from tests import recurrences, reference
from tests.examples import examples
from tests.recurrences import DECAYS, STATES, Block, Family

LINEAR = Family(
    linear_attention.verify,
    reference.lightning_attention,
    token_axes={"query": -2, "key": -2, "value": -2, "log_decay": -1},
    decays=frozenset({"log_decay"}),
)


def fixed_by_head(batch: int, heads: int, tokens: int) -> torch.Tensor:
    """The slopes of MiniMax-01: ``2^(-8 h / H)`` for head h = 1 ... H."""
    slopes = 2 ** (-8 * torch.arange(1.0, heads + 1) / heads)
    return -slopes.unsqueeze(-1).expand(batch, heads, tokens)


ALL_DECAYS = {**DECAYS, "fixed by head": fixed_by_head}


def make_block(shape: tuple[int, int, int], sizes: tuple[int, int], decay: str, state: str | None) -> Block:
    """A block of ``shape`` [B, H, T] with key and value ``sizes``, the named ``decay``, and ``state``."""
    batch, heads, _ = shape
    key_size, value_size = sizes
    arguments = {
        "query": torch.randn(*shape, key_size),
        "key": torch.randn(*shape, key_size),
        "value": torch.randn(*shape, value_size),
        "log_decay": ALL_DECAYS[decay](*shape),
    }
    return Block(LINEAR, arguments, None if state is None else STATES[state](batch, heads, key_size, value_size))


@st.composite
def blocks(draw: st.DrawFn, longest: int = 16) -> Block:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, longest)))
    sizes = (draw(st.integers(1, 8)), draw(st.integers(1, 8)))
    decay = draw(st.sampled_from(sorted(ALL_DECAYS)))
    return make_block(shape, sizes, decay, draw(st.sampled_from([None, *sorted(STATES)])))


@examples(100)
@given(blocks())
def test_outputs_and_every_rollback_equal_the_twin(block: Block) -> None:
    recurrences.check_outputs_and_every_rollback(block)


@examples(50)
@given(blocks(), st.data())
def test_each_row_keeps_its_own_number_of_tokens(block: Block, data: st.DataObject) -> None:
    recurrences.check_each_row_keeps_its_own(block, data.draw(recurrences.counts(block)))


@examples(40)
@given(blocks(), st.data())
def test_stacked_layers_roll_back_like_each_layer(block: Block, data: st.DataObject) -> None:
    keep = data.draw(st.lists(recurrences.counts(block), min_size=1, max_size=3))
    recurrences.check_stacked_layers(block, keep, axis=data.draw(st.sampled_from([0, 1])))


@examples(50)
@given(blocks(), st.data())
def test_joined_blocks_are_one_block(block: Block, data: st.DataObject) -> None:
    recurrences.check_joined_blocks(block, data.draw(recurrences.cuts(block)))


@examples(50)
@given(blocks(), st.data())
def test_parts_of_a_tape_lead_from_state_to_state(block: Block, data: st.DataObject) -> None:
    recurrences.check_parts(block, data.draw(recurrences.cuts(block)))


@examples(40)
@given(blocks(), st.data())
def test_tokens_that_are_not_kept_are_not_read(block: Block, data: st.DataObject) -> None:
    recurrences.check_dropped_tokens_are_not_read(block, data.draw(recurrences.counts(block)))


@pytest.mark.parametrize("tokens", [1, 2, 12])
def test_a_forgotten_state_leaves_no_trace_and_no_nan(tokens: int) -> None:
    torch.manual_seed(tokens)
    recurrences.check_forgotten_state(make_block((2, 3, tokens), (6, 5), "all of it", "usual"))
