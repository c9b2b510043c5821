"""What every recurrence must satisfy, whatever its family: the short form, its tape and its rollback equal the twin.

Each check takes a block of tokens of some family and holds it against that family's token-by-token twin in float64.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from hybridspec.recurrence.tape import join, rollback, stack

#: fp32 against float64, in units of the scale that a value is held against. Measured: at most 2e-6.
TOLERANCE = 1e-5
#: Below it fp32 has no full precision.
SMALLEST = 1e-30

#: Log decays of a block: from none to such that nothing is left, even of products that fp32 cannot tell from zero.
DECAYS: dict[str, Callable[..., Tensor]] = {
    "none": torch.zeros,
    "close to none": lambda *shape: -1e-6 * torch.rand(shape),
    "weak": lambda *shape: -0.2 * torch.rand(shape),
    "strong": lambda *shape: -20 * torch.rand(shape),
    "underflow": lambda *shape: -1e4 * torch.rand(shape),
    # What a sum of log decays from the start of the block gets wrong: small ones after a very large one.
    "now and then underflow": lambda *shape: -1e4 * (torch.rand(shape) < 0.3) - 0.1 * torch.rand(shape),
    "all of it": lambda *shape: torch.full(shape, -200.0),
    "now and then to zero": lambda *shape: -0.1 * torch.rand(shape).masked_fill(torch.rand(shape) < 0.3, torch.inf),
}

#: Discretisation steps of a state space model; its decays are their products with the rates.
STEPS: dict[str, Callable[..., Tensor]] = {
    "usual": lambda *shape: F.softplus(torch.randn(shape)),
    "zero": torch.zeros,
    "tiny": lambda *shape: 1e-6 * torch.rand(shape),
    "large": lambda *shape: 100 * torch.rand(shape),
    "now and then large": lambda *shape: 1e4 * (torch.rand(shape) < 0.3) + 0.1 * torch.rand(shape),
}
#: Only for recurrences that are linear in the state: a delta rule takes a large state back by differences.
STATES: dict[str, Callable[..., Tensor]] = {
    "usual": torch.randn,
    "large": lambda *shape: 1e6 * torch.randn(shape),
}
#: Strengths of a delta rule's writes; up to 2 where a model allows negative eigenvalues (arXiv 2411.12537).
BETAS: dict[str, Callable[..., Tensor]] = {
    "zero": torch.zeros,
    "one": torch.ones,
    "random": lambda *shape: torch.rand(shape),
    "zero or one": lambda *shape: torch.rand(shape).round(),
    "up to two": lambda *shape: 2 * torch.rand(shape),
}
#: Keys of a delta rule, before they are normalised.
KEYS: dict[str, Callable[..., Tensor]] = {
    "random": torch.randn,
    # The worst conditioned system: every token writes where the last one wrote.
    "one direction": lambda *shape: torch.randn(*shape[:-2], 1, shape[-1]).expand(shape),
    "zero": torch.zeros,
}


@dataclass(frozen=True)
class Family:
    """A recurrence and its twin: both take the arguments by name, and ``state``.

    Attributes:
        token_axes: the axis of the tokens, by name of the argument; those without one are a layer's constants.
        output_axis: the axis of the tokens in the outputs.
        decays: the arguments that make up the decay, if outputs and states are linear in all others; empty for a delta
            rule, whose writes depend on the state.
    """

    verify: Callable[..., tuple[Tensor, Any]]
    twin: Callable[..., tuple[np.ndarray, list[np.ndarray]]]
    token_axes: Mapping[str, int]
    output_axis: int = -2
    decays: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Expected:
    """Outputs and the ``T + 1`` states of the twin, each with the scale that an error is measured in."""

    outputs: np.ndarray
    states: list[np.ndarray]
    output_scale: np.ndarray
    state_scales: list[np.ndarray]


@dataclass(frozen=True)
class Block:
    """Tokens of one layer, and the state before them (None for zeros)."""

    family: Family
    arguments: dict[str, Tensor]
    state: Tensor | None

    @property
    def tokens(self) -> int:
        name, axis = next(iter(self.family.token_axes.items()))
        return self.arguments[name].shape[axis]

    @property
    def rows(self) -> int:
        return self.arguments[next(iter(self.family.token_axes))].shape[0]

    def verify(self) -> tuple[Tensor, Any]:
        return self.family.verify(**self.arguments, state=self.state)

    def part(self, start: int, stop: int, state: Tensor | None) -> "Block":
        """The tokens from ``start`` to before ``stop``, from ``state``."""
        axes = self.family.token_axes
        cut = {n: x.narrow(axes[n], start, stop - start) if n in axes else x for n, x in self.arguments.items()}
        return Block(self.family, cut, state)

    def layer(self, index: int) -> "Block":
        """A block of the same shapes and other content: the same for ``index`` 0, else its tokens in another order."""
        axes = self.family.token_axes
        other = {n: x.roll(index, axes[n]) if n in axes else x / (index + 1) for n, x in self.arguments.items()}
        return Block(self.family, other, None if self.state is None else self.state * (index + 1))

    def expected(self) -> Expected:
        """A sum of products is held, entry by entry, against the sum of their magnitudes; a delta rule, whose writes
        are differences, against the largest entry or 1.
        """
        outputs, states = self.family.twin(**self.arguments, state=self.state)
        if self.family.decays:
            sizes = {n: x if n in self.family.decays else x.abs() for n, x in self.arguments.items()}
            scales = self.family.twin(**sizes, state=None if self.state is None else self.state.abs())
        else:
            largest = [np.full_like(x, max(1.0, np.abs(x).max())) for x in (outputs, *states)]
            scales = largest[0], largest[1:]
        return Expected(outputs, states, *scales)


def assert_near(actual: Tensor, expected: Tensor | np.ndarray, scale: float | np.ndarray, what: str) -> None:
    """Every entry of ``actual`` is within :data:`TOLERANCE` times ``scale`` of ``expected``."""
    wanted = torch.as_tensor(expected).double()
    assert actual.dtype == torch.float32, what
    assert actual.shape == wanted.shape, what
    excess = (actual.double() - wanted).abs() / (TOLERANCE * torch.as_tensor(scale) + SMALLEST)
    # Written so that a NaN fails.
    assert (excess <= 1).all(), f"{what}: error {excess.max().item():.2e} times what is allowed"


def check_outputs_and_every_rollback(block: Block) -> None:
    """Outputs, and the state after 0, 1, ..., T tokens; nothing that was handed in changes."""
    expected = block.expected()
    given = [*block.arguments.values(), *([] if block.state is None else [block.state])]
    before = [x.clone() for x in given]
    outputs, tape = block.verify()
    recorded = [x.clone() for x in tape]
    assert tape.length == block.tokens
    assert_near(outputs, expected.outputs, expected.output_scale, "outputs")
    for keep, (state, scale) in enumerate(zip(expected.states, expected.state_scales, strict=True)):
        assert tape.state_shape == state.shape
        assert_near(rollback(block.state, tape, keep), state, scale, f"state after {keep}")
    # What each row keeps takes another path.
    assert_near(rollback(block.state, tape, torch.tensor([block.tokens])), state, scale, "state of the whole block")
    assert all(map(torch.equal, given, before)), "a verify pass or a rollback changed what it was given"
    assert all(map(torch.equal, tape, recorded)), "a rollback changed the tape"


def check_each_row_keeps_its_own(block: Block, keep: Sequence[int]) -> None:
    expected = block.expected()
    _, tape = block.verify()
    rows = rollback(block.state, tape, torch.tensor(keep))
    for row, count in enumerate(keep):
        scale = expected.state_scales[count][row]
        alone = rollback(block.state, tape, count)[row]
        assert_near(rows[row], alone, scale, f"row {row}, {count} tokens")
        assert_near(rows[row], expected.states[count][row], scale, f"row {row}, {count} tokens, twin")


def check_stacked_layers(block: Block, keep: Sequence[Sequence[int]], axis: int) -> None:
    """Layers stacked in front of the batch (axis 0) or groups of heads behind it (axis 1): one count for all, one for
    each row, and one for each layer and row (``keep``).
    """
    layers = [block.layer(i) for i in range(len(keep))]
    expected = [layer.expected() for layer in layers]
    stacked = stack([layer.verify()[1] for layer in layers], axis)
    state = None if block.state is None else torch.stack([layer.state for layer in layers], axis)
    each = torch.tensor(keep)
    first = each[0].unsqueeze(axis)
    cases = {
        "all": (keep[0][0], torch.full_like(each, keep[0][0])),
        "rows": (first, each[0].expand_as(each)),
        "layers and rows": (each if axis == 0 else each.T, each),
    }
    for what, (count, kept) in cases.items():
        together = rollback(state, stacked, count).movedim(axis, 0)
        for i, layer in enumerate(expected):
            for row, n in enumerate(kept[i].tolist()):
                wanted, scale = layer.states[n][row], layer.state_scales[n][row]
                assert_near(together[i, row], wanted, scale, f"count for {what}, layer {i}, row {row}")


def check_joined_blocks(block: Block, cuts: Sequence[int]) -> None:
    """Blocks in a row, each from where the last one ended, are one block."""
    expected = block.expected()
    outputs, tapes, state = [], [], block.state
    for start, stop in zip([0, *cuts], [*cuts, block.tokens], strict=True):
        output, tape = block.part(start, stop, state).verify()
        outputs.append(output)
        tapes.append(tape)
        state = rollback(state, tape, stop - start)
    assert_near(torch.cat(outputs, block.family.output_axis), expected.outputs, expected.output_scale, "outputs")
    joined = join(tapes)
    assert joined.length == block.tokens
    for keep, (wanted, scale) in enumerate(zip(expected.states, expected.state_scales, strict=True)):
        assert_near(rollback(block.state, joined, keep), wanted, scale, f"state after {keep}")


def check_parts(block: Block, cuts: Sequence[int]) -> None:
    """Parts of a tape, one token each or cut at ``cuts``, lead from state to state, and join to the tape again."""
    expected = block.expected()
    _, tape = block.verify()
    for ends in (range(1, block.tokens + 1), [*cuts, block.tokens]):
        state, start, parts = block.state, 0, []
        for stop in ends:
            parts.append(tape.part(start, stop))
            state = rollback(state, parts[-1], stop - start)
            assert_near(state, expected.states[stop], expected.state_scales[stop], f"state after {stop}, by parts")
            start = stop
        again = rollback(block.state, join(parts), block.tokens)
        assert_near(again, expected.states[-1], expected.state_scales[-1], "parts joined")


def check_dropped_tokens_are_not_read(block: Block, keep: Sequence[int]) -> None:
    """Whatever the rejected tokens left on the tape, also NaN, no state may show it."""
    _, tape = block.verify()
    rows = [type(tape)(*(x[row : row + 1] for x in tape)) for row in range(block.rows)]
    states, states_by_row = [], []
    # Both go through the same copies: another layout in memory may change the last bit.
    for left in (1.0, torch.nan):
        states.append(rollback(block.state, _with_dropped(tape, keep[0], left), keep[0]))
        each = [_with_dropped(row, count, left) for row, count in zip(rows, keep, strict=True)]
        together = type(tape)(*map(torch.cat, zip(*each, strict=True)))
        states_by_row.append(rollback(block.state, together, torch.tensor(keep)))
    assert torch.equal(*states)
    assert torch.equal(*states_by_row)


def _with_dropped(tape: Any, keep: int, left: float) -> Any:
    """The tape with ``left`` for all that the tokens after the first ``keep`` left on it."""
    dropped = tape.part(keep, tape.length)
    return join([tape.part(0, keep), type(tape)(*(torch.full_like(x, left) for x in dropped))])


def check_forgotten_state(block: Block) -> None:
    """After decays that leave nothing, a state of any size is as good as none."""
    huge, lean = replace(block, state=torch.full_like(block.state, 1e30)), replace(block, state=None)
    outputs, tape = huge.verify()
    expected = lean.expected()
    assert_near(outputs, expected.outputs, expected.output_scale, "outputs")
    for keep in range(1, block.tokens + 1):
        scale = expected.state_scales[keep]
        assert_near(rollback(huge.state, tape, keep), expected.states[keep], scale, f"state after {keep}")


def counts(block: Block) -> st.SearchStrategy[list[int]]:
    """How many tokens each row keeps."""
    return st.lists(st.integers(0, block.tokens), min_size=block.rows, max_size=block.rows)


def cuts(block: Block) -> st.SearchStrategy[list[int]]:
    """Where to cut a block into two or more; nowhere if it is a single token."""
    if block.tokens == 1:
        return st.just([])
    return st.sets(st.integers(1, block.tokens - 1), min_size=1, max_size=3).map(sorted)
