"""Settings for vLLM: what every shipped configuration becomes, what is refused and why, against stored key sets."""

import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybridspec.engines.export.draft_method import PLAIN, PROPOSER, from_method
from hybridspec.engines.export.key_sets import KeySet, key_sets
from hybridspec.engines.export.memory import page_bytes
from hybridspec.engines.export.models import ExportedPair, read_models
from hybridspec.engines.export.profile import export_configuration
from hybridspec.engines.export.refusals import Refusal, in_one_group
from hybridspec.engines.export.vllm import Export, ExportOptions, batch_table, export_vllm, flag, synthetic_keys
from hybridspec.errors import InputError, ModelLoadError
from hybridspec.tuning.config_file import load_config
from tests.serving import stand_in, write_stand_in

__all__ = ["stand_in"]

OLD, NEW = key_sets().values()
SHIPPED = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))
#: Shipped file -> family of a stand-in for its target, and whether that has a prediction head's tensors.
STAND_INS = {
    "falcon-h1-34b": ("falcon_h1", False),
    "granite-4-h-small": ("granitemoehybrid", False),
    "jamba2-mini": ("jamba", False),
    "kimi-linear-48b-a3b": ("kimi_linear", False),
    "nemotron-h-47b": ("nemotron_h", False),
    "qwen3-next-80b-a3b-mtp": ("qwen3_next", True),
    "qwen3.5-27b": ("qwen3_5_text", True),
    "qwen3.6-35b-a3b-mtp": ("qwen3_5_moe_text", True),
    "qwen3.8-27b-mtp": ("qwen3_5_text", True),
    "embedded": ("qwen3_5_text", False),
}


def ask(models: ExportedPair, method: str | None, k: int = 3, rule: str | None = None, **options) -> Export | Refusal:
    draft = models.draft.path if models.draft else None
    keys = options.pop("keys", NEW)
    proposal = from_method(method, k, draft, models.facts.draft_hybrid, rule)
    return export_vllm(models, proposal, ExportOptions(keys, **options))


def check_valid(result: Export, keys: KeySet) -> None:
    """Only what the version knows, and the command line says what the keyword arguments say."""
    assert set(result.engine_arguments) <= set(keys.engine_arguments)
    config = result.speculative_config
    if config is not None:
        assert set(config) <= set(keys.speculative_keys) and config["method"] in keys.methods
        assert config["num_speculative_tokens"] >= 1
    words = shlex.split(result.command)
    while "=" in words[0]:
        name, value = words.pop(0).split("=", 1)
        assert result.environment[name] == value
    assert words[:3] == ["vllm", "serve", result.target]
    for name in ("speculative_config", "additional_config"):
        option = "--" + name.replace("_", "-")
        assert (option in words) == (name in result.arguments)
        if option in words:
            assert json.loads(words[words.index(option) + 1]) == result.arguments[name]
    made = SimpleNamespace(LLM=lambda **arguments: vars(made).update(arguments=arguments))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm", made)
        patch.setattr(os, "environ", {})
        exec(result.python, {})
        assert (made.arguments, os.environ) == (result.arguments, result.environment)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_every_choice_of_a_shipped_file_becomes_settings_or_a_refusal(path: Path, stand_in: Callable) -> None:
    config = load_config(path)
    family, head = STAND_INS[path.stem]
    target = stand_in(family, head=head)
    for spec in config.drafts:
        name = spec.partition(":")[0]
        folder = stand_in(family) if name == "same-architecture" else None
        models = read_models(target, folder)
        for rule in config.lengths:
            length, k = ("3", 3) if rule == "fixed" else (rule, 8)
            configuration = {"draft": spec, "length": length, "segments": False, "label": f"{spec} {length}"}
            for keys in (OLD, NEW):
                options = ExportOptions(keys, engine=config.serving.engine_arguments())
                result = export_configuration(models, configuration, k, folder, options)
                if path.stem == "jamba2-mini":
                    assert isinstance(result, Refusal) and "Mamba-1" in result.what and "hybridspec" in result.instead
                    continue
                ragged = name == "prompt-lookup" or rule != "fixed"
                if isinstance(result, Refusal):
                    stale = keys is OLD and ragged and "qwen" in family and "gated delta" in result.what
                    hidden = name == "mtp" and rule != "fixed" and "hidden states" in result.what
                    assert stale or hidden, result
                    assert result.instead
                    continue
                check_valid(result, keys)
                method = {"prompt-lookup": "ngram", "mtp": "mtp"}.get(name, "custom_class")
                assert result.speculative_config["method"] == (method if rule == "fixed" else "custom_class")
                assert result.speculative_config["num_speculative_tokens"] == k
                assert result.engine_arguments["enable_prefix_caching"] is False
                assert any("Prefix caching is off" in note for note in result.notes)
                if result.speculative_config["method"] == "custom_class":
                    assert result.speculative_config["model"] == PROPOSER
                    assert result.environment == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
                    settings = result.additional_config["hybridspec"]
                    assert settings["draft"] == (folder or spec)
                    assert settings.get("length") == (None if rule == "fixed" else rule)


