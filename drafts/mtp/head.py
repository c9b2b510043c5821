"""Multi-token-prediction heads of hybrid families: one or two decoder layers on the target's hidden states.

transformers drops their weights when it loads a model, so the head is built here from the family's own decoder class
with the head's layers in place of the model's. It shares embeddings, language-model head and rotary positions with the
target. What goes in and in which order was read in vLLM (``model_executor/models/qwen3_next_mtp.py``,
``qwen3_5_mtp.py``, ``nemotron_h_mtp.py``, ``models/qwen4_exp/nvidia/mtp.py``) and, for Bailing, in SGLang
(``srt/models/bailing_moe_nextn.py``).

The hidden states are those that the language-model head reads, after the final norm. Pre-norm ones draft as fluently
and are accepted less: llama.cpp (pull request 24025) and Rapid-MLX (3371) measured both on Qwen3.5 and 3.6. Positions
follow vLLM too, the hidden state's own; rotary attention sees differences only, so one more for all is the same.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from hybridspec.checkpoints.modeling_files import CACHE_ARGUMENTS
from hybridspec.errors import InputError, UnsupportedLayerError


@dataclass(frozen=True)
class Layout:
    """How a family publishes its head.

    Attributes:
        announced: config field that counts the heads.
        root: how the head's tensors are called in a checkpoint, below any prefix; ``{n}`` is the target's layer count.
        names: beginnings of our parameter names -> published ones after the root; the first that fits counts.
            ``{last}`` is the head's last layer.
        renamed: parts of our names -> of the published ones, where the family's own differ from transformers'.
        unread: published, and of no use to the head.
        layer_types: field of the head's layer types in the config; one attention layer if empty.
    """

    announced: str
    root: str
    names: Mapping[str, str]
    renamed: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    layer_types: str = ""

    def published(self, name: str, config: PreTrainedConfig) -> str:
        """The published name of our parameter ``name``, from the root on."""
        ours, theirs = next(pair for pair in self.names.items() if name.startswith(pair[0]))
        rest = name[len(ours) :]
        for part, other in self.renamed.items():
            rest = rest.replace(part, other)
        last = len(getattr(config, self.layer_types)) - 1 if self.layer_types else 0
        return self.prefix(config) + theirs.format(last=last) + rest

    def prefix(self, config: PreTrainedConfig) -> str:
        return self.root.format(n=config.num_hidden_layers)


QWEN = Layout(
    "mtp_num_hidden_layers",
    "mtp.",
    {
        "embedding_norm.": "pre_fc_norm_embedding.",
        "hidden_norm.": "pre_fc_norm_hidden.",
        "projection.": "fc.",
        "decoder.": "",
    },
)
QWEN_STREAMS = Layout(
    "mtp_num_hidden_layers",
    "mtp.",
    QWEN.names | {"projection.": "fc_embedding.", "hidden_projection.": "fc_hidden."},
    unread=("mtp.hyper_connection_mixer.block_inject_weight.weight",),
)
NEMOTRON = Layout(
    "num_nextn_predict_layers",
    "mtp.",
    {
        "embedding_norm.": "layers.0.enorm.",
        "hidden_norm.": "layers.0.hnorm.",
        "projection.": "layers.0.eh_proj.",
        "decoder.norm_f.": "layers.{last}.final_layernorm.",
        "decoder.": "",
    },
    layer_types="mtp_layers_block_type",
)
BAILING = Layout(
    "num_nextn_predict_layers",
    "layers.{n}.",
    {
        "embedding_norm.": "enorm.",
        "hidden_norm.": "hnorm.",
        "projection.": "eh_proj.",
        "decoder.norm.": "final_layernorm.",
        "decoder.layers.0.": "",
    },
    renamed={"self_attn.": "attention.", ".o_proj.": ".dense.", "gate.e_score_correction_bias": "gate.expert_bias"},
)

#: Model type of the text config -> layout.
LAYOUTS: dict[str, Layout] = {
    "qwen3_next": QWEN,
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": QWEN,
    "qwen4_exp_text": QWEN_STREAMS,
    "nemotron_h": NEMOTRON,
    "bailing_hybrid": BAILING,
}
#: Layers that a head may have: what they keep of the past is keys and values, which roll back by their number.
STATELESS = {"full_attention", "indexed_attention", "attention", "moe", "mlp", "dense"}


def layout_of(config: PreTrainedConfig) -> Layout:
    """The layout of the head of a text config.

    Raises:
        InputError: the family has no head that is known here.
        UnsupportedLayerError: it announces several heads, or one with recurrent layers.
    """
    layout = LAYOUTS.get(config.model_type)
    if layout is None:
        raise InputError(
            f"{config.model_type!r} has no multi-token-prediction head that is known here; these have: "
            f"{', '.join(sorted(LAYOUTS))}. Draft with prompt-lookup or same-architecture."
        )
    heads = getattr(config, layout.announced, None) or 1
    if heads > 1:
        raise UnsupportedLayerError(
            f"{config.model_type!r}: {layout.announced} is {heads}, and only one head, applied to its own output, is "
            "drafted with here."
        )
    if layout.layer_types:
        other = [kind for kind in getattr(config, layout.layer_types) if kind not in STATELESS]
        if other:
            raise UnsupportedLayerError(
                f"{config.model_type!r}: {layout.layer_types} has a {other[0]!r} layer, and a head with recurrent "
                "state is not drafted with here."
            )
    return layout


def head_config(config: PreTrainedConfig, layout: Layout) -> PreTrainedConfig:
    """The target's text config with the head's layers for its own."""
    config = copy.deepcopy(config)
    if layout.layer_types:
        config.layers_block_type = list(getattr(config, layout.layer_types))
        return config
    indexed = "indexed_attention" in config.layer_types
    config.num_hidden_layers = 1
    config.layer_types = ["indexed_attention" if indexed else "full_attention"]
    # As transformers' own get_mtp_config and vLLM: the head's layer has experts where the model has any, and no PLE.
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = config.mlp_layer_types[-1:]
    if hasattr(config, "ple_layer_ids"):
        config.ple_layer_ids = []
    return config


class PredictionHead(nn.Module):
    """The head of ``model``; its own parameters are those that a checkpoint publishes for it.

    Entry i takes the hidden state h_i that the target's language-model head reads at position i, and the next token
    x_{i+1}; what comes out predicts x_{i+2}, and is the hidden state of the next entry when the head goes on by itself:
    ``decoder(projection([embedding_norm(E x_{i+1}); hidden_norm(h_i)]))``.

    Args:
        model: the target; it stays as it is.

    Raises:
        InputError, UnsupportedLayerError: the family has no head that is known here.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        text_config = model.config.get_text_config(decoder=True)
        self.layout = layout_of(text_config)
        self.config = head_config(text_config, self.layout)
        self.streams: int = getattr(self.config, "hc_count", 1)
        theirs = model.get_decoder()
        self.decoder = type(theirs)(self.config)
        self.decoder.set_input_embeddings(nn.Identity())
        if hasattr(theirs, "rotary_emb"):
            self.decoder.rotary_emb = theirs.rotary_emb
        parameters = inspect.signature(type(theirs).forward).parameters
        self._cache_argument = next(name for name in CACHE_ARGUMENTS if name in parameters)
        width = self.config.hidden_size
        if self.streams == 1:
            norm = next(child for name, child in self.decoder.named_children() if name.startswith("norm"))
            self.embedding_norm, self.hidden_norm = copy.deepcopy(norm), copy.deepcopy(norm)
            self.projection = nn.Linear(2 * width, width, bias=False)
        else:
            norm_class = type(self.decoder.hyper_connection_mixer.hc_norm)
            self.embedding_norm = norm_class(width, eps=self.config.rms_norm_eps)
            self.hidden_norm = norm_class(self.streams * width, eps=self.config.rms_norm_eps)
            self.projection = nn.Linear(width, width, bias=False)
            self.hidden_projection = nn.Linear(width, width, bias=False)
        # In a tuple, so that they are not parameters of the head.
        self._shared = (model.get_input_embeddings(), model.get_output_embeddings())

    def forward(
        self, tokens: Tensor, hidden: Tensor, position: int = 0, cache: Cache | None = None, **options: object
    ) -> tuple[Tensor, Tensor]:
        """Entries from ``position`` on.

        Args:
            tokens: ``[B, T]``, each the one after its hidden state.
            hidden: ``[B, T, d]``; with hyper-connections the streams before they are mixed, ``[B, T, n d]``.
            options: for the decoder; among them ``position_ids`` where the entries do not follow one another.

        Returns:
            What :meth:`logits` reads ``[B, T, d]``, and the hidden states for the next entries, shaped as ``hidden``.
        """
        embedded = self.embedding_norm(self._shared[0](tokens))
        hidden = self.hidden_norm(hidden)
        options.setdefault("position_ids", position + torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0))
        if cache is not None:
            options[self._cache_argument] = cache
        options["use_cache"] = cache is not None
        if self.streams > 1:
            return self._forward_streams(embedded, hidden, options)
        out = self.decoder(inputs_embeds=self.projection(torch.cat([embedded, hidden], -1)), **options)[0]
        return out, out

    def _forward_streams(self, embedded: Tensor, hidden: Tensor, options: dict) -> tuple[Tensor, Tensor]:
        """Hyper-connections: the embedding, which the decoder repeats, is added to each stream of the hidden state."""
        streams = self.hidden_projection(hidden.unflatten(-1, (self.streams, -1))).flatten(-2)
        left: list[Tensor] = []
        hooks = [
            self.decoder.layers[0].register_forward_pre_hook(lambda _, inputs: (inputs[0] + streams, *inputs[1:])),
            watch_streams(self.decoder, left.append),
        ]
        try:
            mixed = self.decoder(inputs_embeds=self.projection(embedded), **options)[0]
        finally:
            for hook in hooks:
                hook.remove()
        return mixed, left[0]

    def logits(self, read: Tensor) -> Tensor:
        """``[..., vocab]`` of what :meth:`forward` returned first."""
        head = self._shared[1]
        return head(read.to(head.weight.dtype))


def watch_streams(decoder: nn.Module, see: Callable[[Tensor], None]) -> torch.utils.hooks.RemovableHandle:
    """Shows ``see`` the streams ``[B, T, n d]`` of a decoder with hyper-connections before they are mixed into one."""
    return decoder.hyper_connection_mixer.register_forward_pre_hook(lambda _, inputs: see(inputs[0]))
