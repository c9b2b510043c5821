"""CUDA graphs by key: each function is captured the first time and replayed from then on. Elsewhere it just runs."""

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

#: Runs before a capture, so that kernels are compiled and libraries have their workspaces.
WARM_UPS = 2


@dataclass
class Graphs:
    """Captured functions. A replay does not run their Python: all they read and write must keep its address.

    Attributes:
        enabled: False runs every function as it is.
    """

    enabled: bool = True
    _captured: dict[Hashable, tuple["torch.cuda.CUDAGraph", Any]] = field(default_factory=dict)
    #: Keys whose capture failed: these run as they are.
    _refused: set[Hashable] = field(default_factory=set)

    @property
    def captured(self) -> frozenset[Hashable]:
        return frozenset(self._captured)

    def captures(self, device: torch.device) -> bool:
        return self.enabled and device.type == "cuda"

    def run(
        self, key: Hashable, function: Callable[[], Any], device: torch.device, changes: Sequence[Tensor] = ()
    ) -> Any:
        """What ``function`` returns. On CUDA these tensors are overwritten by the next run of the same key.

        Args:
            key: stands for the function and for every shape and Python value in it.
            changes: what the function both reads and writes; running it for a capture leaves these as they were.
        """
        if not self.captures(device) or key in self._refused:
            return function()
        if key not in self._captured:
            before = [x.clone() for x in changes]
            try:
                self._captured[key] = self._capture(function, list(zip(changes, before, strict=True)))
            except RuntimeError as error:
                self._refused.add(key)
                warnings.warn(
                    f"no CUDA graph of {key}: {error}. It runs without one, which is slower. Something in it waits for "
                    "the GPU, most likely the model's own code (a dynamic RoPE, a choice of experts).",
                    stacklevel=2,
                )
                torch.cuda.synchronize(device)
                _put_back(zip(changes, before, strict=True))
                return function()
        graph, result = self._captured[key]
        graph.replay()
        return result

    def _capture(self, function: Callable[[], Any], changes: list[tuple[Tensor, Tensor]]) -> tuple:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                function()
                _put_back(changes)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on with their own work on the GPU.
        pool = next(iter(self._captured.values()))[0].pool() if self._captured else None
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = function()
        return graph, result


def _put_back(changes: Any) -> None:
    for tensor, before in changes:
        tensor.copy_(before)
