"""Fills the parts of these pages that are written elsewhere: findings, profile fields, the command line.

    python docs/generate.py

What stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` is replaced; the rest of a page is written by
hand. A test fails when a page is out of date.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
#: First digit of a finding's code -> what it is about.
GROUPS = {
    "0": "Files",
    "1": "Layers and tensors",
    "2": "One tokenizer",
    "3": "Two tokenizers",
    "4": "The pair",
    "5": "Memory",
    "6": "Engines",
    "7": "Runs of the models",
}


def findings() -> str:
    """Every code that ``hybridspec check`` can report, by group."""
    from hybridspec.checkpoints.codes import CODES

    lines = []
    for digit, group in GROUPS.items():
        codes = {code: entry for code, entry in CODES.items() if code[2] == digit}
        lines += [f"## {group}", "", "| code | severity | finding |", "|---|---|---|"]
        lines += [f"| [{code}](#{code.lower()}) | {e.severity} | {plain(e.title)} |" for code, e in codes.items()]
        lines.append("")
        for code, e in codes.items():
            status = " Exit status 2." if e.unreadable else ""
            lines += [f"### {code}", "", f"**{plain(e.title)}** ({e.severity}). {plain(e.long)}", ""]
            lines += [f"*Why it matters:* {plain(e.why)}{status}", "", f"*What to do:* {plain(e.action)}", ""]
    return "\n".join(lines)


def profile_fields() -> str:
    """Every field of a profile, by the object that holds it."""
    from hybridspec.tuning.profile import Profile

    whole = Profile.model_json_schema()
    lines = fields("Profile", whole)
    for name, definition in whole["$defs"].items():
        lines += fields(title_of(name), definition)
    return "\n".join(lines)


def title_of(record: str) -> str:
    """``WorkloadProfile`` as Workload, ``AcceptanceCurve`` as Acceptance; the model is the target."""
    return {"ModelRecord": "Target"}.get(record, re.findall("[A-Z][a-z]+", record)[0])


def fields(title: str, node: dict[str, Any]) -> list[str]:
    """A table of an object's fields, and one of each object that stands in it."""
    required = node.get("required", ())
    lines = [f"## {title}", "", "| field | type | always there | what it is |", "|---|---|---|---|"]
    inner = []
    for name, field in rows(node):
        always = "yes" if name in required else "no"
        lines.append(f"| `{name}` | {kind(field)} | {always} | {field['description']} |")
        for part in objects(field):
            inner += fields(f"{title}: `{name}`", part)
    return [*lines, "", *inner]


def rows(node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from node.get("properties", {}).items()


def objects(field: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Objects with fields of their own that are written out inside ``field``."""
    for part in (field, field.get("items", {}), field.get("additionalProperties", {}), *field.get("anyOf", ())):
        if isinstance(part, dict) and "properties" in part:
            yield part


def kind(field: dict[str, Any]) -> str:
    """The type of a field in words."""
    if "$ref" in field:
        name = title_of(field["$ref"].rpartition("/")[2]).lower()
        return f"[{name}](#{name})"
    if "const" in field:
        return f"always {json.dumps(field['const'])}"
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if "anyOf" in field:
        return " or ".join(kind(part) for part in field["anyOf"])
    if "allOf" in field:
        return " and ".join(kind(part) for part in field["allOf"])
    types = field["type"] if isinstance(field["type"], list) else [field["type"]]
    more = field.get("additionalProperties")
    if types == ["object"] and isinstance(more, dict):
        return f"object of {kind(more)}"
    if types == ["array"] and field.get("items"):
        return f"array of {kind(field['items'])}"
    return " or ".join(types)


def commands() -> str:
    """Every command with its options."""
    import typer.main

    from hybridspec.cli.app import app

    return "\n".join(described(typer.main.get_command(app), "hybridspec"))


def described(command: Any, name: str) -> list[str]:
    text = plain(command.help or "").replace("  Example: ", "\n\nExample: ")
    text, *examples = re.split(r"\n*Example: ", text)
    lines = [f"## {name}", "", text.strip(), ""]
    for example in examples:
        lines += [f"Example: `{example.strip()}`", ""]
    shown = [p for p in command.params if "--help" not in p.opts and "completion" not in p.name]
    if shown:
        lines += ["| argument or option | what it does | default |", "|---|---|---|"]
        lines += [f"| {spelled(p)} | {plain(p.help or '')} | {default(p)} |" for p in shown]
        lines.append("")
    for sub, inner in getattr(command, "commands", {}).items():
        lines += described(inner, f"{name} {sub}")
    return lines


def spelled(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    return ", ".join(f"`{word}`" for word in [*parameter.opts, *parameter.secondary_opts])


def default(parameter: Any) -> str:
    value = parameter.default
    if callable(value) or value is None or value is False or parameter.show_default is False:
        return ""
    return f"`{value}`"


def plain(text: str) -> str:
    """One line that Markdown shows as it is: no markup by accident."""
    return re.sub(r"([<>|*])", r"\\\1", " ".join(text.split(" "))).replace("\\*\\*", "**")


PARTS: dict[str, Callable[[], str]] = {"findings": findings, "profile": profile_fields, "commands": commands}


def filled(page: str, name: str, text: str) -> str:
    """``page`` with its part ``name`` replaced.

    Raises:
        ValueError: it has no such part.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"a page must have one {begin} and one {end}")
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{rest.partition(end)[2]}"


def pages() -> dict[Path, str]:
    """Each page as it should be."""
    return {
        path: filled(path.read_text(encoding="utf-8"), name, make())
        for name, make in PARTS.items()
        for path in [HERE / f"{name}.md"]
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
