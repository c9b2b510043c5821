"""Plain decoding of the embedded target: ours, transformers' generate, a static cache, a compiled step.

Every way runs in a process of its own; they take turns on each prompt, in an order that is drawn anew. Tokens per
second leave the prefill out. Outputs must equal ours token for token.
"""

from collections.abc import Sequence

from benchmarks import decoder_comparison
from benchmarks.decoder_rounds import PEERS, Entry
from benchmarks.grids import Grid, spread
from benchmarks.result_rows import HEADINGS, cells

ENTRIES = (
    decoder_comparison.REFERENCE,
    Entry("ours, compiled"),
    Entry("generate"),
    Entry("generate, static cache"),
    Entry("generate, static cache, compiled"),
    Entry("loop"),
    Entry("loop, static cache, compiled"),
    Entry("ours", 0, PEERS),
    Entry("generate", 0, PEERS),
    Entry("economize", 0, PEERS),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = decoder_comparison.options("plain", __doc__, "--workload json --prompts 2 --save")
    chosen = parser.parse_args(arguments)
    return decoder_comparison.run(chosen, ENTRIES, tables)


def tables(result: dict) -> list[Grid]:
    grid = Grid(
        "Plain decoding of the embedded target: " + decoder_comparison.conditions(result),
        ("", *HEADINGS[:4], "best of ours / this (90 %)", "outputs that differ"),
        notes=decoder_comparison.notes(result),
    )
    for label, row in result["ways"].items():
        ratio = result["ratios"].get(label)
        grid.rows.append(
            [
                label,
                *cells(row)[:4],
                spread(ratio["ratio"], ratio["interval_90"]) if ratio else "-",
                f"{row['outputs_that_differ']} of {result['rounds']}",
            ]
        )
    return [grid]
