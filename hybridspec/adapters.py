"""The seam to transformers: which of its functions is which recurrence, and how a tape gets out of it.

Every modeling file looks its recurrence up as a module global under one of a few names, and hands what it returns as
the final state to ``cache.update_recurrent_state``. So the global is wrapped once per module; while one of our
sessions records, the wrapper returns the tape in place of the final state, and our cache layer takes it. Any other
use of the model runs the original.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn

from hybridspec.recurrence import convolution, gated_delta

_recording: ContextVar[bool] = ContextVar("hybridspec_recording", default=False)


@contextmanager
def recording() -> Iterator[None]:
    """While it is open, wrapped recurrences leave a tape instead of a final state (in this thread or task only)."""
    token = _recording.set(True)
    try:
        yield
    finally:
        _recording.reset(token)


def _gated_delta_rule(native: Callable) -> Callable:
    @functools.wraps(native)
    def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, *arguments: object, **options: object) -> tuple:
        if not _recording.get():
            return native(query, key, value, *arguments, **options)
        log_decay, beta, state = options["g"], options["beta"], options.get("initial_state")
        dtype = query.dtype
        # [B, T, H, d] -> [B, H, T, d], states and tapes in fp32 whatever the weights are.
        query, key, value = (x.transpose(1, 2).float() for x in (query, key, value))
        if options.get("use_qk_l2norm_in_kernel"):
            query, key = gated_delta.l2_normalise(query), gated_delta.l2_normalise(key)
        query = query * query.shape[-1] ** -0.5
        groups = value.shape[1] // key.shape[1]
        if groups > 1:
            query, key = query.repeat_interleave(groups, 1), key.repeat_interleave(groups, 1)
        log_decay, beta = log_decay.transpose(1, 2).float(), beta.transpose(1, 2).float()
        outputs, tape = gated_delta.verify(query, key, value, log_decay, beta, state)
        return outputs.transpose(1, 2).to(dtype), tape

    return gated_delta_rule


def _causal_convolution(native: Callable) -> Callable:
    @functools.wraps(native)
    def causal_convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: object) -> Tensor:
        activation = options.get("activation")
        if not _recording.get() or activation not in (None, "silu", "swish"):
            return native(x, weight, bias, **options)
        return convolution.verify(x, weight, bias, activation)

    return causal_convolution


#: Name of a transformers function -> wrapper that records it.
RECURRENCES: dict[str, Callable[[Callable], Callable]] = {
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "torch_recurrent_gated_delta_rule": _gated_delta_rule,
}
CONVOLUTIONS = {"causal_conv1d_fn": _causal_convolution}


def attach(model: nn.Module) -> set[str]:
    """Wraps the recurrences of every modeling file that ``model`` uses, once.

    Returns:
        names of the modeling modules that have one.
    """
    names = {type(m).__module__ for m in model.modules()}
    found = set()
    for module in (sys.modules[name] for name in names if name.startswith("transformers.models.")):
        if not any(hasattr(module, name) for name in RECURRENCES):
            continue
        found.add(module.__name__)
        for name, wrapper in {**RECURRENCES, **CONVOLUTIONS}.items():
            native = getattr(module, name, None)
            if native is not None and not hasattr(native, "__hybridspec_native__"):
                wrapped = wrapper(native)
                wrapped.__hybridspec_native__ = native
                setattr(module, name, wrapped)
    return found
