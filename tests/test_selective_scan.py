"""The selective scan (Mamba-1) of a short block and its rollback equal the token-by-token recurrence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.jamba import modeling_jamba

from hybridspec.recurrence import selective_scan
from tests import recurrences, reference
from tests.examples import examples
from tests.recurrences import STATES, STEPS, Block, Family, assert_near

SCAN = Family(
    selective_scan.verify,
    reference.selective_scan,
    token_axes={"inputs": -1, "step": -1, "write": -2, "read": -2},
    output_axis=-1,
    decays=frozenset({"step", "rate"}),
)
RATES = {
    # What Mamba models start from.
    "one to the state size": lambda channels, size: -torch.arange(1.0, size + 1).expand(channels, size),
    "slow": lambda *shape: -1e-6 * torch.rand(shape),
    "fast": lambda *shape: -1e4 * torch.rand(shape),
    "mixed": lambda *shape: -(10 ** (8 * torch.rand(shape) - 5)),
}


def make_block(shape: tuple[int, int, int], size: int, kinds: tuple[str, str], state: str | None) -> Block:
    """A block of ``shape`` [B, I, T] with state ``size``, the named ``kinds`` of step and rate, and ``state``."""
    batch, channels, tokens = shape
    step, rate = kinds
    arguments = {
        "inputs": torch.randn(shape),
        "step": STEPS[step](*shape),
        "rate": RATES[rate](channels, size),
        "write": torch.randn(batch, tokens, size),
        "read": torch.randn(batch, tokens, size),
    }
    return Block(SCAN, arguments, None if state is None else STATES[state](batch, channels, size))


@st.composite
def blocks(draw: st.DrawFn, longest: int = 16) -> Block:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, longest)))
    kinds = tuple(draw(st.sampled_from(sorted(table))) for table in (STEPS, RATES))
    state = draw(st.sampled_from([None, *sorted(STATES)]))
    return make_block(shape, draw(st.integers(1, 6)), kinds, state)


@pytest.mark.parametrize("tokens", [1, 2, 12])
def test_a_forgotten_state_leaves_no_trace_and_no_nan(tokens: int) -> None:
    torch.manual_seed(tokens)
    block = make_block((2, 4, tokens), 5, ("usual", "slow"), "usual")
    block.arguments["rate"].fill_(-1e30)
    recurrences.check_forgotten_state(block)


@examples(40)
@given(blocks(longest=70), st.integers(1, 40))
def test_a_scan_in_chunks_of_any_size_is_one_block(block: Block, chunk: int) -> None:
    expected = block.expected()
    before = None if block.state is None else block.state.clone()
    outputs, state = selective_scan.scan(**block.arguments, state=block.state, chunk=chunk)
    assert_near(outputs, expected.outputs, expected.output_scale, "outputs")
    assert_near(state, expected.states[-1], expected.state_scales[-1], "state")
    once, _ = block.verify()
    assert_near(outputs, once, expected.output_scale, "outputs of one block")
    assert before is None or torch.equal(block.state, before), "the scan changed the state it started from"


def test_a_long_scan_in_its_usual_chunks() -> None:
    torch.manual_seed(3)
    block = make_block((1, 3, 200), 4, ("usual", "one to the state size"), "usual")
    expected = block.expected()
    outputs, state = selective_scan.scan(**block.arguments, state=block.state)
    assert_near(outputs, expected.outputs, expected.output_scale, "outputs")
    assert_near(state, expected.states[-1], expected.state_scales[-1], "state")


def test_agrees_with_transformers_one_token_at_a_time() -> None:
    torch.manual_seed(4)
    block = make_block((2, 6, 7), 4, ("usual", "one to the state size"), "usual")
    x, dt, rate, write, read = block.arguments.values()
    state, outputs = block.state.clone(), []
    for t in range(7):
        token = (x[..., t], dt[..., t], rate, write[:, t], read[:, t])
        outputs.append(modeling_jamba.mamba_selective_state_update(state, *token))
    actual, tape = block.verify()
    scales = block.expected()
    assert_near(actual, torch.stack(outputs, -1), scales.output_scale, "outputs")
    assert_near(tape.rollback(block.state, 7), state, scales.state_scales[-1], "state")
