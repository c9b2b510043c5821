"""RG-LRU: outputs and rollback equal the token-by-token recurrence, and transformers' own.

Decays are numbers in [0, 1] here, not logarithms: 0, where a sequence starts anew, is one of them.
"""

import pytest
import torch
from hypothesis import strategies as st
from transformers import RecurrentGemmaConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from hybridspec.recurrence import rg_lru
from hybridspec.recurrence.rg_lru import StateTape
from hybridspec.recurrence.tape import rollback
from tests import recurrences, reference
from tests.recurrences import DECAYS, STATES, Block, Family

RG_LRU = Family(
    rg_lru.verify,
    reference.real_gated_linear_recurrence,
    token_axes={"inputs": -2, "decay": -2},
    decays=frozenset({"decay"}),
)


def make_block(shape: tuple[int, int, int], decay: str, state: str | None) -> Block:
    """A block of ``shape`` [B, T, W], the named ``decay``, and ``state``."""
    arguments = {"inputs": torch.randn(shape), "decay": DECAYS[decay](*shape).exp()}
    return Block(RG_LRU, arguments, None if state is None else STATES[state](shape[0], shape[2]))


@st.composite
def blocks(draw: st.DrawFn, longest: int = 16) -> Block:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, longest)), draw(st.integers(1, 8)))
    decay = draw(st.sampled_from(sorted(DECAYS)))
    return make_block(shape, decay, draw(st.sampled_from([None, *sorted(STATES)])))


@pytest.mark.parametrize("tokens", [1, 2, 12])
def test_a_forgotten_state_leaves_no_trace_and_no_nan(tokens: int) -> None:
    torch.manual_seed(tokens)
    recurrences.check_forgotten_state(make_block((2, tokens, 5), "all of it", "usual"))


def test_a_kept_state_does_not_hold_the_block() -> None:
    """A view of the tape would keep all the other states alive as long as a session or a mark has this one."""
    _, tape = make_block((1, 9, 4), "weak", "usual").verify()
    kept = rollback(None, tape, 3)
    assert kept.untyped_storage().nbytes() == kept.numel() * kept.element_size()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7])
def test_the_states_are_those_of_transformers(dtype: torch.dtype, tokens: int) -> None:
    """From the gates that transformers computes; the first token of a sequence resets the state there."""
    torch.manual_seed(tokens)
    native = RecurrentGemmaRglru(RecurrentGemmaConfig(lru_width=32, num_attention_heads=4, hidden_size=32))
    for parameter in native.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    native, seen = native.to(dtype), []
    scan = native._rnn_scan
    native._rnn_scan = lambda **arguments: seen.append(arguments) or scan(**arguments)
    with torch.no_grad():
        for start in (0, 5):
            stop = start + tokens
            outputs = native(torch.randn(2, tokens, 32, dtype=dtype), torch.arange(start, stop).expand(2, tokens))
            given = seen.pop()
            decay = given["recurrent_gate"].float() * ~given["reset"]
            state = given["recurrent_states"]
            ours, tape = rg_lru.verify(given["hidden_states"].float(), decay, state)
            assert isinstance(tape, StateTape)
            assert torch.allclose(ours.to(dtype), outputs, atol=1e-6)
            assert torch.allclose(rollback(state, tape, tokens), native.recurrent_states, atol=1e-6)
