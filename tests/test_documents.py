"""README, CONTRIBUTING and docs/ are true: their blocks run as printed, their links lead somewhere, and what other
files say better is taken from there.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.version import Version
from transformers import __version__ as transformers_version

from hybridspec.runtime.families import families
from hybridspec.tuning.profile import Profile
from tests.document_commands import options
from tests.document_runs import EXAMPLES, run_document, run_hybridspec, run_outside, script
from tests.documents import ROOT, DocumentError, broken_links, documents, read
from tests.profiles import profile


def program(name: str) -> ModuleType:
    """A script of docs/ as a module."""
    path = ROOT / "docs" / name
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DOCUMENTS = documents()
NAMES = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]
#: What a fresh checkout has and the blocks may name.
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "hybridspec-tune")


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that ``hybridspec tune`` wrote, in a few seconds."""
    out = tmp_path_factory.mktemp("tuned") / "hybridspec-tune"
    small = ["-w", "json", "--prompts", "1", "--max-new-tokens", "8", "--max-k", "2", "--trials", "2"]
    status, _, err = run_hybridspec(["tune", *small, "-d", "prompt-lookup", "-l", "fixed", "--out", str(out)])
    assert status == 0, err
    return out


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with this project's files in it."""
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in ("configs", "hybridspec-tune"):
            (tmp_path / path.name).symlink_to(path)
    # Their relative paths lead out of their folder.
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    return tmp_path


@pytest.fixture
def scratch(checkout: Path, tuned: Path) -> Path:
    """Where a reader works, after a first tuning run."""
    shutil.copytree(tuned, checkout / "hybridspec-tune")
    return checkout


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_blocks_do_what_they_say(path: Path, scratch: Path, pytestconfig: pytest.Config) -> None:
    run_document(read(path), scratch, pytestconfig)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of an environment that has everything but this project's own command, which documents install."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    inside = subprocess.run(
        [folder / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        capture_output=True,
        text=True,
        check=True,
    )
    others = [p for p in [sysconfig.get_paths()["purelib"], *sys.path] if p.endswith("site-packages")]
    (Path(inside.stdout.strip()) / "others.pth").write_text("\n".join(dict.fromkeys(others)))
    path = f"{folder / 'bin'}:{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
    return {"PATH": path, "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_blocks_run_where_the_project_was_just_installed(
    path: Path, tmp_path: Path, tuned: Path, fresh: dict[str, str]
) -> None:
    """The slow ones too, each in processes of its own."""
    work = tmp_path / "hybridspec"
    shutil.copytree(ROOT, work, ignore=LEFT_OUT)
    shutil.copytree(ROOT / ".ci", work / ".ci")
    if path.name != "README.md":
        shutil.copytree(tuned, work / "hybridspec-tune")
    subprocess.run(["pip", "install", "--quiet", "--no-deps", "."], cwd=work, env=os.environ | fresh, check=True)
    for block, program in script(read(path)):
        run_outside(block, program, work, fresh | {"PYTHONPATH": str(EXAMPLES)})


def test_python_in_a_checkout_finds_the_whole_package() -> None:
    """After an ordinary install, where nothing maps the folders of a checkout."""
    code = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'ditable' not in str(f)]; sys.path = ['', *sys.path];"
        "import hybridspec.drafts, hybridspec.tuning; print(hybridspec.drafts.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == ROOT / "drafts" / "__init__.py"


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_links_and_named_files_are_there(path: Path) -> None:
    assert not broken_links(read(path))


def test_every_page_is_reached_from_the_index() -> None:
    index = read(ROOT / "docs" / "README.md").links
    missing = [p.name for p in DOCUMENTS if p.parent.name == "docs" and p.name not in ("README.md", *index)]
    assert not missing
    assert "docs/README.md" in read(ROOT / "README.md").links


def test_every_option_is_written_about() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    missing = [f"{command} {option}" for command, option in options() if option not in text]
    assert [name for name in missing if "completion" not in name and "--help" not in name] == []
    assert all(command in text for command, _ in options())


