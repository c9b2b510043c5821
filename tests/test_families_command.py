"""What ``hybridspec families`` says is what happens when the model is loaded; and the command as a user types it."""

import importlib
import json
import subprocess
import sys

import pytest
from transformers import __version__ as version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hybridspec.checkpoints import modeling_files
from hybridspec.checkpoints.modeling_files import ModelingFile
from hybridspec.errors import InputError, UnsupportedLayerError
from hybridspec.hooks import adapters, mixers
from hybridspec.runtime import families
from hybridspec.runtime.families import CLAMPED, FROM_ZERO, TIES_ATTENTION, TIES_EXPERTS, Family
from hybridspec.runtime.runner import TargetRunner
from tests.families import FAMILIES, family_runner, is_known, model_type, modes
from tests.test_cli import run

DENSE = {"mistral", "qwen3", "gemma3_text"}
ALL_MODES = ("tape", "slots", "recompute")


@pytest.fixture(scope="module")
def listed() -> dict[str, Family]:
    return {family.model_type: family for family in families.families(dense=True)}


def loads(name: str, mode: str) -> TargetRunner | None:
    try:
        return family_runner(name, mode)
    except UnsupportedLayerError:
        return None


@pytest.mark.parametrize("name", FAMILIES)
def test_listed_modes_are_those_that_load(listed: dict[str, Family], name: str) -> None:
    """With the self-test, which takes tokens back and compares; nothing of this is asked by the listing itself."""
    family = listed[model_type(name)]
    if not is_known(name):
        assert family.since and not family.modes
        return
    runners = {mode: loads(name, mode) for mode in ALL_MODES}
    assert family.modes == tuple(mode for mode in ALL_MODES if runners[mode])
    assert family.modes == modes(name)
    # The listing reads text; a session asks the imported module.
    known = set(family.mixers) & set((modeling_files.FUNCTION_NAMES | modeling_files.CLASS_NAMES).values())
    assert bool(known) == bool(adapters.attach(runners["recompute"].model))
    assert family.hybrid == (model_type(name) not in DENSE)
    assert (CLAMPED in family.notes) == runners["recompute"].clamps_steps
    if FROM_ZERO in family.notes:
        assert runners["recompute"].one_by_one


def test_mixers_and_notes(listed: dict[str, Family]) -> None:
    assert listed["qwen3_5_text"].mixers == ("gated delta rule", "full attention")
    assert listed["glm5_next"].mixers == ("Kimi delta attention", "sparse attention")
    assert listed["jamba"].mixers == ("selective scan (Mamba-1)", "full attention")
    # Its default config has no attention layer; its modeling file has attention.
    assert listed["bamba"].mixers == ("SSD (Mamba-2)", "full attention")
    assert listed["mamba2"].mixers == ("SSD (Mamba-2)",)
    assert listed["lfm2"].mixers == ("short convolution", "full attention")
    assert listed["gemma3_text"].mixers == ("full attention", "sliding attention")
    assert listed["rwkv"].mixers == ("another recurrence",)
    assert listed["deepseek_v4"].mixers == ("compressed sparse attention", "heavily compressed attention")
    assert {key for key, family in listed.items() if CLAMPED in family.notes} == {"nemotron_h", "zamba2"}
    assert {key for key, f in listed.items() if FROM_ZERO in f.notes} == {"mamba", "falcon_mamba", "jamba", "zamba"}
    assert TIES_EXPERTS in listed["qwen3_next"].notes and TIES_EXPERTS not in listed["qwen3_5_text"].notes
    assert TIES_ATTENTION in listed["qwen4_exp_text"].notes
    assert "qwen3_5" in listed["qwen3_5_text"].inside


def test_nothing_depends_on_what_was_imported_before(listed: dict[str, Family]) -> None:
    """The modeling file of DeepSeek-V4 adds cache layers to transformers when it is imported."""
    file, config = families.modeling_files()["deepseek_v4"], CONFIG_MAPPING["deepseek_v4"]()
    importlib.import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")
    assert families.describe("deepseek_v4", file, config) == listed["deepseek_v4"]


