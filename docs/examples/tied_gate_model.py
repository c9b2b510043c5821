"""A tiny hybrid that transformers does not have: attention, and a recurrence whose input gate is one minus its forget
gate, ``S_t = diag(f_t) S_{t-1} + (1 - f_t) v_t^T`` (HGRN2, arXiv 2404.07904). Written as transformers writes them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput


class TiedGateConfig(PreTrainedConfig):
    model_type = "tied_gate"

    def __init__(self, vocab_size: int = 96, width: int = 32, heads: int = 2, **options: object) -> None:
        self.vocab_size, self.width, self.heads = vocab_size, width, heads
        self.layer_types = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
        self.num_hidden_layers = len(self.layer_types)
        super().__init__(tie_word_embeddings=False, **options)


def tied_gate_scan(query: Tensor, value: Tensor, forget: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs ``[B, T, H, V]`` and the final state ``[B, H, K, V]``; ``query`` and ``forget`` (0 to 1) are
    ``[B, T, H, K]``, ``value`` is ``[B, T, H, V]``.
    """
    if state is None:
        state = value.new_zeros(*query.shape[:1], *query.shape[2:], value.shape[-1])
    outputs = []
    for q, v, f in zip(query.unbind(1), value.unbind(1), forget.unbind(1), strict=True):
        state = f.unsqueeze(-1) * state + (1 - f).unsqueeze(-1) * v.unsqueeze(-2)
        outputs.append((q.unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs, 1), state


class Mixer(nn.Module):
    """Attention without positions, or the recurrence, by the layer's type."""

    def __init__(self, config: TiedGateConfig, layer_idx: int) -> None:
        super().__init__()
        self.heads, self.layer_idx = config.heads, layer_idx
        self.recurrent = config.layer_types[layer_idx] == "linear_attention"
        self.inputs = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, hidden_states: Tensor, cache: Cache) -> Tensor:
        heads = self.inputs(hidden_states).unflatten(-1, (3, self.heads, -1))
        one, two, three = heads.unbind(2)
        mixed = self.recur(one, two, three, cache) if self.recurrent else self.attend(one, two, three, cache)
        return self.output(mixed.flatten(2))

    def recur(self, query: Tensor, value: Tensor, gate: Tensor, cache: Cache) -> Tensor:
        state = cache.layers[self.layer_idx].recurrent_states[0]
        outputs, state = tied_gate_scan(query, value, torch.sigmoid(2 + gate), state)
        cache.update_recurrent_state(state, self.layer_idx)
        return outputs

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Cache) -> Tensor:
        key, value = cache.update(key.transpose(1, 2), value.transpose(1, 2), self.layer_idx)
        count, length = query.shape[1], key.shape[2]
        mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        return functional.scaled_dot_product_attention(query.transpose(1, 2), key, value, mask).transpose(1, 2)


@dataclass
class Output(ModelOutput):
    logits: Tensor | None = None
    cache: Cache | None = None


class TiedGateForCausalLM(PreTrainedModel):
    config_class = TiedGateConfig
    _is_stateful = True

    def __init__(self, config: TiedGateConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Mixer(config, index) for index in range(config.num_hidden_layers))
        self.head = nn.Linear(config.width, config.vocab_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.4)

    def forward(
        self,
        input_ids: Tensor,
        cache: Cache | None = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
        **_: object,
    ) -> Output:
        cache = DynamicCache(config=self.config) if cache is None else cache
        hidden_states = self.embeddings(input_ids)
        for layer in self.layers:
            hidden_states = hidden_states + layer(functional.rms_norm(hidden_states, hidden_states.shape[-1:]), cache)
        logits = self.head(hidden_states[:, -logits_to_keep:])
        return Output(logits, cache)