QWEN, DENSE = "qwen3_5_text", "qwen3"
GRANITE = "granitemoehybrid"


@pytest.mark.parametrize(
    ("target", "draft", "method", "options", "words", "instead"),
    [
        (GRANITE, GRANITE, "draft_model", {}, "kv cache group", "HybridDraftProposer"),
        (QWEN, QWEN, "draft_model", {}, "rewritten to its prediction head", "HybridDraftProposer"),
        ("qwen3_next", "qwen3_next", "draft_model", {}, "rewritten to its prediction head", "HybridDraftProposer"),
        ("jamba", DENSE, "draft_model", {}, "Mamba-1 states are not rolled back", "hybridspec's own runner"),
        ("jamba", None, "ngram", {}, "Mamba-1 states are not rolled back", "without speculation"),
        ("jamba", None, "suffix", {}, "Mamba-1 states are not rolled back", "without speculation"),
        ("jamba", "jamba", None, {}, "Mamba-1 states are not rolled back", "hybridspec's own runner"),
        ("jamba", None, "ngram", {"device": "cpu"}, "selective_scan_fwd", "GPU"),
        ("falcon_mamba", None, "ngram", {}, "Mamba-1", "hybridspec's own runner"),
        (QWEN, None, "mtp", {}, "cannot be seen", "whole checkpoint"),
        (GRANITE, None, "mtp", {"device": "cpu"}, "Unsupported speculative method", "hybridspec's own runner"),
        (GRANITE, None, "mtp", {}, "Unsupported speculative method", "ngram"),
        ("kimi_linear", None, "mtp", {}, "kimi_linear", "ngram"),
        ("bamba", None, "ngram", {}, "0.23.0", "own runner"),
        ("minimax+full_first", None, "ngram", {}, "0.23.0", "own runner"),
        ("rwkv", None, "ngram", {}, "no class for RwkvForCausalLM", "own runner"),
        ("recurrent_gemma", None, "ngram", {}, "no class for RecurrentGemma", "own runner"),
        (QWEN, None, "ngram", {"keys": OLD}, "stale state", "0.33.0"),
        (QWEN, None, "suffix", {"keys": OLD}, "stale state", "0.33.0"),
        (GRANITE, None, "ngram", {"device": "cpu"}, "wrong tokens", "GPU"),
        ("lfm2", None, "ngram", {"device": "cpu"}, "wrong tokens", "GPU"),
        (QWEN, None, "ngram", {"device": "cpu"}, "linear heads of 64", "own runner"),
        (QWEN, DENSE, None, {"runner": "v1"}, "more than one KV cache group", "one layer"),
        (QWEN, None, "suffix", {"runner": "v2"}, "does not have this method", "--runner"),
        ("qwen4_exp_text", QWEN, None, {}, "native MTP checkpoint", "ngram"),
    ],
)
def test_what_dies_or_degrades_is_refused(
    stand_in: Callable, target: str, draft: str | None, method: str | None, options: dict, words: str, instead: str
) -> None:
    models = read_models(stand_in(target), stand_in(draft) if draft else None)
    result = ask(models, method, **options)
    assert isinstance(result, Refusal)
    assert words in result.what and instead in result.instead, result
    keys = options.get("keys", NEW)
    assert result.version == keys.name and str(result).startswith(f"{keys.name}, ")


