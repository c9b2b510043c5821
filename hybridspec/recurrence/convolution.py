"""Short causal convolution in front of most recurrent mixers; its state is the window of the last ``kernel`` inputs."""

import torch.nn.functional as F
from torch import Tensor


def verify(window: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = "silu") -> Tensor:
    """Outputs ``[B, C, T]`` for the last T columns of ``window [B, C, kernel + T]``, depthwise with ``weight [C,
    kernel]``.

    A sum of products over the few columns: far cheaper than a general convolution operator for short blocks.
    """
    kernel = weight.shape[-1]
    columns = window[..., 1:].unfold(-1, kernel, 1)
    outputs = (columns * weight.unsqueeze(1)).sum(-1)
    if bias is not None:
        outputs = outputs + bias.unsqueeze(-1)
    return F.silu(outputs) if activation in ("silu", "swish") else outputs
