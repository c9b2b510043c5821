"""Short causal convolution in front of most recurrent mixers; its state is the window of the last ``kernel`` inputs."""

import torch
import torch.nn.functional as F
from torch import Tensor


def verify(window: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = "silu") -> Tensor:
    """Outputs ``[B, C, T]`` for the last T columns of ``window [B, C, kernel + T]``, depthwise with ``weight [C,
    kernel]``.

    A sum of products over the few columns: far cheaper than a general convolution operator for short blocks.
    """
    kernel = weight.shape[-1]
    length, dtype = window.shape[-1] - kernel, window.dtype
    # Sums of half precision are kept in float32, as the convolution operator does.
    window, weight = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (window, weight))
    if length == 1:
        outputs = (window[..., 1:] * weight).sum(-1, keepdim=True)
    else:
        outputs = window[..., 1 : 1 + length] * weight[:, :1]
        for i in range(1, kernel):
            outputs = torch.addcmul(outputs, window[..., 1 + i : 1 + i + length], weight[:, i : i + 1])
    outputs = outputs.to(dtype)
    if bias is not None:
        outputs = outputs + bias.unsqueeze(-1)
    return F.silu(outputs) if activation in ("silu", "swish") else outputs
