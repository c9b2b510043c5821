"""Workloads from every kind of source: what each holds, what its options do, and what bad input is told."""

import json
import shutil
import socket
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec import embedded
from hybridspec.errors import InputError
from hybridspec.tuning.workloads.sources import (
    Prompt,
    WorkloadSource,
    choose_prompts,
    find_workload,
    find_workloads,
    load_workload,
)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def refusal(spec: str | WorkloadSource) -> str:
    with pytest.raises(InputError) as error:
        find_workload(spec)
    return str(error.value)


def test_csv_holds_quoted_lines_and_names_rows_by_where_they_begin(tmp_path: Path) -> None:
    path = write(tmp_path, "faq.csv", 'question,id\r\n"one,\r\ntwo",a\r\n\r\nthree,\r\n')
    workload = find_workload(f"{path}:column=question")
    assert workload.prompts == (Prompt("a", "one,\r\ntwo"), Prompt("faq-5", "three"))


def test_a_csv_field_may_be_a_long_document(tmp_path: Path) -> None:
    path = write(tmp_path, "long.csv", "prompt\n" + "x" * 200_000 + "\n")
    assert len(load_workload(path).prompts[0].text) == 200_000


def test_tabs_separate_tsv(tmp_path: Path) -> None:
    assert load_workload(write(tmp_path, "a.tsv", "prompt\tb\na,b\tc\n")).prompts == (Prompt("a-2", "a,b"),)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prompt,id\nx,1\ny\n", ["line 3", "1 fields", "2 columns"]),
        ('prompt,id\nx,1\n"y\n', ["line 3", "not valid CSV"]),
        ("question,answer\nx,y\n", ["line 2", '"prompt"', "question, answer", "column="]),
        ("prompt;id\nx;1\n", ["prompt;id"]),
        ("prompt,prompt\nx,y\n", ["line 1", "'prompt'"]),
        ("prompt,id\nx,1\n ,2\n", ["line 3", '"prompt" is empty']),
        ("prompt,id\nx,1\ny,2\nz,1\n", ["line 4", "'1'", "line 2", "number_rows"]),
        ("prompt,id\n", ["no prompts"]),
        ("", ["no prompts"]),
    ],
)
def test_bad_csv_names_file_line_and_field(tmp_path: Path, text: str, expected: list[str]) -> None:
    path = write(tmp_path, "bad.csv", text)
    message = refusal(str(path))
    assert str(path) in message
    assert all(part in message for part in expected), message


def test_text_holds_one_prompt_in_each_line_or_between_separators(tmp_path: Path) -> None:
    lines = write(tmp_path, "lines.txt", "one\n\ntwo\r\n")
    assert [p.text for p in load_workload(lines).prompts] == ["one", "two"]
    blocks = load_workload(
        write(tmp_path, "blocks.txt", "def f():\n    return 1\n\n# end\n---\n\n--- not this\n---\n---\n")
    )
    assert blocks.prompts == (
        Prompt("blocks-1", "def f():\n    return 1\n\n# end"),
        Prompt("blocks-6", "--- not this"),
    )


@settings(max_examples=40)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n")), max_size=8))
def test_text_prompts_come_back_as_they_were(texts: list[str]) -> None:
    texts = [t for t in texts if t.strip() and t.strip() != "---" and t[0] != "\ufeff"]
    with TemporaryDirectory() as folder:
        path = write(Path(folder), "t.txt", "\n---\n".join(["first", *texts, ""]))
        assert [p.text for p in load_workload(path).prompts] == ["first", *texts]


