"""The short form of decayed linear attention (lightning) and its rollback equal the token-by-token recurrence."""

import pytest
import torch
from hypothesis import strategies as st

from hybridspec.recurrence import linear_attention
from tests import recurrences, reference
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


@pytest.mark.parametrize("tokens", [1, 2, 12])
def test_a_forgotten_state_leaves_no_trace_and_no_nan(tokens: int) -> None:
    torch.manual_seed(tokens)
    recurrences.check_forgotten_state(make_block((2, 3, tokens), (6, 5), "all of it", "usual"))
