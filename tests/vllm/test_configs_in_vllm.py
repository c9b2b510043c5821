"""Every config that export emits, through vLLM's own validation, which needs no weights and no engine.

What it must not accept is refused by us before; which method goes to which family is written down here, so that a
refusal too many fails as well.
"""

from collections.abc import Callable
from typing import Any

import pytest

from hybridspec.engines.export.draft_method import METHODS, PLAIN, from_method
from hybridspec.engines.export.key_sets import KeySet, choose_key_set
from hybridspec.engines.export.models import ExportedPair, read_models
from hybridspec.engines.export.refusals import Refusal
from hybridspec.engines.export.vllm import LATENT, Export, ExportOptions, export_vllm
from tests.serving import stand_in

__all__ = ["stand_in"]
pytestmark = pytest.mark.vllm
K = 3
PLUGIN, DENSE = "custom_class", "draft_model"
LOOKUP = {"ngram", "suffix"}
#: Family -> methods besides plain decoding that are exported for it, on a GPU.
SERVED: dict[str, set[str]] = {
    "qwen3": {DENSE, PLUGIN} | LOOKUP,
    "qwen3_next": {"mtp", DENSE, PLUGIN} | LOOKUP,
    "qwen3_5_text": {"mtp", DENSE, PLUGIN} | LOOKUP,
    "qwen3_5_moe_text": {"mtp", DENSE, PLUGIN} | LOOKUP,
    "qwen4_exp_text": {"mtp", "ngram"},
    "olmo_hybrid": {DENSE, PLUGIN} | LOOKUP,
    "kimi_linear": {DENSE, PLUGIN} | LOOKUP,
    "bailing_hybrid": {"mtp", DENSE, PLUGIN} | LOOKUP,
    "granitemoehybrid": {DENSE, PLUGIN} | LOOKUP,
    "nemotron_h": {"mtp", DENSE, PLUGIN} | LOOKUP,
    "falcon_h1": {DENSE, PLUGIN} | LOOKUP,
    "zamba2": {DENSE, PLUGIN} | LOOKUP,
    "lfm2": {DENSE, PLUGIN} | LOOKUP,
    "lfm2_moe": {DENSE, PLUGIN} | LOOKUP,
    "jamba": set(),
    "mamba": set(),
    "falcon_mamba": set(),
    "bamba": set(),
    "minimax+linear_first": set(),
}
HEADS = {
    "nemotron_h": {"num_nextn_predict_layers": 1},
    "bailing_hybrid": {"num_nextn_predict_layers": 1},
    "qwen4_exp_text": {"mtp_num_hidden_layers": 1},
}
#: Drafts with a stale state where rows differ in length, before 0.33.
GATED_DELTA = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text", "olmo_hybrid"}


@pytest.fixture(scope="module")
def keys(environment: None) -> KeySet:
    import vllm

    return choose_key_set(vllm.__version__)[0]


@pytest.fixture(autouse=True)
def in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import speculative
    from vllm.model_executor.models import registry

    # vLLM looks at each model class in a process of its own, which imports everything again.
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())
    # Suffix decoding needs a package that is built for minutes; what it says without it is not in question here.
    monkeypatch.setattr(speculative, "has_arctic_inference", lambda: True)


def exported(models: ExportedPair, method: str | None, keys: KeySet, rule: str | None = None) -> Export | Refusal:
    draft = models.draft.path if models.draft else None
    proposal = PLAIN if method is None else from_method(method, K, draft, models.facts.draft_hybrid, rule)
    # What is wrong on a CPU is refused for one; so that there is something to validate, most is exported for a GPU.
    device = "cpu" if method is None and LATENT in models.recurrent_mixers else "gpu"
    return export_vllm(
        models, proposal, ExportOptions(keys, device, engine={"max_model_len": 128, "dtype": "bfloat16"})
    )


def validated(result: Export) -> Any:
    """vLLM's own config of exported keyword arguments."""
    from vllm.engine.arg_utils import EngineArgs

    with pytest.MonkeyPatch.context() as patch:
        for name, value in result.environment.items():
            patch.setenv(name, value)
        return EngineArgs(**result.arguments).create_engine_config()


