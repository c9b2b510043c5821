"""The short form of the gated delta rule and its rollback equal the token-by-token rule, whatever shapes and decays.

Tolerance: fp32 inputs against a float64 twin. Relative to the largest entry (at least 1) it is 1e-5, plus what fp32
loses in ``exp(total_i - total_j)``: 6e-8 (half a unit in the last place) of the largest sum of log decays, four times.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridspec.recurrence import gated_delta
from hybridspec.recurrence import tape as tape_module
from hybridspec.recurrence.gated_delta import Tape
from tests import reference
from tests.examples import examples


class Block(NamedTuple):
    """Arguments of ``gated_delta.verify`` in its order."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor
    state: Tensor | None

    @property
    def tokens(self) -> int:
        return self.key.shape[-2]

    @property
    def tolerance(self) -> float:
        return 1e-5 + 4 * 6e-8 * self.log_decay.abs().sum(-1).max().item()


DECAYS = {
    "weak": lambda shape: -0.2 * torch.rand(shape),
    "strong": lambda shape: -20 * torch.rand(shape),
    "none": torch.zeros,
    "all of it": lambda shape: torch.full(shape, -50.0),
    "now and then all": lambda shape: -50.0 * (torch.rand(shape) < 0.3) - 0.1 * torch.rand(shape),
}
BETAS = {
    "zero": torch.zeros,
    "one": torch.ones,
    "random": torch.rand,
    "zero or one": lambda shape: torch.rand(shape).round(),
}
KEYS = {
    "random": torch.randn,
    # The worst conditioned system: every token writes where the last one wrote.
    "one direction": lambda shape: torch.randn(shape[:-2] + (1, shape[-1])).expand(shape),
    "zero": torch.zeros,
}


def make_block(shape: tuple[int, int, int], sizes: tuple[int, int], kinds: tuple[str, str, str], state: bool) -> Block:
    batch, heads, tokens = shape
    key_size, value_size = sizes
    key, decay, beta = kinds
    return Block(
        query=gated_delta.l2_normalise(torch.randn(*shape, key_size)) * key_size**-0.5,
        key=gated_delta.l2_normalise(KEYS[key]((*shape, key_size))),
        value=torch.randn(*shape, value_size),
        log_decay=DECAYS[decay](shape),
        beta=BETAS[beta](shape),
        state=torch.randn(batch, heads, key_size, value_size) if state else None,
    )


@st.composite
def blocks(draw: st.DrawFn, longest: int = 20) -> Block:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, longest)))
    sizes = (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    kinds = tuple(draw(st.sampled_from(sorted(table))) for table in (KEYS, DECAYS, BETAS))
    return make_block(shape, sizes, kinds, draw(st.booleans()))


def assert_near(actual: Tensor, expected: Tensor | np.ndarray, tolerance: float, what: str) -> None:
    wanted = torch.as_tensor(expected).double()
    assert actual.shape == wanted.shape, what
    error = (actual.double() - wanted).abs().max().item()
    scale = max(1.0, wanted.abs().max().item())
    # Written so that a NaN fails.
    assert error <= tolerance * scale, f"{what}: error {error:.2e}, allowed {tolerance * scale:.2e}"


@examples(120)
@given(blocks())
def test_outputs_and_every_rollback_equal_the_twin(block: Block) -> None:
    outputs, states = reference.gated_delta_rule(*block)
    before = None if block.state is None else block.state.clone()
    actual, tape = gated_delta.verify(*block)
    assert_near(actual, outputs, block.tolerance, "outputs")
    for keep in range(block.tokens + 1):
        assert_near(tape_module.rollback(block.state, tape, keep), states[keep], block.tolerance, f"state after {keep}")
    if before is not None:
        assert torch.equal(block.state, before), "a verify pass or a rollback changed the state it started from"


@examples(60)
@given(blocks(), st.data())
def test_each_row_keeps_its_own_number_of_tokens(block: Block, data: st.DataObject) -> None:
    batch = block.key.shape[0]
    keep = data.draw(st.lists(st.integers(0, block.tokens), min_size=batch, max_size=batch))
    _, tape = gated_delta.verify(*block)
    rows = tape_module.rollback(block.state, tape, torch.tensor(keep))
    for row, count in enumerate(keep):
        alone = tape_module.rollback(block.state, tape, count)[row]
        assert_near(rows[row], alone, block.tolerance, f"row {row}, {count} tokens")


@examples(60)
@given(blocks(longest=12), st.data())
def test_two_joined_blocks_are_one_block(block: Block, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, block.tokens - 1))
    whole, whole_tape = gated_delta.verify(*block)
    halves = []
    state, outputs = block.state, []
    for part in (slice(0, cut), slice(cut, None)):
        piece = [block.query[..., part, :], block.key[..., part, :], block.value[..., part, :]]
        out, tape = gated_delta.verify(*piece, block.log_decay[..., part], block.beta[..., part], state)
        halves.append(tape)
        outputs.append(out)
        state = tape_module.rollback(state, tape, out.shape[-2])
    joined = tape_module.join(halves)
    assert_near(torch.cat(outputs, -2), whole, block.tolerance, "outputs")
    assert_near(joined.write, whole_tape.write, block.tolerance, "writes")
    for keep in range(block.tokens + 1):
        expected = tape_module.rollback(block.state, whole_tape, keep)
        assert_near(tape_module.rollback(block.state, joined, keep), expected, block.tolerance, f"state after {keep}")