def test_a_folder_of_text_files_has_a_prompt_in_each(tmp_path: Path) -> None:
    write(tmp_path, "b.txt", "two\nlines")
    write(tmp_path, "a.txt", "one")
    workload = find_workload(f"{tmp_path}:name=notes")
    assert (workload.name, workload.prompts) == ("notes", (Prompt("a", "one"), Prompt("b", "two\nlines")))


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("latin.jsonl", b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n', "line 2: not UTF-8 text: byte 0xe9"),
        ("mixed.csv", "prompt\ncafé\n".encode() + b"caf\xe9\n", "line 3: not UTF-8"),
        ("wide.txt", "one".encode("utf-16"), "UTF-16"),
        ("list.json", b'[{"prompt": "a"}]', "JSON array"),
        ("what.xlsx", b"PK", "unknown kind"),
        (
            "half.jsonl",
            b'{"prompt": "a"}\n{"prompt": "b\\ud83d"}',
            'line 2: field "prompt" holds half a surrogate pair',
        ),
        ("none.jsonl", b'{"prompt": null}', 'line 1: field "prompt" is empty'),
    ],
)
def test_what_is_not_text_names_its_line(tmp_path: Path, name: str, data: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(data)
    assert expected in refusal(str(tmp_path / name))


def test_null_ids_are_row_numbers_and_ids_may_be_numbered_over(tmp_path: Path) -> None:
    path = write(
        tmp_path, "m.jsonl", '{"prompt": "a", "id": null}\n{"prompt": "b", "id": 7}\n{"prompt": "c", "id": 7}\n'
    )
    assert "line 3" in refusal(str(path))
    assert [p.id for p in find_workload(f"{path}:number_rows=true").prompts] == ["m-1", "m-2", "m-3"]


def test_unusable_rows_are_left_out_when_asked(tmp_path: Path) -> None:
    path = write(tmp_path, "m.jsonl", '{"prompt": "a"}\n{"prompt": ""}\n{"prompt": null}\n{"prompt": 3}\n')
    workload = find_workload(f"{path}:skip-unusable=true")
    assert ([p.text for p in workload.prompts], workload.left_out) == (["a"], 3)
    path = write(tmp_path, "n.jsonl", '{"prompt": ""}\n{"prompt": " "}\n')
    message = refusal(f"{path}:skip_unusable=true")
    assert "none of its 2 rows" in message and 'line 1: field "prompt" is empty' in message


def test_messages_are_read_in_every_spelling_and_answers_left_out(tmp_path: Path) -> None:
    question = {"role": "user", "content": "Why?"}
    spellings = [
        [question],
        [question, {"role": "assistant", "content": "So."}],
        [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}],
        [{"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}], "name": None}],
        json.dumps([question]),
    ]
    path = write(tmp_path, "chat.jsonl", "\n".join(json.dumps({"messages": s}) for s in spellings))
    assert [p.messages for p in load_workload(path).prompts] == [(question,)] * 5
    assert find_workload(f"{write(tmp_path, 'q.txt', 'Why?')}:chat=true").prompts[0].messages == (question,)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([], "is not a list of messages"),
        ("Why?", "list of messages in JSON"),
        (["Why?"], "message 1 is not an object"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], 'message 2 has no "role"'),
        ([{"role": "user"}], 'message 1 has no text as its "content"'),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "message 1 has a part that is not text"),
        ([{"role": "assistant", "content": "a"}], "nothing but the assistant's"),
        ([{"role": "user", "content": "\ud800"}], "surrogate"),
    ],
)
def test_bad_messages_name_the_line_and_the_message(tmp_path: Path, value: object, expected: str) -> None:
    path = write(tmp_path, "chat.jsonl", json.dumps({"messages": value}))
    message = refusal(str(path))
    assert f'{path}, line 1: field "messages"' in message and expected in message


def test_options_of_a_spec_are_those_of_the_source() -> None:
    spec = "C:/d/faq.csv:column=question,max-new-tokens=128,temperature=0.7,name=faq,prompts=8,seed=3,chat=True"
    assert WorkloadSource.parse(spec) == WorkloadSource(
        "C:/d/faq.csv", "faq", "question", True, prompts=8, seed=3, max_new_tokens=128, temperature=0.7
    )
    assert WorkloadSource.parse("a/b:split=train[:10]").split == "train[:10]"
    assert WorkloadSource.parse("a:b.jsonl").source == "a:b.jsonl"
    assert WorkloadSource.parse("x.csv:column=1").column == "1"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("colum=a", "Did you mean 'column'?"),
        ("zzz=a", "Known are source, name"),
        ("column=", "write key=value"),
        ("column=a,b", "'b' is no option"),
        ("prompts=many", "prompts must be a whole number, not 'many'"),
        ("prompts=0", "prompts must be at least 1, not 0"),
        ("max_new_tokens=1", "at least 2"),
        ("temperature=-1", "at least 0"),
        ("temperature=nan", "finite"),
        ("chat=yes", "true or false"),
    ],
)
def test_bad_options_say_which_exist(options: str, expected: str) -> None:
    message = refusal(f"json:{options}")
    assert f"json:{options}" in message and expected.lower() in message.lower()


