"""Faults planted in copies of small checkpoints of many families: each gives its own finding, and nothing else.

Every case asserts that no other error or warning is reported, and the clean checkpoints of every family, alone and as
pairs, give none.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hybridspec import check
from hybridspec.checkpoints.codes import CODES
from hybridspec.checkpoints.findings import Report
from tests.checkpoint_faults import (
    ALONE,
    CONFIG,
    DRAFTS,
    HARMLESS,
    TOKENIZER,
    both,
    config,
    delete,
    swap_tokens,
    write,
)
from tests.checkpoints import ROWS, checkpoints, edit, read_json, spoilt, tensors, write_json
from tests.families import CLAMPED, FAMILIES

__all__ = ["checkpoints", "spoilt"]

ENGINE_NOTES = {"HS601", "HS602", "HS603"}


def loud(report: Report) -> list[str]:
    """Codes of errors and warnings, without repetition."""
    return sorted({finding.code for finding in (*report.errors, *report.warnings)})


def told(report: Report) -> str:
    return "\n".join(f"{f.code} {f.severity} {f.subject}: {f.seen}" for f in report.findings)


@pytest.mark.parametrize("name", ALONE)
def test_a_fault_in_one_checkpoint_gives_its_own_finding_only(name: str, spoilt: Callable[..., Path]) -> None:
    family, spoil, code, *arguments = ALONE[name]
    folder = spoilt(family, spoil, **(arguments[0] if arguments else {}))
    report = check(folder)
    assert loud(report) == [code], told(report)
    finding = next(f for f in report.findings if f.code == code)
    assert finding.subject == "target" and finding.seen and finding.action
    assert report.exit_status(strict=True) == (2 if CODES[code].unreadable else 1)
    assert not (folder / "EXPLODED").exists(), "code of the checkpoint was run"


@pytest.mark.parametrize("name", DRAFTS)
def test_a_fault_in_a_draft_gives_its_own_finding_only(
    name: str, spoilt: Callable[..., Path], checkpoints: Callable[..., Path]
) -> None:
    family, spoil, code = DRAFTS[name]
    report = check(checkpoints(family), spoilt(family, spoil), quick=True)
    assert loud(report) == ([] if name in HARMLESS else [code]), told(report)
    assert code in report.codes, told(report)
    assert {"HS407", code} >= set(report.codes) - {"HS312"}, told(report)


def test_there_are_enough_faults() -> None:
    assert len(ALONE) + len(DRAFTS) >= 30
    assert len({family for family, *_ in (*ALONE.values(), *DRAFTS.values())}) >= 12
    reached = {case[2] for case in (*ALONE.values(), *DRAFTS.values())}
    # The others are reached below, and HS5xx to HS7xx in files of their own.
    others = {
        "HS001",
        "HS108",
        "HS109",
        "HS114",
        "HS117",
        "HS307",
        "HS314",
        "HS402",
        "HS403",
        "HS406",
        "HS407",
        "HS409",
    }
    assert {code for code in CODES if code < "HS500"} <= reached | others


def test_no_folder(tmp_path: Path) -> None:
    report = check(tmp_path / "nowhere", tmp_path / "nowhere")
    assert loud(report) == ["HS001"] and report.exit_status() == 2
    assert [f.subject for f in report.findings] == ["target", "draft"]


def test_padding_is_no_difference(checkpoints: Callable[..., Path]) -> None:
    """Qwen2.5's sizes are padded to 151936 and 152064 rows: the tokens are the same."""
    report = check(
        checkpoints("qwen3_5_text"), checkpoints("qwen3_5_text", vocab_size=ROWS + 64, intermediate_size=32), quick=True
    )
    assert not loud(report), told(report)
    finding = next(f for f in report.findings if f.code == "HS307")
    assert str(ROWS) in finding.seen and str(ROWS + 64) in finding.seen
    assert report.target["tokenizer"]["padding"] == ROWS - report.target["tokenizer"]["tokens"]


def test_sizes_that_differ_without_a_tokenizer(spoilt: Callable[..., Path], checkpoints: Callable[..., Path]) -> None:
    """Padding or another vocabulary: nothing tells."""
    draft = spoilt("qwen3_5_text", delete(TOKENIZER), vocab_size=ROWS + 64, intermediate_size=32)
    report = check(checkpoints("qwen3_5_text"), draft, quick=True)
    assert loud(report) == ["HS010", "HS314"], told(report)


def test_sentencepiece_files_are_compared_as_bytes(spoilt: Callable[..., Path], tmp_path: Path) -> None:
    target = spoilt("qwen3_5_text", both(delete(TOKENIZER), write("tokenizer.model", b"pieces")))
    report = check(target, target, quick=True)
    assert loud(report) == ["HS010"], told(report)
    assert report.draft["tokenizer"]["against_target"]["same"] is True


def test_vocab_and_merges_files_are_compared(spoilt: Callable[..., Path], tmp_path: Path) -> None:
    def split(folder: Path) -> None:
        tokenizer = read_json(folder / TOKENIZER)
        model = tokenizer["model"]
        added = {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}
        write_json(folder / "vocab.json", {t: i for t, i in model["vocab"].items() if t not in added})
        write_json(folder / "added_tokens.json", added)
        merges = [" ".join(pair) for pair in model["merges"]]
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]), encoding="utf-8")
        (folder / TOKENIZER).unlink()

    target = spoilt("lfm2", split)
    assert not loud(check(target, target, quick=True))
    draft = tmp_path / "draft"
    shutil.copytree(target, draft)
    edit("vocab.json", swap_tokens)(draft)
    assert loud(check(target, draft, quick=True)) == ["HS301"]
    shutil.copy(target / "vocab.json", draft)
    lines = (draft / "merges.txt").read_text(encoding="utf-8").splitlines()
    (draft / "merges.txt").write_text("\n".join([*lines[:1], *lines[2:]]), encoding="utf-8")
    assert loud(check(target, draft, quick=True)) == ["HS304"]


