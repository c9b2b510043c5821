"""Multi-token-prediction heads in tests: random ones under the published names, and slow twins of what they draft."""

import math
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from hybridspec.drafts.mtp.head import PredictionHead, watch_streams
from hybridspec.drafts.mtp.strategy import MultiTokenPredictionDraft
from hybridspec.drafts.mtp.weights import published_tensors
from tests.families import family_model, family_runner, shake

#: Families with a head -> config fields that announce it.
ANNOUNCED = {
    "qwen3_next": {},
    "qwen3_5_text": {"mtp_num_hidden_layers": 1},
    "qwen3_5": {"mtp_num_hidden_layers": 1},
    "qwen3_5_moe_text": {"mtp_num_hidden_layers": 1},
    "qwen4_exp_text": {"mtp_num_hidden_layers": 1},
    "qwen4_exp_text+ple": {"mtp_num_hidden_layers": 1},
    "nemotron_h": {"num_nextn_predict_layers": 1},
    "bailing_hybrid": {"num_nextn_predict_layers": 1},
}
#: Published with one tensor for each expert; the others pack theirs.
EXPERT_BY_EXPERT = {"qwen3_next", "nemotron_h", "bailing_hybrid"}


def random_head(model: PreTrainedModel) -> dict[str, Tensor]:
    """Tensors by published name of a head whose every part matters."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        head = PredictionHead(model)
        shake(head)
        with torch.no_grad():
            for name, parameter in head.named_parameters():
                if "norm" in name:
                    parameter.copy_(0.3 * torch.randn_like(parameter) + parameter.mean().round())
    return {name: tensor.clone() for name, tensor in published_tensors(head, model).items()}


def unpacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One tensor for each expert and matrix."""
    result = {}
    for name, tensor in tensors.items():
        if ".experts." not in name or tensor.ndim < 3:
            result[name] = tensor
            continue
        stem, _, kind = name.rpartition(".")
        for expert, matrix in enumerate(tensor):
            halves = matrix.chunk(2) if kind == "gate_up_proj" else (matrix,)
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for part, half in zip(kinds, halves, strict=True):
                result[f"{stem}.{expert}.{part}.weight"] = half.clone()
    return result


@cache
def family_head(name: str) -> dict[str, Tensor]:
    tensors = random_head(family_model(name))
    return unpacked(tensors) if name in EXPERT_BY_EXPERT else tensors


@cache
def family_draft(name: str, mode: str = "tape") -> MultiTokenPredictionDraft:
    return MultiTokenPredictionDraft(family_runner(name, mode), tensors=family_head(name))


def write_head(folder: Path, tensors: dict[str, Tensor], prefix: str = "") -> Path:
    """A safetensors file that holds the head beside a tensor of the model, as published."""
    folder.mkdir(exist_ok=True)
    everything = {prefix + name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(everything | {"model.layers.0.input_layernorm.weight": torch.ones(3)}, folder / "model.safetensors")
    return folder / "model.safetensors"


@torch.no_grad()
def target_hidden(model: PreTrainedModel, tokens: list[int], streams: bool) -> Tensor:
    """``[T, d]`` of one pass without cache: what the head of the target reads, or the streams before they mix."""
    seen: list[Tensor] = []
    hook = watch_streams(model.get_decoder(), seen.append) if streams else None
    positions = torch.arange(len(tokens)).unsqueeze(0)
    out = model.get_decoder()(input_ids=torch.tensor([tokens]), position_ids=positions, use_cache=False)[0]
    if hook is not None:
        hook.remove()
    return (seen[0] if streams else out)[0]


@torch.no_grad()
def drafted_logits(head: PredictionHead, model: PreTrainedModel, tokens: list[int], drafted: list[int]) -> Tensor:
    """Logits ``[len(drafted), vocab]`` that the drafts after ``tokens`` come from, each over the whole sequence anew.

    ``tokens`` are those that the target has committed and the one that follows them.
    """
    hidden = target_hidden(model, tokens[:-1], head.streams > 1)
    after, rows = tokens[1:], []
    for token in drafted:
        read, following = head(torch.tensor([after]), hidden.unsqueeze(0))
        rows.append(head.logits(read[0, -1]))
        after, hidden = [*after, token], torch.cat([hidden, following[0, -1:]])
    return torch.stack(rows)


@torch.no_grad()
def qwen_head(tensors: dict[str, Tensor], model: PreTrainedModel, after: list[int], hidden: Tensor) -> Tensor:
    """Hidden states ``[T, d]`` of a dense Qwen3.5 head in plain products, from the published tensors and vLLM's order.

    ``after[i]`` is the token that follows the position of ``hidden[i]``.
    """
    config = model.config.get_text_config(decoder=True)
    size, heads, shared = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    length = len(after)

    def weight(name: str) -> Tensor:
        return tensors[f"mtp.{name}.weight"]

    def norm(name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * (1 + weight(name))

    embedded = model.get_input_embeddings().weight[torch.tensor(after)]
    both = torch.cat([norm("pre_fc_norm_embedding", embedded), norm("pre_fc_norm_hidden", hidden)], -1)
    x = both @ weight("fc").T

    y = norm("layers.0.input_layernorm", x)
    query, gate = (y @ weight("layers.0.self_attn.q_proj").T).view(length, heads, 2 * size).chunk(2, -1)
    query = norm("layers.0.self_attn.q_norm", query)
    key = norm("layers.0.self_attn.k_norm", (y @ weight("layers.0.self_attn.k_proj").T).view(length, shared, size))
    value = (y @ weight("layers.0.self_attn.v_proj").T).view(length, shared, size)
    turned = int(size * config.rope_parameters.get("partial_rotary_factor", 1.0))
    frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(0, turned, 2) / turned)
    angle = (torch.arange(length).unsqueeze(1) * frequencies).repeat(1, 2).unsqueeze(1)

    def rotate(z: Tensor) -> Tensor:
        moving, still = z[..., :turned], z[..., turned:]
        a, b = moving.chunk(2, -1)
        return torch.cat([moving * angle.cos() + torch.cat([-b, a], -1) * angle.sin(), still], -1)

    query, key = rotate(query), rotate(key)
    out = torch.zeros(length, heads, size)
    for head in range(heads):
        group = head // (heads // shared)
        scores = query[:, head] @ key[:, group].T / math.sqrt(size)
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        out[:, head] = scores.softmax(-1) @ value[:, group]
    x = x + (out * gate.sigmoid()).flatten(1) @ weight("layers.0.self_attn.o_proj").T

    y = norm("layers.0.post_attention_layernorm", x)
    gated = F.silu(y @ weight("layers.0.mlp.gate_proj").T) * (y @ weight("layers.0.mlp.up_proj").T)
    return norm("norm", x + gated @ weight("layers.0.mlp.down_proj").T)
