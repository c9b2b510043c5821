"""The seam to transformers: which of its functions is which recurrence, and how a tape gets out of it.

Every modeling file looks its recurrence up as a module global under one of a few names. So the global is wrapped once
per module; while one of our sessions records, the wrapper runs the short form, leaves a tape and returns an empty
final state, and our cache layer claims the tape. Any other use of the model runs the original.
"""

import functools
import inspect
import sys
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from hybridspec.hooks import mixers
from hybridspec.recurrence import channel_delta, convolution, gated_delta, kernels, selective_scan, ssd
from hybridspec.recurrence.tape import Tape
from hybridspec.state.pass_context import PassContext, current


def _delta_rule(native: Callable, verify: Callable, fused: bool = False) -> Callable:
    """``f(query, key, value, g=, beta=, initial_state=, ...)`` on ``[B, T, H, d]``, gated or by channel; ``fused``
    where there is a kernel.
    """

    def recorded(now: PassContext, query: Tensor, key: Tensor, value: Tensor, *_: object, **options: object) -> tuple:
        log_decay, beta, state = options["g"], options["beta"], options.get("initial_state")
        dtype = query.dtype
        if fused and kernels.chosen(value):
            from hybridspec.recurrence.kernels import gated_delta as kernel

            outputs, tape = kernel.verify(
                *(x.transpose(1, 2) for x in (query, key, value, log_decay, beta)),
                state,
                scale=query.shape[-1] ** -0.5,
                normalise=bool(options.get("use_qk_l2norm_in_kernel")),
                final=now.take_final(),
                dtype=dtype,
            )
            now.tapes.append(tape)
            return outputs.transpose(1, 2), outputs.new_empty(0)
        # [B, T, H, d] -> [B, H, T, d], states and tapes in fp32 whatever the weights are.
        query, key, value = (x.transpose(1, 2).float() for x in (query, key, value))
        if options.get("use_qk_l2norm_in_kernel"):
            query, key = gated_delta.l2_normalise(query), gated_delta.l2_normalise(key)
        query = query * query.shape[-1] ** -0.5
        groups = value.shape[1] // key.shape[1]
        if groups > 1:
            query, key = query.repeat_interleave(groups, 1), key.repeat_interleave(groups, 1)
        log_decay, beta = log_decay.transpose(1, 2).float(), beta.transpose(1, 2).float()
        outputs, tape = verify(query, key, value, log_decay, beta, state)
        now.tapes.append(tape)
        return outputs.transpose(1, 2).to(dtype), outputs.new_empty(0)

    return when_recording(native, recorded)


def _gated_delta_rule(native: Callable) -> Callable:
    return _delta_rule(native, gated_delta.verify, fused=True)


def _channel_delta_rule(native: Callable) -> Callable:
    return _delta_rule(native, channel_delta.verify)


