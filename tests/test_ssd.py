"""The short form of state space duality (Mamba-2) and its rollback equal the token-by-token recurrence."""

import pytest
import torch
from hypothesis import strategies as st
from transformers.models.bamba import modeling_bamba

from hybridspec.recurrence import ssd
from tests import recurrences, reference
from tests.recurrences import STATES, STEPS, Block, Family, assert_near

SSD = Family(
    ssd.verify,
    reference.state_space_duality,
    token_axes={"inputs": -2, "step": -1, "write": -2, "read": -2},
    decays=frozenset({"step", "rate"}),
)
RATES = {
    # What Mamba-2 models start from.
    "one to the number of heads": lambda heads: -torch.arange(1.0, heads + 1),
    "slow": lambda heads: -1e-6 * torch.rand(heads),
    "fast": lambda heads: -1e4 * torch.rand(heads),
    "mixed": lambda heads: -(10 ** (8 * torch.rand(heads) - 5)),
}


def make_block(
    shape: tuple[int, int, int, int], sizes: tuple[int, int], kinds: tuple[str, str], state: str | None
) -> Block:
    """A block of ``shape`` [B, groups, heads for each, T] with head and state ``sizes``, the named ``kinds`` of step
    and rate, and ``state``.
    """
    batch, groups, heads, tokens = shape
    heads *= groups
    size, state_size = sizes
    step, rate = kinds
    arguments = {
        "inputs": torch.randn(batch, heads, tokens, size),
        "step": STEPS[step](batch, heads, tokens),
        "rate": RATES[rate](heads),
        "write": torch.randn(batch, groups, tokens, state_size),
        "read": torch.randn(batch, groups, tokens, state_size),
    }
    return Block(SSD, arguments, None if state is None else STATES[state](batch, heads, size, state_size))


@st.composite
def blocks(draw: st.DrawFn, longest: int = 16) -> Block:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    shape = tuple(draw(st.integers(1, 3)) for _ in range(3))
    sizes = (draw(st.integers(1, 6)), draw(st.integers(1, 6)))
    kinds = tuple(draw(st.sampled_from(sorted(table))) for table in (STEPS, RATES))
    state = draw(st.sampled_from([None, *sorted(STATES)]))
    return make_block((*shape, draw(st.integers(1, longest))), sizes, kinds, state)


@pytest.mark.parametrize("tokens", [1, 2, 12])
def test_a_forgotten_state_leaves_no_trace_and_no_nan(tokens: int) -> None:
    torch.manual_seed(tokens)
    block = make_block((2, 2, 2, tokens), (6, 5), ("usual", "slow"), "usual")
    block.arguments["rate"].fill_(-1e30)
    recurrences.check_forgotten_state(block)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_agrees_with_transformers_one_token_at_a_time(groups: int) -> None:
    torch.manual_seed(groups)
    block = make_block((2, groups, 2, 7), (4, 5), ("usual", "one to the number of heads"), "usual")
    x, dt, rate, write, read = block.arguments.values()
    state, outputs = block.state.clone(), []
    rate = rate[:, None, None].expand(-1, 4, 5)
    for t in range(7):
        steps = dt[:, :, t, None].expand(-1, -1, 4)
        token = (x[:, :, t], steps, rate, write[:, :, t], read[:, :, t])
        outputs.append(modeling_bamba.mamba2_selective_state_update(state, *token))
    actual, tape = block.verify()
    scales = block.expected()
    assert_near(actual, torch.stack(outputs, 2), scales.output_scale, "outputs")
    assert_near(tape.rollback(block.state, 7), state, scales.state_scales[-1], "state")