@examples(40)
@given(blocks(), st.integers(1, 4), st.data())
def test_stacked_layers_roll_back_like_each_layer(block: Block, layers: int, data: st.DataObject) -> None:
    keep = data.draw(st.integers(0, block.tokens))
    per_row = torch.tensor(
        data.draw(st.lists(st.integers(0, block.tokens), min_size=len(block.key), max_size=len(block.key)))
    )
    # Layers of one shape and different content.
    each = [block._replace(value=block.value * (i + 1), log_decay=block.log_decay / (i + 1)) for i in range(layers)]
    tapes = [gated_delta.verify(*layer)[1] for layer in each]
    states = None if block.state is None else torch.stack([block.state * (i + 1) for i in range(layers)])
    stacked = tape_module.stack(tapes)
    for count in (keep, per_row):
        together = tape_module.rollback(states, stacked, count)
        for i, tape in enumerate(tapes):
            alone = tape_module.rollback(None if states is None else states[i], tape, count)
            assert_near(together[i], alone, block.tolerance, f"layer {i}")


@pytest.mark.parametrize("tokens", [32, 64])
def test_longest_blocks_of_the_short_form(tokens: int) -> None:
    """The prefill goes up to 32 tokens through this form, a verify block as far as a user likes."""
    torch.manual_seed(tokens)
    block = make_block((1, 2, tokens), (8, 8), ("random", "weak", "random"), state=True)
    outputs, states = reference.gated_delta_rule(*block)
    actual, tape = gated_delta.verify(*block)
    assert_near(actual, outputs, block.tolerance, "outputs")
    assert_near(tape_module.rollback(block.state, tape, tokens - 1), states[tokens - 1], block.tolerance, "state")


def test_a_forgotten_state_leaves_no_trace_and_no_nan() -> None:
    """After a decay of exp(-50 * 20) nothing of the old state may be left, and nothing may overflow on the way."""
    torch.manual_seed(0)
    block = make_block((1, 2, 20), (6, 5), ("random", "all of it", "random"), state=True)
    outputs, tape = gated_delta.verify(*block._replace(state=1e6 * block.state))
    lean, _ = gated_delta.verify(*block._replace(state=None))
    assert torch.allclose(outputs, lean, atol=1e-5)
    assert tape_module.rollback(1e6 * block.state, tape, 20).isfinite().all()


def test_tokens_that_are_not_kept_do_not_matter() -> None:
    """Whatever the rejected tokens were, also infinite ones, a whole-block count must not read them."""
    torch.manual_seed(1)
    block = make_block((1, 2, 6), (4, 4), ("random", "weak", "random"), state=True)
    _, tape = gated_delta.verify(*block)
    expected = tape_module.rollback(block.state, tape, 3)
    spoiled = Tape(*(part.clone() for part in tape))
    spoiled.log_decay[..., 3:] = float("nan")
    spoiled.key[..., 3:, :] = float("nan")
    spoiled.write[..., 3:, :] = float("nan")
    assert torch.equal(tape_module.rollback(block.state, spoiled, 3), expected)


def test_normalisation_matches_the_formula_and_survives_zero() -> None:
    torch.manual_seed(2)
    vectors = torch.randn(3, 7)
    vectors[1] = 0.0
    expected = vectors.double() / torch.sqrt((vectors.double() ** 2).sum(-1, keepdim=True) + 1e-6)
    assert torch.allclose(gated_delta.l2_normalise(vectors).double(), expected, atol=1e-6)
