"""Weights packed for short blocks. On a CPU in float32, a pass over a few tokens is bound by reading the weights only
if they lie as the matrix product wants them; otherwise it costs as much as several passes over one token.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybridspec.errors import InputError

#: Entries of a weight below which packing gains nothing.
LEAST = 2**18
#: Tokens of the blocks that run packed: a single one is a product with a vector, a long one is bound by arithmetic.
SHORT = range(2, 33)
#: Tokens that the layout is chosen for.
TYPICAL = 5


class PackedWeights:
    """A second copy of a model's larger linear weights, in oneDNN's layout.

    The model's linear layers are told where theirs lies; they use it inside :meth:`active` only. Weights that change
    afterwards are not seen.

    Attributes:
        bytes: what the copies take.

    Raises:
        InputError: the model is not float32 on a CPU, or this build of torch has no oneDNN.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if model.device.type != "cpu" or model.dtype != torch.float32:
            raise InputError(
                f"packed weights are for float32 on a CPU, and this model is {str(model.dtype).removeprefix('torch.')} "
                f"on {model.device}: leave them out (--packed)"
            )
        if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
            raise InputError(f"packed weights need oneDNN, which torch {torch.__version__} was built without here")
        self._depth = threading.local()
        self.bytes = 0
        self.weights: dict[nn.Module, Tensor] = {}
        for layer in model.modules():
            if type(layer) is nn.Linear and layer.weight.numel() >= LEAST:
                self.weights[layer] = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), TYPICAL)
                self.bytes += layer.weight.numel() * layer.weight.element_size()
                layer.forward = PackedForward(layer, layer.forward, weakref.ref(self))

    @property
    def is_active(self) -> bool:
        return getattr(self._depth, "value", 0) > 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Short blocks of this thread run packed in here."""
        self._depth.value = getattr(self._depth, "value", 0) + 1
        try:
            yield
        finally:
            self._depth.value -= 1


class PackedForward:
    """The forward pass of one layer: packed where its owner is active, else as it was. It goes with its owner: the
    copies end with the runner, and neither a copy of the model nor a file has them.
    """

    def __init__(
        self, layer: nn.Linear, original: Callable[[Tensor], Tensor], owner: "weakref.ref[PackedWeights]"
    ) -> None:
        self.layer, self.original, self.owner = layer, original, owner

    def __call__(self, x: Tensor) -> Tensor:
        owner = self.owner()
        if (
            owner is not None
            and owner.is_active
            and not torch.is_grad_enabled()
            and x.dtype == torch.float32
            and x.shape[:-1].numel() in SHORT
        ):
            return torch.ops.mkldnn._linear_pointwise(x, owner.weights[self.layer], self.layer.bias, "none", [], "")
        return self.original(x)

    def __reduce__(self) -> tuple:
        return getattr, (self.layer, "forward")