def test_generated_parts_are_up_to_date() -> None:
    for path, text in program("generate.py").pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python docs/generate.py"


def test_the_figure_is_what_its_script_draws() -> None:
    figure = program("figures/rollback.py")
    assert figure.FILE.read_text(encoding="utf-8") == figure.drawing()


SCHEMA = Profile.model_json_schema()


def undescribed(value: Any, node: dict, where: str) -> Iterator[str]:
    """Fields of ``value`` that the schema ``node`` does not describe."""
    node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]] | node if "$ref" in node else node
    parts = [node, *node.get("allOf", ()), *node.get("anyOf", ())]
    parts += [SCHEMA["$defs"][p["$ref"].rpartition("/")[2]] for p in parts if "$ref" in p]
    known = {name: field for part in parts for name, field in part.get("properties", {}).items()}
    if isinstance(value, list):
        items = next((p["items"] for p in parts if "items" in p), {})
        for entry in value:
            yield from undescribed(entry, items, f"{where}[]")
    elif isinstance(value, dict):
        more = next((p["additionalProperties"] for p in parts if isinstance(p.get("additionalProperties"), dict)), None)
        for name, entry in value.items():
            if more is not None:
                yield from undescribed(entry, more, f"{where}.*")
            elif known and "description" not in known.get(name, {}):
                yield f"{where}.{name}"
            elif known:
                yield from undescribed(entry, known[name], f"{where}.{name}")


@pytest.mark.parametrize("made", ["written", "by hand"])
def test_every_field_of_a_profile_is_described(made: str, tuned: Path) -> None:
    found = json.loads((tuned / "profile.json").read_text()) if made == "written" else profile({}).to_dict()
    assert list(undescribed(found, SCHEMA, "profile")) == []
    assert list(undescribed({**found, "extra": 1}, SCHEMA, "profile")) == ["profile.extra"]


@pytest.mark.skipif(Version(transformers_version) < Version("5.24"), reason="the table is of the newest families")
def test_the_table_of_families_is_complete() -> None:
    """Every hybrid of the newest transformers stands in the row of its own mixer in docs/models.md."""
    page = (ROOT / "docs" / "models.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")]
    table = {cells[0].strip(): cells[-1] for cells in rows if len(cells) == 3}
    for family in families():
        mixer = family.mixers[0] if family.modes[0] == "tape" else "another"
        row = next((types for name, types in table.items() if mixer.lower() in name.lower()), "")
        assert f"`{family.model_type}`" in row, f"{family.model_type}: {mixer}"


