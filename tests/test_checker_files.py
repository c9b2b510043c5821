"""Safetensors headers: ours reads what the library reads, and refuses everything else by a finding."""

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from hybridspec.checkpoints.files import LONGEST_HEADER, HeaderError, read_header, read_json
from tests.examples import examples

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
}
shapes = st.lists(st.integers(0, 4), max_size=3)


@examples(30)
@given(content=st.dictionaries(st.text(min_size=1, max_size=6), st.tuples(st.sampled_from(sorted(DTYPES)), shapes)))
def test_headers_say_what_the_library_says(content: dict, tmp_path_factory: pytest.TempPathFactory) -> None:
    content.pop("__metadata__", None)
    path = tmp_path_factory.mktemp("header") / "model.safetensors"
    save_file({n: torch.zeros(s, dtype=DTYPES[d]) for n, (d, s) in content.items()}, path, metadata={"format": "pt"})
    ours = read_header(path)
    with safe_open(path, framework="pt") as file:
        theirs = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        assert {name: (t.dtype, list(t.shape)) for name, t in ours.items()} == {
            name: (part.get_dtype(), part.get_shape()) for name, part in theirs.items()
        }
    assert all(t.nbytes == t.count * DTYPES[t.dtype].itemsize for t in ours.values())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("F32"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@examples(120)
@given(header=json_values, length=st.none() | st.integers(0, 2**64 - 1), rest=st.binary(max_size=20))
def test_any_header_is_read_or_refused(
    header: object, length: int | None, rest: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = json.dumps(header).encode()
    path = tmp_path_factory.mktemp("header") / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + rest)
    try:
        read_header(path)
    except HeaderError as error:
        assert error.code in {"HS006", "HS007"} and str(error)


@pytest.mark.parametrize("data", [b"", b"\x00" * 7, struct.pack("<Q", LONGEST_HEADER + 1) + b"{}"])
def test_no_header_at_all(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(HeaderError):
        read_header(tmp_path / "x")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"x"', "\x00", "{" * 10_000, "<<<<<<< HEAD"])
def test_broken_json_is_one_finding(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    findings: list = []
    assert read_json(tmp_path, "a.json", "target", findings) is None
    assert [finding.code for finding in findings] == ["HS003"]
    assert read_json(tmp_path, "absent.json", "target", findings) is None and len(findings) == 1
