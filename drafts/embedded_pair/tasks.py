"""Instruction documents made from the corpus itself: rename a parameter, repeat a document, summarise by its first
sentences.

Without them the small target never sees an instruction that asks it to copy, and the edit, long-context and summary
workloads would measure babble.
"""

import random
import re
from collections.abc import Iterator, Sequence

from hybridspec.drafts.embedded_pair.tokenizer import ASSISTANT, USER

FUNCTION = re.compile(r"(?m)^def (\w+)\((\w+)[^\n]*\n(?:[ ]{4}.*\n|\n){4,20}")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def chat_document(question: str, answer: str) -> str:
    return f"{USER}\n{question.strip()}\n{ASSISTANT}\n{answer.strip()}"


def rename_tasks(code: Sequence[str]) -> Iterator[str]:
    for document in code:
        for match in FUNCTION.finditer(document):
            function, argument = match.group(0).rstrip(), match.group(2)
            if argument in ("self", "cls", "args", "kwargs") or len(function) > 1000:
                continue
            renamed = re.sub(rf"\b{argument}\b", f"{argument}_value", function)
            question = (
                f"Rename the parameter `{argument}` to `{argument}_value` in this function "
                f"and print the whole function.\n\n{function}"
            )
            yield chat_document(question, renamed)


def repeat_tasks(texts: Sequence[str], count: int, rng: random.Random) -> Iterator[str]:
    for _ in range(count):
        length = rng.choice((200, 300, 400, 600))
        parts = [text[:length] for text in rng.sample(texts, rng.randint(1, 4))]
        asked = rng.randrange(len(parts))
        body = "\n\n".join(f"[Document {i + 1}]\n{part}" for i, part in enumerate(parts))
        question = f"{body}\n\nRepeat the beginning of document {asked + 1} word for word."
        yield chat_document(question, parts[asked][:300])


def summary_tasks(texts: Sequence[str], count: int, rng: random.Random) -> Iterator[str]:
    for _ in range(count):
        text = rng.choice(texts)[: rng.randint(500, 1800)]
        sentences = [" ".join(s.split()) for s in SENTENCE_END.split(text) if 40 < len(s) < 300]
        if len(sentences) >= 3:
            yield chat_document(f"{text}\n\nSummarise the text above in three sentences.", " ".join(sentences[:3]))


def task_documents(code: Sequence[str], texts: Sequence[str], seed: int = 0) -> list[str]:
    """Shuffled instruction documents, every one built only from the training documents given."""
    rng = random.Random(seed)
    texts = [text for text in texts if len(text) > 300]
    documents = [*rename_tasks(code), *repeat_tasks(texts, 3000, rng), *summary_tasks(texts, 2500, rng)]
    rng.shuffle(documents)
    return documents