BROKEN = {
    "a wrong option": ("```sh\nhybridspec tune --wokload json\n```", "exit status 2"),
    "a wrong option of a slow block": ("<!-- test: slow -->\n```sh\nhybridspec tune --wokload json\n```", "--wokload"),
    "a wrong value": ("<!-- test: slow -->\n```sh\nhybridspec tune --max-k many\n```", "--max-k"),
    "a wrong subcommand": ("<!-- test: slow -->\n```sh\nhybridspec exprt vllm\n```", "exprt"),
    "a wrong draft": ("<!-- test: slow -->\n```sh\nhybridspec tune -d prompt-lokup\n```", "prompt-lookup"),
    "a wrong option of a draft": ("<!-- test: slow -->\n```sh\nhybridspec tune -d mtp:size=3\n```", "size=3"),
    "a wrong rule": ("<!-- test: slow -->\n```sh\nhybridspec tune -l svp\n```", "svip"),
    "a wrong workload option": ("<!-- test: slow -->\n```sh\nhybridspec tune -w a.csv:colum=x\n```", "colum"),
    "no such settings": ("<!-- test: slow -->\n```sh\nhybridspec tune --config configs/none.toml\n```", "none.toml"),
    "a wrong engine argument": (
        "<!-- test: slow -->\n```sh\nhybridspec audit vllm X --max-lenght 3\n```",
        "max-lenght",
    ),
    "a wrong script option": ("<!-- test: slow -->\n```sh\npython -m benchmarks rollback --no\n```", "refused"),
    "no such script": ("<!-- test: slow -->\n```sh\npython benchmarks/none.py\n```", "no such script"),
    "no such module": ("<!-- test: slow -->\n```sh\npython -m hybridspec.none\n```", "no module"),
    "no such marker": ("<!-- test: parse, long -->\n```sh\npytest -m fast\n```", "fast"),
    "no such extra": ("<!-- test: parse, long -->\n```sh\npip install '.[none]'\n```", "none"),
    "the second of two commands": ("<!-- test: slow -->\n```sh\npip install . && hybridspec tun\n```", "tun"),
    "a command that nobody checks": ("<!-- test: slow -->\n```sh\nrm -rf x\n```", "rm"),
    "a command that cannot run here": ("```sh\npytest\n```", "mark the block"),
    "another exit status": ("<!-- test: exit 1 -->\n```sh\nhybridspec explain HS101\n```", "exit status 0, not 1"),
    "another output": (
        "```sh\nhybridspec explain HS101\n```\n\n<!-- test: output -->\n```text\nHS102 ...\n```",
        "HS101",
    ),
    "Python that fails": ("```python\n1 / 0\n```", "ZeroDivisionError"),
    "names of another block": ("```python\nx = 1\n```\n\n```python\nprint(x)\n```", "NameError"),
    "a wrong import": ("<!-- test: parse, long -->\n```python\nfrom hybridspec import Nothing\n```", "no Nothing"),
    "settings with a wrong key": ("```toml\ntargt = 'x'\n```", "targt"),
    "no JSON": ("```json\n{\n```", "Expecting"),
    "a broken formula": ("```math\n\\frac{1}{\n```", "frac"),
    "an unknown language": ("```ruby\nputs 1\n```", "ruby"),
    "no language": ("```\nhybridspec tune\n```", "language ''"),
    "an indented block": ("Text:\n\n    hybridspec tune\n", "indented"),
    "a mark that does not fit": ("<!-- test: continues -->\n```sh\nhybridspec tune\n```", "cannot be marked"),
    "no reason": ("<!-- test: parse -->\n```sh\nhybridspec tune\n```", "needs a reason"),
}


@pytest.mark.parametrize("mistake", BROKEN)
def test_a_mistake_in_a_block_is_found(mistake: str, checkout: Path, pytestconfig: pytest.Config) -> None:
    text, message = BROKEN[mistake]
    path = checkout / "page.md"
    path.write_text(text)
    with pytest.raises(DocumentError, match=message) as raised:
        run_document(read(path, checkout), checkout, pytestconfig)
    assert "page.md:" in str(raised.value)


def test_blocks_that_are_right_pass(checkout: Path, pytestconfig: pytest.Config) -> None:
    path = checkout / "page.md"
    path.write_text(
        "```python\nx = 1\n```\n\n<!-- test: continues -->\n```python\nprint(x, 'of', 2)\n```\n\n"
        "<!-- test: output -->\n```text\n1 ... 2\n```\n\n<!-- test: slow -->\n```sh\nA=1 hybridspec tune \\\n"
        "    --max-k 3 > log && hybridspec report  # a comment\n```\n\n<!-- test: file mine/prompts.jsonl -->\n"
        '```jsonl\n{"prompt": "x"}\n```\n\n```math\nS_n = \\sum_{j \\leq n} k_j u_j^\\top\n```\n'
    )
    run_document(read(path, checkout), checkout, pytestconfig)
    assert (checkout / "mine" / "prompts.jsonl").read_text() == '{"prompt": "x"}\n'


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("[a](none.md)", "none.md: no such file"),
        ("[a](#nowhere)", "#nowhere: no such anchor"),
        ("![a](none.svg)", "none.svg: no such file"),
        ('<img src="none.png">', "none.png: no such file"),
        ("See `hybridspec/none.py`.", "`hybridspec/none.py`: no such file"),
        ("## Two `words`, here\n\n[a](#two-words-here) [b](https://example.org) `hybridspec tune`", None),
    ],
)
def test_a_broken_link_is_found(text: str, broken: str | None, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(text)
    assert broken_links(read(path, tmp_path), tmp_path) == ([broken] if broken else [])