def test_every_recurrence_has_a_name_and_every_exception_is_still_one(listed: dict[str, Family]) -> None:
    assert set(modeling_files.FUNCTION_NAMES) == set(adapters.RECURRENCES)
    assert set(modeling_files.CLASS_NAMES) == set(mixers.MIXERS)
    for key in families.OBSTACLES:
        assert "tape" not in listed[key].modes, f"{key} has a tape now: it needs no explanation"
    assert set(families.NEWER) <= set(listed)


def file_of(body: str, forward: str = "self, input_ids, cache: Cache", returns: str = "cache=outputs.cache") -> str:
    model = f"class NewForCausalLM(Base):\n    def forward({forward}) -> Output:\n        return Output({returns})\n"
    return ModelingFile("NewForCausalLM", f"{body}\n\n{model}\n\n__all__ = []\n")


@pytest.mark.parametrize(
    ("body", "modes"),
    [
        ("def torch_chunk_gated_delta_rule(query): ...", ALL_MODES),
        ("    x = torch_chunk_gated_delta_rule(query)", ("recompute",)),
        ("class MiniMaxLightningAttention(nn.Module): ...", ALL_MODES),
        # A linear-attention layer, and nothing that says what it does.
        ("", ("recompute",)),
        ("    _is_stateful = True", ("recompute",)),
        ("    cache.update_conv_state(x, 0)", ALL_MODES),
        ("    cache.update_conv_state(x, 0)\n    cache.update_recurrent_state(x, 0)", ("recompute",)),
    ],
)
def test_a_model_that_nobody_has_seen_yet(body: str, modes: tuple[str, ...]) -> None:
    config = CONFIG_MAPPING["qwen3_5_text"]()
    assert families.describe("new", file_of(body), config).modes == modes


def test_no_mode_without_a_cache() -> None:
    config = CONFIG_MAPPING["qwen3"]()
    assert families.describe("new", file_of(""), config).modes == ALL_MODES
    assert families.describe("new", file_of("", forward="self, input_ids"), config).modes == ()
    assert families.describe("new", file_of("", returns="logits=logits"), config).modes == ()


def test_an_older_transformers_is_told_which_one_to_get(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {key: file for key, file in families.modeling_files().items() if key in ("lfm2", "qwen3")}
    monkeypatch.setattr(families, "modeling_files", lambda: files)
    found = {family.model_type: family.since for family in families.families()}
    assert found == families.NEWER | {"lfm2": None}


def test_table_and_filter(capsys: pytest.CaptureFixture) -> None:
    status, table, _ = run(capsys, "families")
    assert status == 0
    assert version in table and "Dense models" in table
    for name in FAMILIES:
        assert (f"│ {model_type(name)} " in table) == (model_type(name) not in DENSE)
    status, one, _ = run(capsys, "families", "Jamba")
    assert status == 0
    assert "jamba" in one and "expert ties" in one and "zamba" not in one
    by_mixer = run(capsys, "families", "lightning")[1]
    assert "minimax" in by_mixer and "jamba" not in by_mixer
    assert "qwen3_5_text" in run(capsys, "families", "qwen3-5")[1]


def test_json(capsys: pytest.CaptureFixture) -> None:
    status, out, _ = run(capsys, "families", "--json", "--all")
    assert status == 0
    result = json.loads(out)
    assert result["transformers"] == version
    rows = {row["model_type"]: row for row in result["families"]}
    assert rows["mamba2"] == {
        "model_type": "mamba2",
        "hybrid": True,
        "since": None,
        "mixers": ["SSD (Mamba-2)"],
        "modes": list(ALL_MODES),
        "notes": [],
        "inside": [],
    }
    assert rows["llama"]["modes"] == list(ALL_MODES) and not rows["llama"]["hybrid"]
    assert rows["rwkv"]["notes"][0]["name"] == "no tape"
    # Dense types are found by name without --all.
    assert [row["model_type"] for row in json.loads(run(capsys, "families", "smollm3", "--json")[1])["families"]] == [
        "smollm3"
    ]


def test_an_unknown_filter_is_told_the_nearest(capsys: pytest.CaptureFixture) -> None:
    status, out, err = run(capsys, "families", "jmaba")
    assert status == 2 and not out
    assert "'jmaba'" in err and "did you mean" in err and "jamba" in err
    with pytest.raises(InputError, match="--all"):
        families.matching([], "???")


def test_help_shows_an_example() -> None:
    command = [sys.executable, "-m", "hybridspec.cli.app", "families", "--help"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "Example: hybridspec families" in out