def test_other_vocabularies_and_tokenizers_are_refused(stand_in: Callable, tmp_path: Path) -> None:
    target = stand_in(QWEN)
    wider = read_models(target, stand_in(DENSE, vocab_size=512))
    assert "same vocab_size" in ask(wider, "draft_model").what
    assert "our proposer refuses" in ask(wider, "custom_class").what
    folder = write_stand_in(tmp_path, DENSE)
    content = json.loads((folder / "tokenizer.json").read_text())
    table = content["model"]["vocab"]
    table["a"], table["b"] = table["b"], table["a"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    swapped = read_models(target, folder)
    for method in ("draft_model", "custom_class"):
        assert "tokenizer" in ask(swapped, method).instead


def test_a_head_without_tensors_an_odd_k_and_an_unannounced_head(stand_in: Callable, tmp_path: Path) -> None:
    other = write_stand_in(tmp_path / "a", QWEN, {"lm_head.weight": torch.zeros(2, 4)})
    refused = ask(read_models(other), "mtp")
    assert "no tensors of a prediction head" in refused.what and "--method ngram" in refused.instead
    two = read_models(stand_in(QWEN, head=True, mtp_num_hidden_layers=2))
    refused = ask(two, "mtp", k=3)
    assert "no multiple of the 2 heads" in refused.what and refused.instead == "--k 2"
    assert ask(two, "mtp", k=4).speculative_config == {"method": "mtp", "num_speculative_tokens": 4}
    silent = read_models(stand_in(QWEN, head=True, mtp_num_hidden_layers=0))
    assert "announces no prediction head" in ask(silent, "mtp").what
    assert ask(read_models(stand_in("qwen3_next", head=True)), "mtp").speculative_config["method"] == "mtp"


@pytest.mark.parametrize(
    ("recurrent", "attention", "layers", "alike", "together"),
    # The first and second were seen in a running engine.
    [(3, 1, 2, False, False), (6, 2, 2, False, True), (6, 2, 1, True, True), (48, 16, 28, True, False)],
)
def test_layers_of_a_draft_in_one_cache_group(
    stand_in: Callable, recurrent: int, attention: int, layers: int, alike: bool, together: bool
) -> None:
    target, draft = (read_models(stand_in(name)).target for name in (QWEN, DENSE))
    kinds = ("linear_attention",) * recurrent + ("full_attention",) * attention
    shape = draft.attention if alike else (9, 9)
    target = replace(target, kinds=kinds, attention=shape)
    assert in_one_group(target, replace(draft, kinds=("full_attention",) * layers)) is together


def test_a_dense_draft_for_a_hybrid_goes_to_the_v2_runner(stand_in: Callable) -> None:
    models = read_models(stand_in(QWEN), stand_in(DENSE))
    result = ask(models, None, engine={"tensor_parallel_size": 2})
    assert result.speculative_config == {
        "method": "draft_model",
        "model": models.draft.path,
        "draft_tensor_parallel_size": 2,
        "num_speculative_tokens": 3,
    }
    assert not result.environment and any("V2 model runner" in note for note in result.notes)
    adaptive = ask(models, None, rule="svip:threshold=0.3")
    assert adaptive.additional_config["hybridspec"] == {"draft": models.draft.path, "length": "svip:threshold=0.3"}
    dense = ask(read_models(stand_in(DENSE), stand_in(DENSE, num_hidden_layers=2)), None)
    assert dense.speculative_config["method"] == "draft_model"
    assert "enable_prefix_caching" not in dense.engine_arguments and not dense.notes


def test_prefix_caching_when_it_is_asked_for(stand_in: Callable) -> None:
    models = read_models(stand_in(QWEN))
    for options in ({"prefix_caching": True}, {"engine": {"enable_prefix_caching": True}}):
        result = ask(models, "ngram", **options)
        assert result.engine_arguments["enable_prefix_caching"] is True and result.memory.slots == 5
        assert any("as asked" in note for note in result.notes)
        assert "--enable-prefix-caching" in result.command
    assert "--no-enable-prefix-caching" in ask(models, "ngram").command
    plain = export_vllm(models, PLAIN, ExportOptions(NEW))
    assert plain.speculative_config is None and not plain.engine_arguments and plain.memory.slots == 1


def test_one_sequence_at_a_time_on_an_old_cpu_build(stand_in: Callable) -> None:
    models = read_models(stand_in(QWEN, linear_key_head_dim=64, linear_value_head_dim=64), stand_in(QWEN))
    result = ask(models, None, device="cpu", keys=OLD)
    assert result.engine_arguments["max_num_seqs"] == 1 and result.engine_arguments["dtype"] == "bfloat16"
    assert not result.environment
    several = ask(models, None, device="cpu", keys=OLD, engine={"max_num_seqs": 4})
    assert "one sequence" in several.what
    assert "max_num_seqs" not in ask(models, None, device="cpu").engine_arguments
    assert "synthetic" in ask(models, None, device="cpu", synthetic=True, acceptance_length=2.0).what.lower()
    assert "prefix" in ask(models, None, device="cpu", prefix_caching=True).what.lower()


def test_latent_attention_on_a_cpu_goes_without_prefix_caching(stand_in: Callable) -> None:
    models = read_models(stand_in("kimi_linear"))
    for device, engine in (("cpu", {"enable_prefix_caching": False}), ("gpu", {})):
        assert export_vllm(models, PLAIN, ExportOptions(NEW, device)).engine_arguments == engine


def test_sequences_by_memory_follow_the_formula_that_is_shown(stand_in: Callable) -> None:
    models = read_models(stand_in(QWEN, head=True, mamba_ssm_dtype="float32"))
    k, length = 3, 128
    # 3 recurrent layers of [4, 16, 16] in fp32 and 2 x 32 + 64 channels of 3 + K columns; keys and values of 2 heads of
    # 16 in one layer.
    dtype = 4 if models.target.layers[0].model_dtype == "float32" else 2
    page = 4 * 16 * 16 * 4 + 128 * (3 + k) * dtype
    assert page_bytes(models.target.layers[0], k, "float32") == page
    weights = models.target.weights
    each = (1 + k) * 3 * page + length * 2 * 2 * 16 * dtype
    memory = (weights + 10.5 * each) / 0.5 / 2**30
    options = {"engine": {"gpu_memory_utilization": 0.5}, "gpu_memory": memory, "length": length}
    result = ask(models, "mtp", k=k, **options)
    assert result.memory.each == each and result.memory.sequences == 10
    assert result.engine_arguments["max_num_seqs"] == 10 and "--max-num-seqs 10" in result.command
    assert result.memory.formula.endswith("= 10") and "4 x " in result.memory.formula
    more = ask(models, "mtp", k=k, **options | {"engine": {"gpu_memory_utilization": 0.5, "max_num_seqs": 32}})
    assert any("more than fits" in note for note in more.notes)
    assert more.engine_arguments["max_num_seqs"] == 32
    refused = ask(models, "mtp", k=k, gpu_memory=weights / 2**30, length=length)
    halved = {"engine": {"mamba_ssm_cache_dtype": "bfloat16", "kv_cache_dtype": "fp8"}}
    small = ask(models, "mtp", k=k, length=length, **halved).memory
    assert small.slot == 3 * (page - 4 * 16 * 16 * 2) and small.kv == length * 2 * 2 * 16
    # vLLM keeps states in the model's type unless the config or the family says otherwise.
    assert ask(read_models(stand_in(QWEN)), "ngram", k=k, length=length).memory.slot == small.slot
    assert read_models(stand_in("nemotron_h")).target.state_dtype == "float32"
    assert read_models(stand_in("kimi_linear")).target.state_dtype == "float32"
    assert read_models(stand_in(GRANITE)).target.state_dtype is None
    wide = ask(models, "mtp", k=k, length=length, engine={"dtype": "float32"}).memory
    assert wide.slot == 3 * (4 * 16 * 16 * 4 + 128 * (3 + k) * 4) and wide.kv == length * 2 * 2 * 16 * 4
    unknown = ask(read_models(stand_in(QWEN)), "ngram", gpu_memory=80)
    assert unknown.memory.sequences is None and any("how many sequences fit is not known" in n for n in unknown.notes)
    assert isinstance(refused, Refusal) and "No sequence of 128 tokens fits" in refused.what


def test_k_by_batch_size(stand_in: Callable) -> None:
    assert batch_table([(8, 2), (1, 4), (32, 0), (16, 2)]) == [(1, 1, 4), (2, 16, 2), (17, 32, 0)]
    models = read_models(stand_in(QWEN, head=True))
    rows = ((1, 4), (8, 2), (32, 0))
    result = ask(models, "mtp", by_concurrency=rows)
    assert result.speculative_config == {
        "method": "mtp",
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 1, 4], [2, 8, 2], [9, 32, 0]],
    }
    same = ask(models, "mtp", by_concurrency=((1, 2), (8, 2)))
    assert same.speculative_config == {"method": "mtp", "num_speculative_tokens": 2}
    assert ask(models, "mtp", by_concurrency=((1, 0), (8, 0))).speculative_config is None
    for method, engine in (("suffix", {}), ("mtp", {"data_parallel_size": 2})):
        left_out = ask(models, method, by_concurrency=rows, engine=engine)
        assert "num_speculative_tokens_per_batch_size" not in left_out.speculative_config
        assert any("left out" in note for note in left_out.notes)
    with pytest.raises(InputError, match="at least 1"):
        batch_table([(0, 3)])


