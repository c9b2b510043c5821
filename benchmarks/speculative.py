"""Speculative decoding of the embedded pair: ours, the economize package, the naive way; the same prompts and draft.

economize keeps a snapshot of the target's recurrent states and runs accepted tokens again after a rejection. The naive
way is benchmarks/naive_decoder.py: a deep copy of the cache before each block, and the same second pass. Ours runs in
the peers' environment, too, at the last K, so that a difference of versions shows. Every way runs in a process of its
own; they take turns on each prompt. Tokens per second leave the prefill out. Outputs must equal plain greedy decoding
token for token.
"""

from collections.abc import Sequence

from benchmarks import command, decoder_comparison
from benchmarks.decoder_rounds import PEERS, Entry
from benchmarks.grids import Grid, share, spread
from benchmarks.result_rows import HEADINGS, cells


def main(arguments: Sequence[str] | None = None) -> int:
    parser = decoder_comparison.options("speculative", __doc__, "--workload json --prompts 2 --k 4 --save")
    parser.add_argument("--k", type=command.at_least(1), nargs="+", default=[1, 2, 4], help="draft lengths")
    chosen = parser.parse_args(arguments)
    lengths = chosen.k[:1] if chosen.smoke else chosen.k
    here = decoder_comparison.REFERENCE.environment
    entries = [
        decoder_comparison.REFERENCE,
        Entry("generate"),
        Entry("economize", 0, PEERS),
        *(
            Entry(way, k, place)
            for way, place in (("ours", here), ("ours, compiled", here), ("economize", PEERS), ("naive", here))
            for k in lengths
        ),
        Entry("ours", lengths[-1], PEERS),
    ]
    return decoder_comparison.run(chosen, entries, tables)


def tables(result: dict) -> list[Grid]:
    grid = Grid(
        "Speculative decoding of the embedded pair: " + decoder_comparison.conditions(result),
        ("", *HEADINGS, "of ideal", "outputs that differ"),
        notes=decoder_comparison.notes(result),
    )
    for label, row in result["ways"].items():
        differ = f"{row['outputs_that_differ']} of {result['rounds']}"
        grid.rows.append([label, *cells(row), share(row["efficiency"]), differ])
    against = Grid("Tokens per second of ours over the others'", ("", "ours", "theirs", "ratio (90 %)"))
    for name, ratio in result["ratios"].items():
        against.rows.append([name, ratio["ours"], ratio["theirs"], spread(ratio["ratio"], ratio["interval_90"])])
    best = dict.fromkeys(r[side] for n, r in result["ratios"].items() if "best K" in n for side in ("ours", "theirs"))
    return [grid, against, decoder_comparison.workloads_grid(result, list(best))]
