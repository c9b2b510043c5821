"""Tiny random Qwen3.5 models whose every parameter matters: built once per set of arguments and shared by the tests."""

import copy
from functools import cache

import torch
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

VOCABULARY = 96


@cache
def tiny_model(
    *,
    layers: int = 4,
    layer_types: tuple[str, ...] | None = None,
    vocabulary: int = VOCABULARY,
    value_heads_per_key_head: int = 1,
    context: int = 2048,
    seed: int = 0,
    spread: float = 0.05,
) -> PreTrainedModel:
    """A random model of width 32, three linear-attention layers to one full-attention layer unless told otherwise.

    Embeddings are untied: a random model with tied ones repeats one token, and any comparison of its outputs is empty.
    ``spread`` is the weights' standard deviation: with wide weights a random model amplifies rounding a thousandfold.
    """
    config = Qwen3_5TextConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=len(layer_types) if layer_types else layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2 * value_heads_per_key_head,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        initializer_range=spread,
        layer_types=list(layer_types) if layer_types else None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3_5ForCausalLM(config).eval()
        # Norm weights, decays and time-step biases start at constants: a bug that mixes them up would not show.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@cache
def noisy_copy(noise: float, **arguments: object) -> PreTrainedModel:
    """The model of these arguments with ``noise`` of each weight's own scale added: often, not always, right."""
    model = copy.deepcopy(tiny_model(**arguments))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(17)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    return model
