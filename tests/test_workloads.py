"""Workload files: what loads, and what a malformed one is told."""

import json
from pathlib import Path

import pytest

from hybridspec.embedded import workload_files
from hybridspec.errors import InputError
from hybridspec.tuning.workloads.sources import Prompt, choose_prompts, find_workload, load_workload


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_prompts_and_ids_are_read_and_blank_lines_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "one", "id": "a"}\n\n{"prompt": "two", "extra": [1]}\n')
    workload = load_workload(path)
    assert workload.name == "mine"
    assert workload.prompts == (Prompt("a", "one"), Prompt("mine-3", "two"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"prompt": "one"}\n{"prompt": \n', "line 2"),
        ('{"prompt": "one"}\n["two"]\n', "line 2"),
        ('{"prompt": ""}\n', "line 1"),
        ('{"prompt": 3}\n', "line 1"),
        ('{"text": "one"}\n', '"prompt"'),
        ("", "no prompts"),
        ("\n\n", "no prompts"),
    ],
)
def test_malformed_files_name_the_file_and_the_line(tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputError) as error:
        load_workload(path)
    assert str(path) in str(error.value)
    assert expected in str(error.value)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="UTF-8"):
        load_workload(path)


def test_unknown_name_lists_the_embedded_ones() -> None:
    with pytest.raises(InputError) as error:
        find_workload("jsno")
    assert all(name in str(error.value) for name in workload_files())


def test_missing_file_is_named() -> None:
    with pytest.raises(InputError, match=r"nowhere\.jsonl"):
        find_workload("nowhere.jsonl")


def test_chosen_prompts_spread_over_the_file() -> None:
    prompts = [Prompt(str(i), "x") for i in range(20)]
    assert [p.id for p in choose_prompts(prompts, 4)] == ["0", "5", "10", "15"]
    assert choose_prompts(prompts, 50) == prompts


def test_lines_end_at_line_feeds_only_and_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    texts = ["a\u2028b", "c\u0085d", "e"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert [p.text for p in load_workload(path).prompts] == texts


@pytest.mark.parametrize("line", ["[" * 100_000, '{"prompt": ' + "9" * 5000 + "}"])
def test_json_that_breaks_the_parser_names_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text('{"prompt": "x"}\n' + line)
    with pytest.raises(InputError, match=r"deep\.jsonl, line 2"):
        load_workload(path)


def test_a_folder_is_no_workload(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="folder"):
        load_workload(tmp_path)
