"""What ``plain`` and ``speculative`` share: the embedded pair, prompts, rounds, and what they came to."""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import command, peer_environment
from benchmarks.decoder_rounds import HERE, PEERS, Entry, Outcome, RoundPrompt, pythons, run_rounds
from benchmarks.decoders import DECODERS
from benchmarks.grids import Grid, number
from benchmarks.result_rows import row_of
from hybridspec import embedded
from hybridspec.tuning.backends.base import Sample
from hybridspec.tuning.decision import relative_interval, speedup
from hybridspec.tuning.workloads.sources import choose_prompts, find_workload

WORKLOADS = ("code", "json", "math", "prose")
#: Plain decoding of ours in this environment: what all others are measured against, and must equal.
REFERENCE = Entry("ours")
ROOM = 1024


def options(name: str, description: str, example: str) -> argparse.ArgumentParser:
    parser = command.options(name, description, example)
    parser.add_argument(
        "--workload", action="append", help=f"embedded one or file; repeat for several ({', '.join(WORKLOADS)})"
    )
    parser.add_argument(
        "--way",
        action="append",
        choices=list(DECODERS),
        help="only these, beside our plain decoding; repeat for several",
    )
    parser.add_argument("--prompts", type=command.at_least(1), default=2, help="of each workload")
    parser.add_argument("--new-tokens", type=command.at_least(2), default=48)
    parser.add_argument("--repeats", type=command.at_least(1), default=3)
    parser.add_argument("--target", type=Path, default=embedded.TARGET, help="checkpoint folder")
    parser.add_argument("--draft", type=Path, default=embedded.DRAFTS[embedded.DEFAULT_DRAFT], help="checkpoint folder")
    parser.add_argument(
        "--peers",
        type=Path,
        help=f"folder of their environment, made when it is missing ({peer_environment.default_folder()}); "
        "a smoke leaves them out unless this is given",
    )
    parser.add_argument("--without-compiling", action="store_true", help="leave out what takes minutes to compile")
    parser.add_argument("--without-peers", action="store_true", help="only what runs in this environment")
    return parser


def run(chosen: argparse.Namespace, entries: Sequence[Entry], tables: Callable[[dict], list[Grid]]) -> int:
    """Runs the rounds and shows their tables; the exit status. Entries of the peers' environment fall away
    ``--without-peers``, and in a smoke that names no ``--peers``.
    """
    console = command.console()
    if chosen.smoke:
        chosen.workload, chosen.prompts, chosen.new_tokens, chosen.repeats = ["json"], 1, 6, 1
        chosen.without_compiling = True
        if chosen.peers is None and not chosen.without_peers:
            chosen.without_peers = True
            console.print("the peers are left out of the smoke: --peers FOLDER runs them")
    chosen.workload = chosen.workload or list(WORKLOADS)
    if chosen.without_compiling:
        entries = [entry for entry in entries if "compiled" not in entry.way]
    entries = [e for e in entries if e == REFERENCE or not chosen.way or e.way in chosen.way]
    python = None
    if chosen.without_peers:
        entries = [entry for entry in entries if entry.environment != PEERS]
    elif any(entry.environment == PEERS for entry in entries):
        try:
            python = peer_environment.make(chosen.peers or peer_environment.default_folder(), say=console.print)
        except peer_environment.EnvironmentNotMade as error:
            print(error, file=sys.stderr)
            return 1
    prompts = encoded(chosen)
    with command.recorded(chosen, console) as result:
        outcome = run_rounds(
            entries,
            prompts,
            target=chosen.target,
            draft=chosen.draft,
            pythons=pythons(python),
            repeats=chosen.repeats,
            new_tokens=chosen.new_tokens,
            threads=chosen.threads,
            seed=chosen.seed,
            say=lambda text: console.print(text, soft_wrap=True, highlight=False),
        )
        result |= {"rounds": len(outcome.runs.get(REFERENCE, ()))}
        if not result["rounds"]:
            reason = outcome.failed.get(REFERENCE, "interrupted before the first round was done")
            print(f"nothing was measured: {reason}", file=sys.stderr)
            sys.exit(1)
        result |= report(outcome)
    command.show(console, tables(result))
    return 0


