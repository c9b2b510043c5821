"""The seam to mixers whose recurrence is no function of its own, and to models that take no cache but their own.

As in :mod:`.adapters`, one level up: a class's forward pass is wrapped once; while one of our sessions records it runs
the short form on our cache layer, any other use of the class runs the original.
"""

import copy
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from hybridspec.recurrence import convolution, linear_attention, rg_lru
from hybridspec.state.layers import RecurrentLayer
from hybridspec.state.pass_context import PassContext, current

#: Tokens of a long prefill that go through the short form at once.
CHUNK = 64


def _lightning_attention(
    now: PassContext,
    layer: RecurrentLayer,
    mixer: nn.Module,
    *,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    **_: object,
) -> tuple[Tensor, None]:
    """MiniMax: transformers computes a long block from zeros only, and otherwise goes token by token.

    Decays and states are fp32 here; transformers keeps them in the model's dtype, where ``exp(-slope)`` of a slow head
    rounds to 1.
    """
    projected = mixer.act_fn(mixer.qkv_proj(hidden_states))
    if attention_mask is not None:
        projected = projected * attention_mask.unsqueeze(-1)
    # [B, T, H * 3 * d] -> three [B, H, T, d]
    heads = projected.unflatten(-1, (mixer.num_attention_heads, -1)).transpose(1, 2).float()
    query, key, value = heads.split(mixer.head_dim, -1)
    log_decay = -mixer.slope_rate.float().squeeze(-1).expand(key.shape[:-1])
    outputs = _run(now, layer, linear_attention.verify, (query, key, value, log_decay), 2)
    outputs = mixer.norm(outputs.transpose(1, 2).flatten(2).to(hidden_states.dtype))
    return mixer.out_proj(torch.sigmoid(mixer.output_gate(hidden_states)) * outputs), None


def _recurrent_block(
    now: PassContext,
    layer: RecurrentLayer,
    mixer: nn.Module,
    input_states: Tensor,
    *,
    position_ids: Tensor,
    **_: object,
) -> tuple[Tensor, None]:
    """RecurrentGemma: transformers keeps window and state on the modules, and ignores the window for several tokens."""
    inputs = mixer.linear_x(input_states).transpose(1, 2)
    window = layer.update_conv_state(inputs, conv_kernel_size=mixer.conv1d_width)
    inputs = convolution.verify(window, mixer.conv_1d.weight[:, 0], mixer.conv_1d.bias, None)

    def scan(hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, **_: object) -> tuple[Tensor, None]:
        decay = recurrent_gate.float() * ~reset
        outputs = _run(now, layer, rg_lru.verify, (hidden_states.float(), decay), 1)
        return outputs.to(hidden_states.dtype), None

    # The copy shares the weights; what it writes on itself is lost, so that sessions do not meet.
    unit = copy.copy(mixer.rg_lru)
    unit._rnn_scan = scan
    outputs = unit(inputs.transpose(1, 2), position_ids)
    return mixer.linear_out(outputs * mixer.act_fn(mixer.linear_y(input_states))), None


def _run(now: PassContext, layer: RecurrentLayer, verify: Callable, block: tuple[Tensor, ...], axis: int) -> Tensor:
    """Outputs of a block whose tokens lie along ``axis``; leaves a tape, or the final state of a long chunk."""
    state = layer.recurrent_states.get(0)
    if now.purpose != "advance":
        outputs, tape = verify(*block, state)
        layer.recurrent_states.tapes.append(tape)
        return outputs
    outputs = []
    for part in zip(*(x.split(CHUNK, axis) for x in block), strict=True):
        output, tape = verify(*part, state)
        state = tape.rollback(state, tape.length)
        outputs.append(output)
    layer.set_state(state)
    return torch.cat(outputs, axis)


#: Class in transformers -> what runs in place of its forward pass, with the recording and our cache layer in front.
MIXERS: dict[str, Callable] = {
    "MiniMaxLightningAttention": _lightning_attention,
    "RecurrentGemmaRecurrentBlock": _recurrent_block,
}


def attach(model: nn.Module) -> set[str]:
    """Wraps the mixers of ``model`` that are listed here, each class once.

    Returns:
        names of the modeling modules that they come from.
    """
    found = set()
    for name, mixer in model.named_modules():
        kind = type(mixer)
        recorded = MIXERS.get(kind.__name__)
        if recorded is None or not kind.__module__.startswith("transformers.models."):
            continue
        if not hasattr(mixer, "layer_idx"):
            mixer.layer_idx = int(next(part for part in name.split(".") if part.isdigit()))
        if not hasattr(kind.forward, "__hybridspec_native__"):
            kind.forward = _when_recording(kind.forward, recorded)
        found.add(kind.__module__)
    return found


def _when_recording(native: Callable, recorded: Callable) -> Callable:
    @functools.wraps(native)
    def forward(self: nn.Module, *arguments: object, **options: object) -> object:
        now, cache = current.get(), next((x for x in options.values() if isinstance(x, Cache)), None)
        if now is None or cache is None:
            return native(self, *arguments, **options)
        return recorded(now, cache.layers[self.layer_idx], self, *arguments, **options)

    forward.__hybridspec_native__ = native
    return forward