def test_options_reach_the_workload() -> None:
    workload = find_workload("json:prompts=3,seed=1,max_new_tokens=9,temperature=0.5,name=mine")
    assert (workload.name, workload.count, workload.seed) == ("mine", 3, 1)
    assert (workload.max_new_tokens, workload.temperature) == (9, 0.5)
    assert len(workload.choose(20)) == 3
    assert [p.id for p in find_workload("json").choose(2)] == ["json-000", "json-012"]


def test_two_workloads_of_one_name_are_refused() -> None:
    with pytest.raises(InputError, match="two workloads are called 'json'.*name="):
        find_workloads(["json", "json:prompts=2"])
    assert [w.name for w in find_workloads(["json", "json:name=again"])] == ["json", "again"]


@given(st.integers(1, 30), st.integers(1, 40), st.none() | st.integers(0, 5))
def test_chosen_prompts_are_distinct_in_order_and_repeatable(length: int, count: int, seed: int | None) -> None:
    prompts = [Prompt(str(i), "x") for i in range(length)]
    chosen = choose_prompts(prompts, count, seed)
    numbers = [int(p.id) for p in chosen]
    assert len(numbers) == min(count, length) and numbers == sorted(set(numbers))
    assert choose_prompts(prompts, count, seed) == chosen


def test_seeds_draw_every_prompt_equally_often() -> None:
    prompts = [Prompt(str(i), "x") for i in range(6)]
    counts = Counter(p.id for seed in range(600) for p in choose_prompts(prompts, 2, seed))
    assert len(counts) == 6 and all(150 <= count <= 250 for count in counts.values())


def test_parquet_holds_text_and_messages(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    messages = [[{"role": "user", "content": "a", "tool": None}], [{"role": "user", "content": "b", "tool": "t"}]]
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"question": ["x", None], "messages": messages}), path)
    assert [p.messages[0]["content"] for p in load_workload(path).prompts] == ["a", "b"]
    assert f'{path}, row 2: field "question" is empty' in refusal(f"{path}:column=question")
    assert "question, messages" in refusal(f"{path}:column=answer")
    path.write_bytes(b"no table")
    assert f"{path}: cannot be read as Parquet" in refusal(str(path))


def test_data_sets_come_from_folders_and_the_local_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    splits = datasets.DatasetDict(
        {
            "train": datasets.Dataset.from_dict({"prompt": ["a", "b"]}),
            "test": datasets.Dataset.from_dict({"prompt": ["c"]}),
        }
    )
    saved = tmp_path / "saved"
    splits.save_to_disk(str(saved))
    assert [p.text for p in find_workload(f"{saved}:split=train").prompts] == ["a", "b"]
    assert "train, test" in refusal(str(saved))
    assert "no split 'dev'" in refusal(f"{saved}:split=dev")
    splits["test"].save_to_disk(str(tmp_path / "one"))
    assert find_workload(str(tmp_path / "one")).prompts == (Prompt("one-1", "c"),)
    files = tmp_path / "files"
    files.mkdir()
    write(files, "train.jsonl", '{"prompt": "d"}\n')
    assert [p.text for p in find_workload(str(files)).prompts] == ["d"]
    called: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *host, **_: called.append(host))
    message = refusal("nobody/nothing")
    assert not called
    assert "nobody/nothing: no such data set in the local cache" in message and "nothing is downloaded" in message


def test_a_data_set_that_was_loaded_once_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    file = write(tmp_path, "t.jsonl", '{"prompt": "a", "id": 5}\n{"prompt": "b", "id": 6}\n')
    datasets.load_dataset("json", data_files=str(file), cache_dir=str(cache))
    # What the library leaves in its cache when it loads owner/thing from the hub: the same files under that name.
    prepared = next(cache.glob("json/*/*/*/dataset_info.json")).parent
    named = cache / "owner___thing" / "default" / prepared.parent.name / prepared.name
    shutil.copytree(prepared, named)
    (named / "json-train.arrow").rename(named / "thing-train.arrow")
    workload = find_workload("owner/thing:split=train")
    assert (workload.name, workload.prompts) == ("thing", (Prompt("5", "a"), Prompt("6", "b")))
    assert "dev" in refusal("owner/thing:split=dev")


def test_data_sets_without_the_library_say_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    assert "pip install 'hybridspec[datasets]'" in refusal("owner/name")
    assert "pip install 'hybridspec[datasets]'" in refusal(str(write(tmp_path, "t.parquet", "x")))


def test_embedded_names_win_and_unknown_ones_list_them() -> None:
    assert find_workload("json").name == "json"
    assert all(name in refusal("jsno") for name in embedded.workload_files())