def test_synthetic_acceptance_is_what_vllm_demands_of_it(stand_in: Callable) -> None:
    assert synthetic_keys(3, [0.8, 0.5, 0.6, 0.1], None)["synthetic_acceptance_rates"] == [0.8, 0.5, 0.5]
    assert synthetic_keys(3, [0.8], 9.0)["synthetic_acceptance_length"] == 4.0
    with pytest.raises(InputError, match="rates of 3 positions"):
        synthetic_keys(3, [0.8], None)
    result = ask(read_models(stand_in(GRANITE)), "ngram", k=2, synthetic=True, acceptance=(0.7, 0.4))
    assert result.speculative_config["rejection_sample_method"] == "synthetic"
    check_valid(result, NEW)


def test_quoting(tmp_path: Path) -> None:
    folder = write_stand_in(tmp_path / 'it\'s a $HOME "folder"', QWEN)
    models = read_models(folder, folder)
    result = ask(models, None, engine={"hf_overrides": {"a": "b'c"}, "enforce_eager": True, "seed": 3})
    check_valid(result, NEW)
    words = shlex.split(result.command)
    assert str(folder) in words and "--enforce-eager" in words
    assert json.loads(words[words.index("--hf-overrides") + 1]) == {"a": "b'c"}
    assert flag("enable_prefix_caching", False) == ["--no-enable-prefix-caching"]


