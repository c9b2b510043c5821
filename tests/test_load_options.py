"""LoadOptions: one object from every door to the model and on to its draft."""

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from hybridspec import LoadOptions, TargetRunner, embedded
from hybridspec.decoding.target import EngineTarget
from hybridspec.drafts.registry import make_draft
from hybridspec.errors import InputError
from hybridspec.runtime.options import load_options
from hybridspec.tuning.model_checks import run_models

DRAFT = embedded.DRAFTS["draft-2-layers"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "bf17"}, "dtype must be .* not 'bf17'"),
        ({"dtype": "nn"}, "dtype must be .* not 'nn'"),
        ({"rollback": "slot"}, "unknown rollback 'slot': choose one of auto, tape, slots, recompute"),
        ({"compile": "max-autotune"}, "compile must be true or false, not 'max-autotune'"),
        ({"compile": True, "packed": True}, "choose one of them"),
    ],
)
def test_a_wrong_value_is_named(fields: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        LoadOptions(**fields)
    with pytest.raises(InputError, match=message):
        TargetRunner.from_pretrained("no such folder", **fields)


def test_an_unknown_field_is_an_error_of_the_program() -> None:
    with pytest.raises(TypeError, match="rolback"):
        load_options(rolback="tape")


def test_an_unknown_device_is_refused_before_the_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("minutes of loading for a typing error")

    monkeypatch.setattr("hybridspec.runtime.loading.AutoModelForCausalLM.from_pretrained", fail)
    with pytest.raises(InputError, match="device must be .* not 'abacus'"):
        TargetRunner.from_pretrained(DRAFT, device="abacus")


def test_types_and_devices_of_torch_are_kept_by_name() -> None:
    options = LoadOptions(dtype=torch.float8_e4m3fn, device=torch.device("cuda", 1))
    assert options == LoadOptions("float8_e4m3fn", "cuda:1")
    assert options.torch_dtype is torch.float8_e4m3fn
    assert pickle.loads(pickle.dumps(options)) == options


def test_keywords_come_before_options() -> None:
    options = LoadOptions(dtype="bfloat16", rollback="slots")
    runner = TargetRunner.from_pretrained(DRAFT, options=options, rollback="recompute")
    assert runner.options == replace(options, rollback="recompute")
    assert runner.model.dtype == torch.bfloat16 and runner.rollback == "recompute"


def test_a_runner_on_a_model_has_the_type_that_the_model_has(make_model: Callable[..., PreTrainedModel]) -> None:
    model = make_model("draft", seed=6).double()
    assert TargetRunner(model, options=LoadOptions(rollback="tape")).options == LoadOptions("float64", rollback="tape")
    with pytest.raises(TypeError, match="dtype"):
        TargetRunner(model, dtype=torch.float16)


@pytest.mark.parametrize("options", [LoadOptions(), LoadOptions("bfloat16", rollback="slots")])
def test_a_draft_is_loaded_as_its_target_runs(options: LoadOptions) -> None:
    target = TargetRunner.from_pretrained(DRAFT, options=options)
    elsewhere = EngineTarget("engine", target.vocab_size, target.tokenizer, options=options)
    for each in (target, elsewhere):
        assert make_draft(str(DRAFT), each).runner.options == options


def test_the_check_runs_models_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridspec.tuning.model_checks.NEW_TOKENS", 4)
    facts, _ = run_models(DRAFT, length=32, options=LoadOptions(rollback="recompute"))
    details = [row["detail"] for row in facts["measurements"] if "cached against full" in row["name"]]
    assert details and all("rollback recompute" in detail for detail in details)


def test_a_target_without_a_tokenizer_takes_no_text() -> None:
    with pytest.raises(InputError, match="engine came without a tokenizer"):
        EngineTarget("engine", 60).encode("text")
