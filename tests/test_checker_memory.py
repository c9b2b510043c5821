"""Bytes of states, windows, keys and values by formula, against what real caches of every family hold."""

import pytest
import torch
from torch import Tensor

from hybridspec import check
from hybridspec.checker.layers import check_layers
from hybridspec.checkpoints.checkpoint import read_checkpoint
from hybridspec.checkpoints.memory import GIB, STATES, USABLE, LayerMemory, UnknownLayer, layer_memory, plan
from hybridspec.errors import InputError
from hybridspec.runtime.runner import TargetRunner
from hybridspec.state.layers import AttentionLayer, RecurrentLayer
from tests.checkpoints import checkpoints
from tests.families import CLAMPED, FAMILIES, MULTIMODAL, family_model, some_tokens

__all__ = ["checkpoints"]

#: Layers for which no formula is known, so that the report says so.
UNKNOWN = {"zaya", "rwkv", "xlstm", "deepseek_v4", "inkling_text", "inkling2_text", "inkling2_loop_text"}
#: Their caches hold keys and values expanded; here they are counted as serving engines keep them.
LATENT = {"kimi_linear", "bailing_hybrid", "glm5_next"}
KNOWN = sorted(FAMILIES.keys() - CLAMPED - UNKNOWN)


def parts(name: str, checkpoints) -> list[LayerMemory]:
    checkpoint = read_checkpoint(checkpoints(name), "target")
    facts, _ = check_layers(checkpoint, quick=True)
    return layer_memory(checkpoint, facts["kinds"], facts["mixers"])


@pytest.mark.parametrize("name", KNOWN)
def test_formulas_agree_with_real_caches(name: str, checkpoints) -> None:
    """Shapes of recurrent states and windows, and numbers per token, layer by layer."""
    layers = parts(name, checkpoints)
    count = 5
    runner = TargetRunner(family_model(name), rollback="tape")
    with runner.start(some_tokens(count + 1)) as session:
        real = session.cache.layers
        assert len(real) == len(layers)
        for formula, layer in zip(layers, real, strict=True):
            if isinstance(layer, RecurrentLayer):
                states = [layer.recurrent_states.get(i) for i in range(layer.number_of_states)]
                states = [state for state in states if isinstance(state, Tensor)]
                assert [tuple(state.shape[1:]) for state in states] == ([formula.state] if formula.state else [])
                windows = [layer.conv_states.get(i) for i in layer.conv_states.kernels]
                shapes = [tuple(window.shape[1:]) for window in windows if window is not None]
                # Our layer keeps as many columns as the kernel has; one fewer is the window itself.
                assert [s[0] for s in shapes] == [w[0] for w in formula.windows] or "ple" in name
            if isinstance(layer, AttentionLayer) and layer.keys is not None and name not in LATENT | {"glm5_next"}:
                values = sum(x.shape[1] * x.shape[3] for x in (layer.keys, layer.values))
                keys = getattr(layer, "indexer_keys", None)
                values += 0 if keys is None else keys.shape[-1]
                assert formula.kv_values == values


def test_every_mixer_with_a_formula_is_compared_somewhere(checkpoints) -> None:
    seen = set()
    for name in set(KNOWN) - set(MULTIMODAL):
        checkpoint = read_checkpoint(checkpoints(name), "target")
        seen |= set(check_layers(checkpoint, quick=True)[0]["mixers"])
    assert set(STATES) <= seen


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_what_has_no_formula_is_named(name: str, checkpoints) -> None:
    with pytest.raises(UnknownLayer, match="layer"):
        parts(name, checkpoints)
    assert "no formula" in check(checkpoints(name)).memory["unknown"]


def layer(**changes) -> LayerMemory:
    return LayerMemory("linear_attention", (2, 4, 8), ((16, 4),), "float32", "bfloat16", **changes)


def attention(**changes) -> LayerMemory:
    return LayerMemory("full_attention", model_dtype="bfloat16", kv_values=32, **changes)


def test_slots_multiply_states_and_widen_windows() -> None:
    k, length = 3, 100
    result = plan([layer(), attention()], None, weights=0, draft_weights=0, k=k, length=length, gpu_memory=None)
    state, window = 2 * 4 * 8 * 4, 16 * 4 * 2
    assert result["state_bytes"] == state + window
    assert result["state_bytes_with_slots"] == state * (1 + k) + window + 16 * 2 * k
    assert result["kv_bytes"] == length * 64 and result["kv_bytes_per_token"] == 64
    assert result["sequences"] is None
    slots = result["state_bytes_with_slots"]
    assert (result["crossing_length"] - 1) * 64 < slots <= result["crossing_length"] * 64
    assert result["larger_pool"] == ("states" if slots > length * 64 else "keys and values")


def test_a_sliding_window_stops_growing() -> None:
    assert attention(window=8).kv_bytes(100) == attention().kv_bytes(8)


@pytest.mark.parametrize("gib", [0.001, 1.0])
def test_sequences_that_fit_really_fit(gib: float) -> None:
    target, draft = [layer()] * 6 + [attention()] * 2, [attention()]
    result = plan(target, draft, weights=1000, draft_weights=500, k=4, length=64, gpu_memory=gib)
    room = gib * GIB * USABLE
    each = result["state_bytes_with_slots"] + result["kv_bytes"] + result["draft_bytes"]
    fit = result["sequences"]["speculative"]
    assert 1500 + fit * each <= room < 1500 + (fit + 1) * each
    assert result["sequences"]["plain"] >= fit


def test_findings_about_memory(checkpoints) -> None:
    folder = checkpoints("qwen3_5_text")
    assert "HS501" in check(folder, gpu_memory=1e-4).codes
    assert "HS503" in check(folder, gpu_memory=1, length=16).codes
    roomy = check(folder, gpu_memory=1, length=4096)
    assert not {"HS501", "HS502", "HS503"} & set(roomy.codes)
    one = roomy.memory["weights_bytes"] + roomy.memory["state_bytes"] + roomy.memory["kv_bytes"]
    assert "HS502" in check(folder, gpu_memory=1.001 * one / USABLE / GIB, length=4096, k=50).codes


@pytest.mark.parametrize(
    "arguments", [{"k": -1}, {"length": 0}, {"gpu_memory": 0}, {"gpu_memory": float("nan")}, {"engine": "abacus"}]
)
def test_arguments_out_of_range(arguments: dict, checkpoints) -> None:
    with pytest.raises(InputError):
        check(checkpoints("lfm2"), **arguments)


def test_lightning_states_follow_the_models_type(checkpoints) -> None:
    kinds = {m.kind: m for m in parts("minimax+linear_first", checkpoints)}
    assert kinds["linear_attention"].state_dtype == kinds["linear_attention"].model_dtype
    assert torch.float32 == getattr(torch, kinds["linear_attention"].state_dtype)