def test_bad_options_and_folders(stand_in: Callable, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no engine argument 'max_num_seq'. Did you mean 'max_num_seqs'"):
        ExportOptions(NEW, engine={"max_num_seq": 3})
    with pytest.raises(InputError, match="leave it out"):
        ExportOptions(NEW, engine={"speculative_config": {}})
    with pytest.raises(InputError, match="whole number"):
        ask(read_models(stand_in(QWEN)), "ngram", engine={"max_num_seqs": "many"})
    with pytest.raises(InputError, match="needs --draft"):
        from_method("draft_model", 3, None, False, None)
    with pytest.raises(InputError, match="takes no --draft"):
        from_method("ngram", 3, "x", False, None)
    with pytest.raises(InputError, match="no draft-length rule"):
        from_method("ngram", 3, None, False, "svip")
    with pytest.raises(ModelLoadError, match="nowhere"):
        read_models(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        read_models(tmp_path)


def test_what_only_our_runner_has(stand_in: Callable) -> None:
    models = read_models(stand_in(QWEN, head=True))
    trials = [{"draft": "mtp", "length": str(k), "speedup": s} for k, s in ((1, 1.2), (3, 1.5), (5, 1.1))]

    def export(draft: str, length: str, **changes) -> Export | Refusal:
        row = {"draft": draft, "length": length, "segments": False, "verification": "token", "label": draft} | changes
        return export_configuration(models, row, 4, None, ExportOptions(NEW), trials)

    assert "vLLM lets no proposer do" in export("full-attention", "4").what
    assert export("mtp", "svip").instead.endswith("(the best fixed K measured is 3)")
    assert "another folder" in export("mtp:path=/x", "4").what
    assert "nothing that drafts as 'mine'" in export("mine", "4").what
    lookup = export("prompt-lookup:longest=6,shortest=3", "4", segments=True, verification="block")
    assert lookup.speculative_config["prompt_lookup_max"] == 6 and lookup.speculative_config["prompt_lookup_min"] == 3
    assert sum("egment" in n or "Block verification" in n for n in lookup.notes) == 2
    windowed = export("prompt-lookup:window=64", "4")
    assert windowed.additional_config == {"hybridspec": {"draft": "prompt-lookup:window=64"}}
    assert export("", "0").speculative_config is None
