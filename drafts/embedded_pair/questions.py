"""The chat domain: questions whose answers stand in a dictionary, in a book of facts and in docstrings."""

import ast
import html
import random
import re
from collections.abc import Iterator
from pathlib import Path

from hybridspec.drafts.embedded_pair.domains import Document, factbook_countries, python_files
from hybridspec.drafts.embedded_pair.readers import dictd_entries
from hybridspec.drafts.embedded_pair.sources import SOURCES, source_named
from hybridspec.drafts.embedded_pair.tasks import chat_document

LONGEST_DEFINITION = 900
LONGEST_FACT = 1200
LARGEST_MODULE = 200_000

DEFINITION_QUESTIONS = (
    'What does the hacker term "{}" mean?',
    'Define "{}".',
    'Explain the jargon word "{}".',
)
FACT_QUESTIONS = {
    "Capital": "What is the capital of {}?",
    "Population": "What is the population of {}?",
    "Climate": "Describe the climate of {}.",
    "Terrain": "What is the terrain of {} like?",
    "Natural resources": "Which natural resources does {} have?",
    "Languages": "Which languages are spoken in {}?",
    "Religions": "What are the religions of {}?",
    "Economy - overview": "Give an overview of the economy of {}.",
    "Background": "Tell me about the history of {}.",
    "Location": "Where is {}?",
    "Government type": "What type of government does {} have?",
    "Industries": "What are the main industries of {}?",
    "Currency (code)": "What is the currency of {}?",
    "Exports - commodities": "What does {} export?",
    "Area": "How large is {}?",
}


def definitions(raw: Path) -> Iterator[Document]:
    for word, entry in dictd_entries(source_named("dict-jargon").root(raw) / "jargon"):
        text = re.sub(r"\s+", " ", entry).strip()[:LONGEST_DEFINITION]
        whole_sentences = text[: text.rfind(".") + 1] or text
        question = random.Random(word).choice(DEFINITION_QUESTIONS).format(word)
        yield Document(f"jargon/{word}", chat_document(question, whole_sentences))


def fact_text(fact: object) -> str:
    """A fact and its parts on one line; the part named ``text`` goes without its name."""
    if isinstance(fact, dict):
        return "; ".join(
            fact_text(part) if name == "text" else f"{name}: {fact_text(part)}" for name, part in fact.items()
        )
    return str(fact)


def country_name(sections: dict) -> str | None:
    try:
        name = fact_text(sections["Government"]["Country name"]["conventional short form"])
    except (KeyError, TypeError):
        return None
    return None if name in ("", "none") else name


def facts(raw: Path) -> Iterator[Document]:
    for _, sections in factbook_countries(raw):
        name = country_name(sections)
        if name is None:
            continue
        for section in sections.values():
            for title, fact in section.items() if isinstance(section, dict) else ():
                if title in FACT_QUESTIONS:
                    answer = html.unescape(re.sub("<[^>]+>", " ", fact_text(fact)))[:LONGEST_FACT]
                    yield Document(f"factqa/{name}/{title}", chat_document(FACT_QUESTIONS[title].format(name), answer))


def docstrings(raw: Path) -> Iterator[Document]:
    for source in SOURCES:
        root = source.root(raw)
        if "chat" not in source.domains or not root.is_dir():
            continue
        # The standard library's modules go by their own names, a package's by the package's.
        named_from = root.parent if source.kind == "pypi" else root
        for path in python_files(root, {"test", "tests", "idlelib", "lib2to3"}):
            if path.stat().st_size <= LARGEST_MODULE:
                module = ".".join(path.relative_to(named_from).with_suffix("").parts)
                yield from module_docstrings(module, path.read_text("utf-8", "ignore"))


def module_docstrings(module: str, text: str) -> Iterator[Document]:
    """One question for each public function and class of ``text`` with a docstring of 60 to 1,500 characters."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            docstring = ast.get_docstring(node)
            if docstring and 60 < len(docstring) < 1500:
                question = f"What does `{node.name}` in the Python module `{module}` do?"
                yield Document(f"docqa/{module}.{node.name}", chat_document(question, docstring))


def chat(raw: Path) -> Iterator[Document]:
    yield from definitions(raw)
    yield from facts(raw)
    yield from docstrings(raw)