def test_a_draft_larger_than_its_target(checkpoints: Callable[..., Path]) -> None:
    report = check(checkpoints("qwen3_5_text"), checkpoints("qwen3_5_text", intermediate_size=256), quick=True)
    assert loud(report) == ["HS407"], told(report)


def test_a_prediction_head_that_is_not_announced(spoilt: Callable[..., Path]) -> None:
    head = tensors(lambda t: t.update({"mtp.fc.weight": torch.zeros(64, 128)}))
    report = check(spoilt("qwen3_5_text", head))
    assert not loud(report) and "HS114" in report.codes, told(report)
    assert report.target["prediction_head"]


def test_a_prediction_head_that_is_announced_and_there(spoilt: Callable[..., Path]) -> None:
    head = both(tensors(lambda t: t.update({"mtp.fc.weight": torch.zeros(64, 128)})), config(mtp_num_hidden_layers=1))
    report = check(spoilt("qwen3_5_text", head))
    assert not loud(report) and not {"HS113", "HS114"} & set(report.codes), told(report)


def test_quantised_weights_are_compared_by_name(spoilt: Callable[..., Path]) -> None:
    def pack(content: dict) -> None:
        name = "model.layers.0.mlp.up_proj"
        content[f"{name}.qweight"] = content.pop(f"{name}.weight").to(torch.int8)[:8]
        content[f"{name}.scales"] = torch.ones(4)

    spoil = both(tensors(pack), config(quantization_config={"quant_method": "gptq", "bits": 4}))
    report = check(spoilt("qwen3_5_text", spoil))
    assert not loud(report) and "HS406" in report.codes, told(report)


def test_state_types_and_ties_of_a_pair(spoilt: Callable[..., Path], checkpoints: Callable[..., Path]) -> None:
    draft = spoilt("lfm2", config(mamba_ssm_dtype="float64"))
    report = check(checkpoints("nemotron_h"), draft, quick=True)
    assert {"HS402", "HS403", "HS409"} <= set(report.codes), told(report)


def test_an_unknown_layer_is_named(spoilt: Callable[..., Path]) -> None:
    """A model type that nothing here knows, with names that nothing here knows."""

    def change(content: dict) -> None:
        for name in [n for n in content if ".layers.0." in n]:
            content[name.replace("linear_attn", "thing").replace("mlp", "stuff")] = content.pop(name)
        for name in [n for n in content if ".layers.0." in n]:
            if any(part in name for part in ("thing", "stuff")):
                content[f"model.layers.0.other{len(content)}.w"] = content.pop(name)

    report = check(spoilt("qwen3_5_text", both(tensors(change), config(model_type="own_hybrid"))))
    assert loud(report) == ["HS110"] and "HS109" in report.codes, told(report)


@pytest.mark.parametrize(
    "name",
    ["layers_block_type permuted", "an expert dropped", "another width", "a transposed tensor", "a tensor renamed"],
)
def test_laying_equal_layers_in_once_says_the_same(
    name: str, spoilt: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, spoil, *_ = ALONE[name]
    folder = spoilt(family, spoil)
    whole = check(folder)
    monkeypatch.setattr("hybridspec.checker.expected.MANY", 0)
    assert [f.to_dict() for f in check(folder).findings] == [f.to_dict() for f in whole.findings]


@pytest.mark.parametrize(
    "name", ["qwen3_next", "jamba", "nemotron_h", "kimi_linear", "zamba2", "inkling2_text", "recurrent_gemma", "zaya"]
)
def test_equal_layers_are_laid_in_once_without_a_finding(
    name: str, checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridspec.checker.expected.MANY", 0)
    assert not set(check(checkpoints(name)).codes) - ENGINE_NOTES


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - CLAMPED))
def test_a_clean_checkpoint_of_every_family_and_a_pair_of_it_give_nothing(
    name: str, checkpoints: Callable[..., Path]
) -> None:
    folder = checkpoints(name)
    report = check(folder)
    assert not set(report.codes) - ENGINE_NOTES, told(report)
    layers = report.target["layers"]
    assert layers["first_difference"] is None and layers["tensors"] and None not in layers["tensor_kinds"]
    pair = check(folder, folder, quick=True)
    # A draft as large as its target is worth a note.
    assert set(pair.codes) <= {"HS407"}, told(pair)
    assert pair.draft["tokenizer"]["against_target"]["same"] is True


@pytest.mark.parametrize("other", ["qwen3", "jamba", "nemotron_h"])
def test_a_clean_pair_of_two_families(other: str, checkpoints: Callable[..., Path]) -> None:
    report = check(checkpoints("qwen3_5_text"), checkpoints(other), quick=True)
    assert set(loud(report)) <= {"HS404", "HS407"}, told(report)
    assert "HS403" in report.codes


def test_reading_needs_no_permission_to_write(checkpoints: Callable[..., Path]) -> None:
    """Nothing is written beside a checkpoint."""
    folder = checkpoints("qwen3_5_text")
    before = sorted(os.listdir(folder))
    check(folder)
    assert sorted(os.listdir(folder)) == before


def test_read_json_of_a_clean_checkpoint_is_untouched(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    """The helpers of this file really spoil copies, not the shared checkpoint."""
    shared = read_json(checkpoints("lfm2") / CONFIG)
    write_json(tmp_path / CONFIG, shared)
    config(layer_types=None)(tmp_path)
    assert "layer_types" in read_json(checkpoints("lfm2") / CONFIG)