def _time_steps(step: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """The discretisation step as transformers rounds it, then fp32."""
    if bias is not None:
        step = step + bias.to(step.dtype)
    return (F.softplus(step) if softplus else step).float()


def _ssd_verify(
    now: PassContext, inputs: Tensor, step: Tensor, rate: Tensor, write: Tensor, read: Tensor, state: Tensor | None
) -> tuple[Tensor, Tape]:
    """:func:`hybridspec.recurrence.ssd.verify` in fp32, or its kernel."""
    if kernels.chosen(inputs):
        from hybridspec.recurrence.kernels import ssd as kernel

        return kernel.verify(inputs, step, rate, write, read, state, final=now.take_final())
    return ssd.verify(inputs.float(), step, rate.float(), write.float(), read.float(), state)


def _ssd_scan(native: Callable) -> Callable:
    """``mamba2_chunk_scan``: ``x [B, T, H, P]``, ``dt [B, T, H]``, ``A [H]``, ``B`` and ``C [B, T, G, N]``."""

    def recorded(
        now: PassContext,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *_: object,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        initial_states: Tensor | None = None,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **__: object,
    ) -> tuple:
        step = _time_steps(dt, dt_bias, dt_softplus)
        # A clamp that the one-token path lacks: a verify pass must compute what decoding computes.
        if now.purpose == "prefill":
            step = step.clamp(*dt_limit)
        inputs, write, read = (a.transpose(1, 2) for a in (x, B, C))
        outputs, tape = _ssd_verify(now, inputs, step.transpose(1, 2), A, write, read, initial_states)
        now.tapes.append(tape)
        outputs = outputs.transpose(1, 2)
        if D is not None:
            outputs = outputs + x.float() * D.float().unsqueeze(-1)
        # Callers take views of it.
        return outputs.contiguous(), outputs.new_empty(0)

    return when_recording(native, recorded)


def _ssd_step(native: Callable) -> Callable:
    """``mamba2_selective_state_update``: one token, every argument broadcast to ``[B, H, P]`` or ``[H, P, N]``; the
    original overwrites the state in place.
    """

    def recorded(
        now: PassContext,
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        **_: object,
    ) -> Tensor:
        step = _time_steps(dt[..., :1], None if dt_bias is None else dt_bias[..., :1], dt_softplus)
        inputs, write, read = (a.unsqueeze(2) for a in (x, B, C))
        outputs, tape = _ssd_verify(now, inputs, step, A[:, 0, 0], write, read, state)
        now.states.tapes.append(tape)
        outputs = outputs[:, :, 0]
        if D is not None:
            outputs = outputs + x.float() * D.float()
        if z is not None:
            outputs = outputs * F.silu(z.float())
        return outputs.to(x.dtype)

    return when_recording(native, recorded)


def _selective_scan(native: Callable) -> Callable:
    """``mamba_selective_scan``: ``x`` and ``dt [B, I, T]``, ``A [I, N]``, ``B`` and ``C [B, N, T]``.

    The original starts from zeros whatever the cache holds, so long chunks run our own scan too, but for the first one
    on a GPU.
    """

    def recorded(
        now: PassContext,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **others: object,
    ) -> Tensor | tuple:
        state = None if now.states is None else now.states.get(0)
        if now.purpose == "advance" and state is None and x.device.type != "cpu":
            now.tapes.append(None)
            others |= {"delta_softplus": delta_softplus, "return_last_state": return_last_state}
            return native(x, dt, A, B, C, D, z, delta_bias, **others)
        if state is not None and state.ndim == 4:
            # Zamba scans its groups of heads one after the other.
            state = state[:, len(now.tapes)]
        step = _time_steps(dt, None if delta_bias is None else delta_bias.unsqueeze(-1), delta_softplus)
        block = (x.float(), step, A.float(), B.float().mT, C.float().mT)
        if now.purpose == "advance":
            outputs, final = selective_scan.scan(*block, state)
            now.tapes.append(None)
        else:
            outputs, tape = selective_scan.verify(*block, state)
            now.tapes.append(tape)
            final = outputs.new_empty(0)
        if D is not None:
            outputs = outputs + x * D.float().unsqueeze(-1)
        if z is not None:
            outputs = outputs * F.silu(z)
        return (outputs, final) if return_last_state else outputs

    return when_recording(native, recorded, advance=True)


def _selective_step(native: Callable) -> Callable:
    """``mamba_selective_state_update``: one token of ``[B, I]``; the original overwrites the state in place."""

    def recorded(
        now: PassContext,
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        **_: object,
    ) -> Tensor:
        step = _time_steps(dt, dt_bias, dt_softplus).unsqueeze(-1)
        block = (x.float().unsqueeze(-1), step, A.float(), B.float().unsqueeze(1), C.float().unsqueeze(1))
        outputs, tape = selective_scan.verify(*block, state)
        now.states.tapes.append(tape)
        outputs = outputs[..., 0]
        if D is not None:
            outputs = outputs + x * D.float()
        if z is not None:
            outputs = outputs * F.silu(z)
        return outputs.to(x.dtype)

    return when_recording(native, recorded)


def _causal_convolution(native: Callable) -> Callable:
    def recorded(
        _: PassContext,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **options: object,
    ) -> Tensor:
        if activation not in (None, "silu", "swish"):
            return native(x, weight, bias, activation=activation, **options)
        # Some models keep the weights of their convolutions in fp32, whatever the others are.
        return convolution.verify(x, weight, bias, activation).to(x.dtype)

    return when_recording(native, recorded)


def _convolution_step(native: Callable) -> Callable:
    """``causal_conv1d_update``: the original shifts the window in place, even where the cache asks to keep the past."""

    def recorded(
        now: PassContext,
        x: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: object,
    ) -> Tensor:
        windows, index = now.window
        window = windows.append(index, x, weight.shape[-1])
        return convolution.verify(window, weight, bias, activation).to(x.dtype)

    return when_recording(native, recorded)


def register(function: Callable, recorded: Callable) -> None:
    """Serves a recurrence of a modeling file outside transformers; call it before the model gets its runner.

    Args:
        function: of the file's own module, where mixers look it up when they are called.
        recorded: ``(recording, *arguments, **options)``, runs in its place while a session records. It appends one tape
            to ``recording.tapes`` and returns what the function returns, with an empty tensor for the final state.
    """
    RECURRENCES[function.__name__] = lambda native: when_recording(native, recorded)
    MODULES.add(function.__module__)


def when_recording(native: Callable, recorded: Callable, advance: bool = False) -> Callable:
    """Calls ``recorded(recording, ...)`` while a session records, ``native(...)`` otherwise and, unless ``advance``,
    for long chunks.
    """
    torch_form = _torch_form(native)

    @functools.wraps(native)
    def wrapper(*arguments: object, **options: object) -> object:
        now = current.get()
        if now is None:
            return native(*arguments, **options)
        if now.purpose == "advance" and not advance:
            device = next(x for x in (*arguments, *options.values()) if isinstance(x, Tensor)).device
            return (torch_form if device.type == "cpu" else native)(*arguments, **options)
        return recorded(now, *arguments, **options)

    wrapper.__hybridspec_native__ = native
    return wrapper


def _torch_form(native: Callable) -> Callable:
    """The body in plain PyTorch: transformers binds an installed kernel package in its place for every device, and its
    kernels do not run on the CPU.
    """
    body = inspect.unwrap(native)
    parameters = inspect.signature(body).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return body

    def torch_form(*arguments: object, **options: object) -> object:
        # What only the kernels take is left out, as transformers does.
        return body(*arguments, **{name: value for name, value in options.items() if name in parameters})

    return torch_form


#: Name of a transformers function -> wrapper that records it.
RECURRENCES: dict[str, Callable[[Callable], Callable]] = {
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "torch_recurrent_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _channel_delta_rule,
    "recurrent_kimi_delta_attention": _channel_delta_rule,
    "mamba2_chunk_scan": _ssd_scan,
    "mamba2_selective_state_update": _ssd_step,
    "mamba_selective_scan": _selective_scan,
    "mamba_selective_state_update": _selective_step,
}
#: Modeling files outside transformers.
MODULES: set[str] = set()
CONVOLUTIONS = {"causal_conv1d_fn": _causal_convolution, "causal_conv1d_update": _convolution_step}


def attach(model: nn.Module) -> set[str]:
    """Wraps the recurrences and convolutions of every modeling file that ``model`` uses, once.

    Returns:
        names of the modeling modules that have a recurrence.
    """
    names = {type(m).__module__ for m in model.modules()}
    found = mixers.attach(model)
    for module in (sys.modules[n] for n in names if n.startswith("transformers.models.") or n in MODULES):
        if any(hasattr(module, name) for name in RECURRENCES):
            found.add(module.__name__)
        for name, wrapper in {**RECURRENCES, **CONVOLUTIONS}.items():
            native = getattr(module, name, None)
            if native is not None and not hasattr(native, "__hybridspec_native__"):
                setattr(module, name, wrapper(native))
    return found


def starts_from_zeros(model: nn.Module) -> bool:
    """Whether transformers' own continuation with several tokens ignores the recurrent state: all Mamba-1 mixers."""
    return any(hasattr(sys.modules[type(m).__module__], "mamba_selective_scan") for m in model.modules())