def check_accepted(result: Export) -> None:
    config = validated(result)
    asked = result.speculative_config
    if asked is None:
        assert config.speculative_config is None
        return
    assert config.speculative_config.method == asked["method"]
    assert config.speculative_config.num_speculative_tokens == K
    assert bool(config.cache_config.enable_prefix_caching) == result.engine_arguments.get("enable_prefix_caching", True)
    assert (config.additional_config or None) == result.additional_config


@pytest.mark.parametrize("family", SERVED)
def test_every_exported_config_is_accepted_with_the_method_that_was_asked_for(
    family: str, keys: KeySet, stand_in: Callable[..., str]
) -> None:
    target = stand_in(family, head="mtp" in SERVED[family], **HEADS.get(family, {}))
    # One layer is always in one KV cache group; a hybrid draft is the one that vLLM itself refuses.
    drafts = {DENSE: stand_in("qwen3", num_hidden_layers=1), PLUGIN: stand_in("qwen3_5_text")}
    found, refused = set(), {}
    for method in (None, *METHODS):
        result = exported(read_models(target, drafts.get(method)), method, keys)
        if isinstance(result, Refusal):
            refused[method] = result.what
            continue
        check_accepted(result)
        found.add(method)
    ragged = LOOKUP if keys.release < (0, 33) and family in GATED_DELTA else set()
    assert found - {None} == SERVED[family] - ragged, refused
    assert all(refused.values())


@pytest.mark.parametrize("family", ["qwen3_5_text", "granitemoehybrid", "qwen3"])
def test_a_length_rule_and_prompt_lookup_of_our_own(family: str, keys: KeySet, stand_in: Callable[..., str]) -> None:
    models = read_models(stand_in(family), stand_in("qwen3_5_text"))
    result = exported(models, PLUGIN, keys, "svip:threshold=0.3")
    if keys.release < (0, 33) and family in GATED_DELTA:
        assert isinstance(result, Refusal) and "a fixed K" in result.instead
        return
    check_accepted(result)
    assert result.additional_config["hybridspec"]["length"] == "svip:threshold=0.3"


@pytest.mark.parametrize(("target", "draft"), [("granitemoehybrid", "granitemoehybrid"), ("qwen3", "granitemoehybrid")])
def test_a_hybrid_draft_model_passes_their_validation_and_not_ours(
    target: str, draft: str, keys: KeySet, stand_in: Callable[..., str]
) -> None:
    """The reason why we refuse it: it dies only when the engine starts."""
    models = read_models(stand_in(target), stand_in(draft))
    assert isinstance(exported(models, DENSE, keys), Refusal)
    good = exported(models, PLUGIN, keys)
    wrong = {"method": DENSE, "model": models.draft.path, "num_speculative_tokens": K}
    config = validated(Export(**vars(good) | {"speculative_config": wrong, "environment": {}}))
    assert config.speculative_config.method == DENSE


def test_a_draft_of_the_qwen_line_would_become_another_method(keys: KeySet, stand_in: Callable[..., str]) -> None:
    models = read_models(stand_in("qwen3_5_text"), stand_in("qwen3_5_text", num_hidden_layers=4))
    assert isinstance(exported(models, DENSE, keys), Refusal)
    good = exported(models, PLUGIN, keys)
    wrong = {"method": DENSE, "model": models.draft.path, "num_speculative_tokens": K}
    config = validated(Export(**vars(good) | {"speculative_config": wrong, "environment": {}}))
    assert config.speculative_config.method == "mtp"


@pytest.mark.parametrize("family", ["qwen3_5_text", "granitemoehybrid"])
def test_k_by_batch_size_and_synthetic_acceptance(family: str, keys: KeySet, stand_in: Callable[..., str]) -> None:
    method = "mtp" if family in GATED_DELTA else "ngram"
    models = read_models(stand_in(family, head=method == "mtp"))
    table = ((1, K), (4, 2), (16, 1))
    options = ExportOptions(
        keys, by_concurrency=table, synthetic=True, acceptance=(0.8, 0.5, 0.2), engine={"max_model_len": 128}
    )
    config = validated(export_vllm(models, from_method(method, K, None, False, None), options)).speculative_config
    assert config.method == method
    assert config.rejection_sample_method == "synthetic"
    assert config.num_speculative_tokens_per_batch_size
