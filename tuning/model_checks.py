"""What only running the models shows: cached decoding against one full pass, compiled against eager, repetition,
truncation, and acceptance on a few prompts.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridspec.checkpoints.findings import Finding, Subject
from hybridspec.decoding.loop import decode
from hybridspec.decoding.step import Statistics
from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.embedded import workload_files
from hybridspec.errors import HybridspecError
from hybridspec.runtime.runner import TargetRunner
from hybridspec.tuning.workloads.sources import load_workload

#: Cosine similarities: below the first is a warning, below the second an error.
GOOD, BAD = 0.99, 0.95
SHORT = 64
#: Positions that are compared at the end of the long text.
COMPARED = 32
BLOCK = 4
PROMPTS = ("chat_qa", "code", "prose")
NEW_TOKENS = 64
#: Share of the tokens in phrases that repeat back to back.
LOOPING = 0.5
LITTLE = 0.2
LONGEST_PHRASE = 24


class Measurements:
    """Rows for the report, and findings about them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.findings: list[Finding] = []

    def add(self, name: str, number: float | None, value: str, detail: str = "") -> None:
        self.rows.append({"name": name, "number": number, "value": value, "detail": detail})


def run_models(
    target: str | Path,
    draft: str | Path | None = None,
    length: int = 8192,
    progress: Callable[[str], object] = lambda text: None,
    compiled: bool = False,
) -> tuple[dict[str, Any], list[Finding]]:
    """Loads the models in fp32 on the CPU and measures.

    Args:
        length: tokens of the long text, clipped to each model's context.
        progress: told what is being done.
        compiled: compare ``torch.compile`` with eager execution too, which takes minutes on a CPU.

    Returns:
        ``{"measurements": [...]}`` with name, number, value and detail of each, and findings HS701 to HS706.
    """
    found = Measurements()
    runners: dict[Subject, TargetRunner] = {}
    for subject, path in (("target", target), ("draft", draft)):
        if path is None:
            continue
        progress(f"loading the {subject}")
        try:
            runners[subject] = TargetRunner.from_pretrained(path)
        except HybridspecError as error:
            found.findings.append(Finding("HS705", subject, " ".join(str(error).split())))
    for subject, runner in runners.items():
        try:
            _one_model(found, subject, runner, length, progress, compiled)
        except (HybridspecError, RuntimeError) as error:
            found.findings.append(Finding("HS705", subject, " ".join(str(error).split())[:300]))
    if len(runners) == 2:
        progress("drafting")
        try:
            _acceptance(found, runners["target"], runners["draft"])
        except (HybridspecError, RuntimeError) as error:
            found.findings.append(Finding("HS705", "pair", " ".join(str(error).split())[:300]))
    return {"measurements": found.rows}, found.findings


def _one_model(
    found: Measurements,
    subject: Subject,
    runner: TargetRunner,
    length: int,
    progress: Callable[[str], object],
    compiled: bool,
) -> None:
    text = sample_text()
    tokens = runner.encode(text)
    while len(tokens) < length and len(tokens) < runner.max_length:
        tokens = tokens + tokens
    _truncation(found, subject, runner, text)
    longest = min(length, runner.max_length)
    for name, count in dict.fromkeys([("short", min(SHORT, longest)), ("long", longest)]):
        if name == "long" and count <= SHORT:
            continue
        progress(f"{subject}: one pass over {count} tokens, and the same from a cache")
        similarity = cached_similarity(runner, tokens[:count])
        detail = f"{count} tokens, rollback {runner.rollback}, with rejected tokens between"
        _judge(found, "HS701", subject, f"{subject}: cached against full, {name}", similarity, detail)
    if compiled:
        progress(f"{subject}: compiling")
        _compiled(found, subject, runner, tokens[: min(SHORT, longest)])
    progress(f"{subject}: generating")
    _repetition(found, subject, runner)


def sample_text() -> str:
    """Prompts of the embedded workloads, one after the other."""
    return "\n\n".join(prompt.text for path in workload_files().values() for prompt in load_workload(path).prompts[:2])


def cosines(actual: Tensor, expected: Tensor) -> Tensor:
    """Cosine similarity of each row of two ``[T, vocab]`` tensors, in float64; 0 where a value is not finite."""
    actual, expected = actual.double(), expected.double()
    similarity = torch.nn.functional.cosine_similarity(actual, expected, dim=-1)
    whole = actual.isfinite().all(-1) & expected.isfinite().all(-1)
    return torch.where(whole, similarity, torch.zeros_like(similarity))