def encoded(chosen: argparse.Namespace) -> list[RoundPrompt]:
    """The prompts as the target's token ids, those that leave no room in the static caches left out."""
    from hybridspec.runtime.runner import TargetRunner
    from hybridspec.tuning.workloads.encoding import encode_prompt

    runner = TargetRunner.from_pretrained(chosen.target)
    found = []
    for name in chosen.workload:
        fitting = [
            RoundPrompt(f"{name}/{prompt.id}", name, tuple(tokens))
            for prompt in find_workload(name).prompts
            if len(tokens := encode_prompt(runner, prompt)) + chosen.new_tokens <= ROOM
        ]
        found += choose_prompts(fitting, chosen.prompts)
    if not found:
        print(f"no prompt of {', '.join(chosen.workload)} is short enough for {ROOM} tokens", file=sys.stderr)
        sys.exit(1)
    return found


def report(outcome: Outcome) -> dict:
    reference = outcome.runs[REFERENCE]
    ways = {}
    for entry, runs in outcome.runs.items():
        samples = outcome.samples(entry, REFERENCE)
        if not samples:
            continue
        ways[entry.label] = {
            "way": entry.way,
            "environment": entry.environment,
            "k": entry.k,
            **row_of(samples),
            "median_prefill_seconds": statistics.median(run.prefill_seconds for _, run in runs),
            "warm_up_seconds": outcome.warm_up_seconds[entry],
            "outputs_that_differ": sum(
                run.tokens != plain.tokens for (_, run), (_, plain) in zip(runs, reference, strict=True)
            ),
            "speedup_by_workload": {name: speedup(of_name) for name, of_name in by_workload(samples).items()},
        }
    return {
        "prompts": {prompt.id: len(prompt.tokens) for prompt, _ in reference},
        "versions": outcome.versions,
        "ways": ways,
        "failed": {entry.label: error for entry, error in outcome.failed.items()},
        "interrupted": outcome.interrupted,
        "ratios": ratios(outcome),
    }


def by_workload(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.prompt.rpartition("/")[0], []).append(sample)
    return found


def ratios(outcome: Outcome) -> dict[str, dict]:
    """Tokens per second of ours over each way, where the same kind of thing is compared: the best plain decoding of
    ours with every other one, every speculative way at its own best K with ours at its best, and at the same K.
    """
    samples = {entry: found for entry in outcome.runs if (found := outcome.samples(entry, REFERENCE))}
    speed = {entry: speedup(found) for entry, found in samples.items()}
    best: dict[tuple[str, str], Entry] = {}
    for entry in samples:
        if entry.k:
            key = (entry.way, entry.environment)
            best[key] = max(best.get(key, entry), entry, key=speed.get)
    found = {}

    def compare(name: str, ours: Entry | None, theirs: Entry) -> None:
        if ours is None or ours == theirs:
            return
        found[name] = {
            "ours": ours.label,
            "theirs": theirs.label,
            "ratio": speed[ours] / speed[theirs],
            "interval_90": relative_interval(samples[ours], samples[theirs]),
        }

    plain = max((entry for entry in samples if entry.ours and not entry.k), key=speed.get)
    champion = max((entry for entry in best.values() if entry.ours), key=speed.get, default=None)
    for entry in samples:
        if not entry.k:
            compare(entry.label, plain, entry)
    for (way, place), entry in best.items():
        compare(f"{Entry(way, 0, place).label}, each at its best K", champion, entry)
    for entry in samples:
        if entry.k:
            same = Entry(champion.way, entry.k, champion.environment) if champion else None
            compare(entry.label, same if same in samples else None, entry)
    return found


def conditions(result: dict) -> str:
    settings = result["settings"]
    return (
        f"{len(result['prompts'])} prompts ({', '.join(settings['workload'])}), {settings['new_tokens']} tokens, "
        f"{settings['repeats']} rounds, {settings['threads']} thread(s)"
    )


def notes(result: dict) -> list[str]:
    """Versions, and what did not run."""
    places = {HERE: "Here", PEERS: "Peers' environment"}
    found = [
        f"{places[place]}: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + "."
        for place, versions in result["versions"].items()
    ]
    found += [f"Did not run: {label} ({error})." for label, error in result["failed"].items()]
    return found + (["Interrupted."] if result["interrupted"] else [])


def workloads_grid(result: dict, labels: Sequence[str]) -> Grid:
    names = result["settings"]["workload"]
    speedups = {label: result["ways"][label]["speedup_by_workload"] for label in labels}
    rows = [[label, *(number(speedups[label].get(name)) for name in names)] for label in labels]
    return Grid("Speed-up over our plain decoding, by workload", ("", *names), rows)
