"""Drafts cut out of every model family: the saved checkpoint is whole, its layers are the target's own, and it computes
what the target does without the other layers, or the family is refused by name.
"""

import copy
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3_5TextConfig

from hybridspec.drafts.distillation.cut import check_kept, cut_model, shared_parts
from hybridspec.drafts.distillation.cut_config import cut_config
from hybridspec.drafts.distillation.layer_choice import (
    choose_layers,
    default_count,
    layer_kinds,
    layer_list,
    mixer_kinds,
)
from hybridspec.errors import InputError, UnsupportedLayerError
from tests.families import FAMILIES, family_model, some_tokens

#: Why no draft of this many layers can be made.
REFUSED = {
    "glm5_next": "no causal language model of this type alone",
    "inkling2_loop_text": "`loop_layer_index_start` .* must be a multiple of",
}
#: Skipping a layer changes more in these than what it adds to the hidden states: they pass on other things beside.
WITHOUT_TWIN = {"inkling2_text", "zaya", "rwkv", "xlstm"}
#: What layers return where it is not the hidden states alone.
TUPLES = {"bamba": lambda hidden: (hidden, None), "falcon_h1": lambda hidden: (hidden,)}


def logits(model: PreTrainedModel, batch: Tensor) -> Tensor:
    return model(input_ids=batch, use_cache=False).logits


def skipping(name: str, kept: Sequence[int]) -> PreTrainedModel:
    """The whole model, in which the layers that are not kept hand on what they get: the slow twin of a cut one."""
    model = copy.deepcopy(family_model(name))
    returned = TUPLES.get(name, lambda hidden: hidden)
    for number, layer in enumerate(layer_list(model)[1]):
        if number not in kept:
            layer.forward = lambda hidden, *_, **__: returned(hidden)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_cut_and_trains_or_is_refused_by_name(name: str, tmp_path: Path) -> None:
    target = family_model(name)
    kinds = layer_kinds(target)
    kept = choose_layers(kinds, default_count(kinds))
    if name in REFUSED:
        with pytest.raises(
            UnsupportedLayerError, match=f"^{target.config.get_text_config().model_type}: .*{REFUSED[name]}"
        ):
            cut_model(target, kept)
        return
    draft = cut_model(target, kept)
    draft.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    wanted = [mixer_kinds(target.config.get_text_config(decoder=True))[layer] for layer in kept]
    assert mixer_kinds(loaded.config) == wanted
    assert len(layer_list(loaded)[1]) == len(kept) < len(kinds)
    batch = torch.tensor([some_tokens(24, seed) for seed in range(2)])
    found = logits(loaded.eval(), batch)
    if name not in WITHOUT_TWIN:
        torch.testing.assert_close(found, logits(skipping(name, kept), batch), rtol=1e-4, atol=1e-4)
    for parameter in shared_parts(loaded):
        parameter.requires_grad_(False)
    logits(loaded.train(), batch).logsumexp(-1).mean().backward()
    gradients = [p.grad for p in loaded.parameters() if p.grad is not None]
    assert gradients and all(g.isfinite().all() for g in gradients) and any(g.abs().max() > 0 for g in gradients)


def test_layers_that_are_all_kept_are_the_target() -> None:
    for name in ("jamba", "zamba2", "nemotron_h", "recurrent_gemma", "rwkv"):
        target = family_model(name)
        draft = cut_model(target, range(len(layer_kinds(target))))
        batch = torch.tensor([some_tokens(24)])
        torch.testing.assert_close(logits(draft, batch), logits(target, batch))


QWEN = [("linear", ()), ("linear", ()), ("linear", ()), ("full", ())]


@pytest.mark.parametrize(
    ("count", "layers"),
    [
        (1, [0]),
        (2, [0, 23]),
        (3, [0, 12, 23]),
        (4, [0, 8, 16, 23]),
        (24, list(range(24))),
    ],
)
def test_layers_are_spread_over_the_target_in_its_pattern(count: int, layers: list[int]) -> None:
    kinds = QWEN * 6
    chosen = choose_layers(kinds, count)
    assert chosen == layers
    pattern = "".join(kind[0] for kind, _ in kinds)
    assert "".join(pattern[layer] for layer in chosen) in pattern


@pytest.mark.parametrize("seed", range(20))
def test_any_pattern_gives_a_stretch_of_itself(seed: int) -> None:
    rng = random.Random(seed)
    kinds = [(rng.choice("abc"), ()) for _ in range(rng.randint(1, 30))]
    pattern = "".join(kind for kind, _ in kinds)
    for count in range(1, len(kinds) + 1):
        chosen = choose_layers(kinds, count)
        assert chosen == sorted(set(chosen)) and len(chosen) == count
        assert "".join(pattern[layer] for layer in chosen) in pattern


def test_default_count() -> None:
    assert default_count(QWEN * 6) == 2
    assert default_count(QWEN * 16) == 5
    assert default_count([("a", ()), ("b", ()), ("c", ()), ("a", ())]) == 3
    assert default_count([("a", ())] * 3) == 2
    assert default_count([("a", ())]) == 1


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ((), "different layer numbers"),
        ((2, 1), "rising order"),
        ((1, 1), "different"),
        ((0, 4), "layers 0 to 3, not 4"),
    ],
)
def test_kept_layers_are_checked(kept: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_kept(kept, 4)


@pytest.mark.parametrize("count", [0, 25])
def test_counts_outside_are_refused(count: int) -> None:
    with pytest.raises(InputError, match=f"a draft of {count} layers .* choose 1 to 24"):
        choose_layers(QWEN * 6, count)


def test_a_sequence_that_a_config_cannot_say_is_refused() -> None:
    """Jamba's attention comes once in a period."""
    target = family_model("jamba")
    config = copy.deepcopy(target.config)
    config.num_hidden_layers, config.attn_layer_period, config.attn_layer_offset = 8, 4, 2
    assert mixer_kinds(cut_config(config, [0, 2, 4, 6])) == ["linear_attention", "full_attention"] * 2
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        UnsupportedLayerError, match="^jamba: no draft can be cut of layers 1, 2, 6: its config cannot say"
    ):
        cut_model(model, [1, 2, 6])


def test_what_serving_engines_read_beside_the_list_is_cut_too() -> None:
    types = [*["linear_attention"] * 3, "full_attention"] * 2
    config = Qwen3_5TextConfig(
        num_hidden_layers=8, layer_types=types, full_attention_interval=4, mtp_num_hidden_layers=1
    )
    assert config.full_attention_interval == 4
    cut = cut_config(config, [0, 7])
    assert (cut.num_hidden_layers, cut.layer_types) == (2, ["linear_attention", "full_attention"])
    assert (cut.full_attention_interval, cut.mtp_num_hidden_layers) == (2, 0)
    bamba = copy.deepcopy(family_model("bamba").config)
    assert cut_config(bamba, [1, 2]).attn_layer_indices == [1]