def cached_similarity(runner: TargetRunner, tokens: Sequence[int]) -> Tensor:
    """Of the last positions: one pass over all tokens against a session that takes them in blocks, each followed by
    two wrong tokens that are taken back.
    """
    compared = min(COMPARED, len(tokens) // 2)
    full = last_logits(runner, tokens, compared)
    rows = []
    first = len(tokens) - compared
    with runner.start(tokens[: first + 1]) as session:
        for start in range(first, len(tokens), BLOCK):
            block = list(tokens[start : start + BLOCK])
            wrong = [(token + 1) % runner.vocab_size for token in block[:2]]
            wrong = wrong if session.room >= len(block) + len(wrong) else []
            rows.append(session.verify([*block, *wrong])[: len(block)])
            session.commit(len(block))
    return cosines(torch.cat(rows), full)


def last_logits(runner: TargetRunner, tokens: Sequence[int], count: int) -> Tensor:
    """Logits ``[count, vocab]`` after the last tokens, from one pass without a cache."""
    ids = torch.tensor([list(tokens)], device=runner.model.device)
    options = {"use_cache": False}
    if "logits_to_keep" in inspect.signature(runner.model.forward).parameters:
        options["logits_to_keep"] = count
    with torch.inference_mode():
        return runner.model(input_ids=ids, **options).logits[0, -count:]


def _judge(found: Measurements, code: str, subject: Subject, name: str, similarity: Tensor, detail: str) -> None:
    lowest, mean = float(similarity.min()), float(similarity.mean())
    found.add(name, lowest, f"cosine {lowest:.6f} at worst, {mean:.6f} on average", detail)
    if lowest < GOOD:
        at = int(similarity.argmin()) - len(similarity)
        seen = f"{name}: cosine similarity {lowest:.4f} at position {at} from the end, {mean:.4f} on average."
        found.findings.append(Finding(code, subject, seen, severity="error" if lowest < BAD else "warning"))


def _compiled(found: Measurements, subject: Subject, runner: TargetRunner, tokens: Sequence[int]) -> None:
    """Layer by layer, so that layers of one kind are compiled once."""
    name = f"{subject}: compiled against eager"
    count = min(COMPARED, len(tokens))
    eager = last_logits(runner, tokens, count)
    layers = [m for m in runner.model.modules() if isinstance(m, torch.nn.ModuleList)]
    layers = max(layers, key=len) if layers else ()
    try:
        for layer in layers:
            layer.compile()
        output = last_logits(runner, tokens, count)
    except Exception as error:
        # No compiler, or a model that cannot be compiled: neither is the checkpoint's fault.
        found.add(name, None, "not available", " ".join(str(error).split())[:120])
        return
    finally:
        for layer in layers:
            layer._compiled_call_impl = None
        torch.compiler.reset()
    _judge(found, "HS706", subject, name, cosines(output, eager), f"{len(tokens)} tokens")


def _truncation(found: Measurements, subject: Subject, runner: TargetRunner, text: str) -> None:
    ids = runner.encode(text)
    back = runner.tokenizer.decode(ids, skip_special_tokens=True)
    kept = _tail(text) in back[-200:]
    found.add(f"{subject}: end of a long prompt", float(kept), "kept" if kept else "lost", f"{len(ids)} tokens")
    if not kept:
        seen = f"{len(text)} characters became {len(ids)} tokens, and their end is gone."
        found.findings.append(Finding("HS703", subject, seen, "tokenizer.json"))


def _tail(text: str) -> str:
    """The last word of letters: what any tokenizer gives back."""
    words = [word for word in text.split() if word.isascii() and word.isalnum()]
    return words[-1] if words else ""


def prompts(runner: TargetRunner) -> list[list[int]]:
    """A few short prompts that leave room for an answer."""
    texts = [load_workload(workload_files()[name]).prompts[0].text for name in PROMPTS]
    room = max(2, runner.max_length - NEW_TOKENS - BLOCK - 1)
    return [runner.encode(text)[:room] for text in texts]


def repetition(tokens: Sequence[int]) -> float:
    """Share of the tokens that a phrase of up to 24 tokens has already said right before."""
    repeated = [
        any(
            index >= 2 * size - 1
            and list(tokens[index - size + 1 : index + 1]) == list(tokens[index - 2 * size + 1 : index - size + 1])
            for size in range(1, LONGEST_PHRASE + 1)
        )
        for index in range(len(tokens))
    ]
    return sum(repeated) / len(repeated) if repeated else 0.0


def _repetition(found: Measurements, subject: Subject, runner: TargetRunner) -> None:
    shares, lengths = [], []
    for prompt in prompts(runner):
        room = min(NEW_TOKENS, runner.max_length - len(prompt) - 1)
        tokens = [token.id for token in decode(runner, prompt, max_new_tokens=max(1, room))]
        shares.append(repetition(tokens))
        lengths.append(len(tokens))
    worst, early = max(shares), sum(length < BLOCK for length in lengths)
    detail = f"{len(shares)} prompts, {sum(lengths)} tokens" + (f", {early} ended at once" if early else "")
    found.add(f"{subject}: repetition", worst, f"{worst:.0%} at worst", detail)
    looping = sum(share > LOOPING for share in shares)
    if looping:
        seen = f"{looping} of {len(shares)} outputs repeat themselves, up to {worst:.0%} of their tokens."
        found.findings.append(Finding("HS702", subject, seen))


def _acceptance(found: Measurements, target: TargetRunner, draft: TargetRunner) -> None:
    strategy, statistics = SameArchitectureDraft(draft), Statistics()
    for prompt in prompts(target):
        room = min(target.max_length, draft.max_length) - len(prompt) - BLOCK - 1
        for _ in decode(
            target, prompt, draft=strategy, k=BLOCK, max_new_tokens=max(1, min(NEW_TOKENS, room)), statistics=statistics
        ):
            pass
    rate = statistics.acceptance_rate
    if rate is None or math.isnan(rate):
        return
    detail = f"{statistics.drafted} drafted, K = {BLOCK}, greedy, {statistics.acceptance_length:.2f} tokens per step"
    found.add("pair: acceptance", rate, f"{rate:.0%}", detail)
    if rate < LITTLE:
        seen = f"{statistics.accepted} of {statistics.drafted} drafted tokens were accepted ({rate:.0%})."
        found.findings.append(Finding("HS704", "pair", seen))
