"""The short convolution equals the one that sees its inputs one at a time, and agrees with transformers' own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from hybridspec.recurrence import convolution
from tests import reference
from tests.examples import examples


@st.composite
def windows(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor | None]:
    """A window of ``kernel`` old and T new inputs, the weights, and perhaps a bias."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    batch, channels = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    kernel, tokens = draw(st.integers(1, 5)), draw(st.integers(1, 20))
    bias = torch.randn(channels) if draw(st.booleans()) else None
    return torch.randn(batch, channels, kernel + tokens), torch.randn(channels, kernel), bias


@examples(80)
@given(windows(), st.sampled_from(["silu", "swish", None]))
def test_outputs_equal_the_twin(inputs: tuple[Tensor, Tensor, Tensor | None], activation: str | None) -> None:
    window, weight, bias = inputs
    before = window.clone()
    actual = convolution.verify(window, weight, bias, activation)
    expected = torch.from_numpy(reference.causal_convolution(window, weight, bias, silu=activation is not None))
    assert actual.shape == expected.shape
    # fp32 against float64, sums of at most five products of standard normals.
    assert torch.allclose(actual.double(), expected, atol=1e-5)
    assert torch.equal(window, before)


@examples(20)
@given(windows(), st.data())
def test_a_block_in_two_parts_is_the_block(inputs: tuple[Tensor, Tensor, Tensor | None], data: st.DataObject) -> None:
    """The window that a rollback keeps, the last ``kernel`` inputs, is all that the next block needs."""
    window, weight, bias = inputs
    kernel = weight.shape[-1]
    tokens = window.shape[-1] - kernel
    cut = data.draw(st.integers(0, tokens - 1))
    whole = convolution.verify(window, weight, bias)
    rest = convolution.verify(window[..., cut:], weight, bias)
    assert rest.shape[-1] == tokens - cut
    assert torch.allclose(rest, whole[..., cut:], atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_agrees_with_transformers_after_a_dropped_left_context(tokens: int) -> None:
    """transformers convolves the whole window and the mixer drops the outputs of the old inputs."""
    torch.manual_seed(tokens)
    window, weight = torch.randn(2, 6, 4 + tokens), torch.randn(6, 4)
    native = getattr(modeling_qwen3_5.causal_conv1d_fn, "__hybridspec_native__", modeling_qwen3_5.causal_conv1d_fn)
    expected = native(window, weight, None, activation="silu")[..., -tokens:]
    assert torch.allclose(convolution.verify(window, weight, None, "silu"), expected, atol=1e-5)
