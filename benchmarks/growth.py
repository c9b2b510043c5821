"""How cost grows with context, K, layers and hidden size: random weights, our runner and the naive way in turn.

A model of Qwen3.5's shape (three gated-delta layers to one of full attention, heads of 128) in float32. One of the four
sizes varies, the others stay at their base. In each repetition one sequence does a plain step, a verify pass whose
tokens all stay, and one of which 1 to K stay; the naive way copies the cache, verifies, and after the partial one
feeds what stayed again. The acceptance is forced, so the weights do not matter. A size that does not fit into the
memory that is free is left out, and says so. Ctrl-C ends it with the sizes that are done.
"""

import argparse
import copy
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import nn

from benchmarks import command
from benchmarks.grids import Grid, number, size, spread
from benchmarks.intervals import ratio_of_medians, summary
from benchmarks.state_bytes import plane_bytes
from benchmarks.transformers_model import TransformersModel
from hybridspec.runtime.runner import TargetRunner
from hybridspec.state.memory import recurrent_bytes

VOCABULARY = 256
#: Of all memory that is free, what a model may take.
MEMORY_SHARE = 0.8


@dataclass(frozen=True)
class Sizes:
    """One point: committed tokens, drafted tokens, layers, width."""

    context: int = 512
    k: int = 4
    layers: int = 8
    hidden: int = 512

    @property
    def parameters(self) -> int:
        """About, for the check of memory: a gated-delta layer and its feed-forward part."""
        return self.layers * (6 * self.hidden**2 + 9 * self.hidden**2)


AXES = {
    "context": (128, 512, 2048, 8192),
    "k": (1, 2, 4, 8, 16),
    "layers": (4, 8, 16, 32, 48),
    "hidden": (256, 512, 1024, 2048, 4096),
}
SMOKE = {"context": (16, 40), "k": (1, 3), "layers": (4, 8), "hidden": (128, 256)}
SMOKE_BASE = Sizes(24, 2, 4, 128)


def build(sizes: Sizes) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    heads = max(1, sizes.hidden // 128)
    config = CONFIG_MAPPING["qwen3_5_text"](
        vocab_size=VOCABULARY,
        hidden_size=sizes.hidden,
        intermediate_size=3 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(sizes.layers)],
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        head_dim=128,
        linear_num_value_heads=heads,
        linear_num_key_heads=max(1, heads // 2),
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=32768,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


class SessionSteps:
    """Steps of our session; each is undone, so that the context stays."""

    def __init__(self, model: nn.Module, prompt: list[int], packed: bool = False) -> None:
        self.session = TargetRunner(model, rollback="tape", packed=packed).start(prompt)
        self.mark = self.session.snapshot()

    def step(self, block: list[int], keep: int) -> tuple[float, float]:
        begun = time.perf_counter()
        self.session.verify(block)
        verified = time.perf_counter()
        self.session.commit(keep)
        ended = time.perf_counter()
        self.session.restore(self.mark)
        return verified - begun, ended - verified

    def bytes(self, block: list[int]) -> dict[str, int]:
        """Held with a block pending, and what plain decoding holds."""
        state, window = plane_bytes(self.session)
        self.session.verify(block)
        held = recurrent_bytes([self.session.cache])
        self.session.restore(self.mark)
        return {"state_bytes": state, "window_bytes": window, "held_bytes": held}


class CopiedCacheSteps:
    """The same on transformers' own cache: copy, verify, and what stays fed again if it is not all."""

    def __init__(self, model: nn.Module, prompt: list[int]) -> None:
        self.model, self.length = TransformersModel(model), len(prompt) - 1
        self.cache = self.model.dynamic_cache()
        for start in range(0, self.length, 512):
            self.model(prompt[start : min(start + 512, self.length)], self.cache, start, last_only=True)

    def step(self, block: list[int], keep: int) -> tuple[float, float]:
        begun = time.perf_counter()
        scratch = copy.deepcopy(self.cache)
        self.model(block, scratch, self.length)
        verified = time.perf_counter()
        if keep == len(block):
            return verified - begun, 0.0
        # The original goes on; here it must stay, so the copy that replaces it is not timed.
        original = copy.deepcopy(self.cache)
        again = time.perf_counter()
        self.model(block[:keep], original, self.length, last_only=True)
        return verified - begun, time.perf_counter() - again


def measure(sizes: Sizes, models: Callable[[Sizes], nn.Module], repeats: int, seed: int, packed: bool) -> dict:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(3, VOCABULARY, sizes.context + 1).tolist()
    begun = time.perf_counter()
    model = models(sizes)
    ways: dict[str, SessionSteps | CopiedCacheSteps] = {"ours": SessionSteps(model, prompt)}
    prefill = time.perf_counter() - begun
    ways["naive"] = CopiedCacheSteps(model, prompt)
    if packed:
        ways["packed"] = SessionSteps(model, prompt, packed=True)
    times: dict[str, dict[str, list[float]]] = {
        way: {part: [] for part in ("plain", "verify", "full", "partial")} for way in ways
    }
    gc.collect()
    gc.disable()
    try:
        for repeat in range(-1, repeats):
            for name, way in list(ways.items())[:: -1 if repeat % 2 else 1]:
                block = rng.integers(3, VOCABULARY, sizes.k + 1).tolist()
                plain = sum(way.step(block[:1], 1)) if name == "ours" else None
                verify_1, full = way.step(block, len(block))
                verify_2, partial = way.step(block, 1 + repeat % sizes.k)
                if repeat < 0:
                    continue
                found = times[name]
                found["verify"] += [verify_1, verify_2]
                found["full"].append(full)
                found["partial"].append(partial)
                if plain is not None:
                    found["plain"].append(plain)
    finally:
        gc.enable()
    ours, naive = times["ours"], times["naive"]
    rollback, interval = ratio_of_medians(ours["partial"], ours["verify"], seed)
    return {
        "sizes": asdict(sizes),
        "parameters": sum(p.numel() for p in model.parameters()),
        "prefill_seconds": prefill,
        **ways["ours"].bytes(block),
        **(packed_part(times, ways["packed"], seed) if packed else {}),
        "ours": {part: summary(found) for part, found in ours.items()},
        "naive": {part: summary(naive[part]) for part in ("verify", "partial")},
        "verify_of_plain": ratio_of_medians(ours["verify"], ours["plain"], seed),
        "partial_of_verify": [rollback, interval],
        "naive_step_of_ours": ratio_of_medians(total(naive), total(ours), seed),
    }


def packed_part(times: dict[str, dict[str, list[float]]], way: SessionSteps, seed: int) -> dict:
    """The verify passes on packed weights, beside plain steps of ours: one token never runs packed."""
    verify = times["packed"]["verify"]
    return {
        "packed": {"verify": summary(verify)},
        "packed_bytes": way.session.runner.packed.bytes,
        "packed_verify_of_plain": ratio_of_medians(verify, times["ours"]["plain"], seed),
    }


def total(times: dict[str, list[float]]) -> list[float]:
    """Verify pass and partial commit of each repetition."""
    return [verify + partial for verify, partial in zip(times["verify"][1::2], times["partial"], strict=True)]


def points(base: Sizes, axes: dict[str, Sequence[int]]) -> Iterator[tuple[str, Sizes]]:
    for axis, values in axes.items():
        for value in values:
            yield axis, replace(base, **{axis: value})


def free_bytes() -> int | None:
    """Memory that is to be had, where the system says so."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    fields = dict(line.split(":") for line in path.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.options("growth", __doc__, "--axis context --axis k --save")
    parser.add_argument("--axis", action="append", choices=list(AXES), help="repeat for several; default: all")
    parser.add_argument("--repeats", type=command.at_least(2), default=5)
    parser.add_argument("--packed", action="store_true", help="ours on packed weights too (hybridspec.runtime.packed)")
    parser.add_argument("--values", type=command.at_least(1), nargs="+", help="of the axis, if it is one")
    chosen = parser.parse_args(arguments)
    chosen.axis = chosen.axis or list(AXES)
    if chosen.values and len(chosen.axis) != 1:
        parser.error("--values belong to one --axis")
    if chosen.values and "layers" in chosen.axis and any(value % 4 for value in chosen.values):
        parser.error("--values: layers come in fours, three gated-delta ones and one of full attention")
    if chosen.values and "hidden" in chosen.axis and any(value % 128 for value in chosen.values):
        parser.error("--values: the hidden size is a multiple of 128, the width of a head")
    if len(chosen.axis) == 1:
        chosen.saved_as = f"growth-{chosen.axis[0]}"
    torch.set_num_threads(chosen.threads)
    console = command.console()
    with command.recorded(chosen, console) as result:
        result |= run(chosen, console)
    command.show(console, tables(result))
    return 0


def run(chosen: argparse.Namespace, console: Console) -> dict:
    base, axes = (SMOKE_BASE, SMOKE) if chosen.smoke else (Sizes(), AXES)
    axes = {axis: chosen.values or axes[axis] for axis in chosen.axis}
    repeats = 2 if chosen.smoke else chosen.repeats
    measured: dict[Sizes, dict] = {}
    found: dict = {"base": asdict(base), "axes": {axis: [] for axis in axes}, "left_out": {}, "interrupted": False}
    try:
        for axis, sizes in points(base, axes):
            free = free_bytes()
            weights = 4 * sizes.parameters * (2 if chosen.packed else 1)
            if free is not None and weights > MEMORY_SHARE * free:
                reason = f"weights of about {size(weights)}, {size(free)} are free"
                found["left_out"][f"{axis} {getattr(sizes, axis)}"] = reason
                console.print(f"{axis} {getattr(sizes, axis)}: left out, {reason}")
                continue
            console.print(f"{axis} {getattr(sizes, axis)}", highlight=False)
            if sizes not in measured:
                measured[sizes] = measure(sizes, build, repeats, chosen.seed, chosen.packed)
            found["axes"][axis].append(measured[sizes])
    except KeyboardInterrupt:
        found["interrupted"] = True
        print("interrupted; what follows is about the sizes that are done", file=sys.stderr)
    return found


def tables(result: dict) -> list[Grid]:
    grids = []
    for axis, rows in result["axes"].items():
        others = ", ".join(f"{name} {value}" for name, value in result["base"].items() if name != axis)
        grid = Grid(
            f"Growth with {axis} ({others})",
            (
                axis,
                "plain step, ms",
                "verify, ms",
                "verify / plain",
                "partial commit, ms",
                "partial / verify (90 %)",
                "naive verify, ms",
                "naive step / ours (90 %)",
                "state",
                "held while pending",
                *(
                    ("packed verify, ms", "packed verify / plain (90 %)")
                    if any("packed" in row for row in rows)
                    else ()
                ),
            ),
        )
        for row in rows:
            ours, naive = row["ours"], row["naive"]
            middle = lambda part: part["median_milliseconds"]  # noqa: E731
            share, interval = row["partial_of_verify"]
            ratio, of_ours = row["naive_step_of_ours"]
            grid.rows.append(
                [
                    str(row["sizes"][axis]),
                    f"{middle(ours['plain']):.2f}",
                    f"{middle(ours['verify']):.2f}",
                    f"{row['verify_of_plain'][0]:.2f}",
                    f"{middle(ours['partial']):.3f}",
                    "{:.1%} ({:.1%} to {:.1%})".format(share, *interval),
                    f"{middle(naive['verify']):.2f}",
                    spread(ratio, of_ours),
                    size(row["state_bytes"]),
                    size(row["held_bytes"]),
                    *packed_cells(row),
                ]
            )
        grids.append(grid)
    if grids and result["left_out"]:
        grids[-1].notes.append("Left out: " + "; ".join(f"{k}: {v}" for k, v in result["left_out"].items()) + ".")
    return grids


def packed_cells(row: dict) -> list[str]:
    if "packed" not in row:
        return []
    return [number(row["packed"]["verify"]["median_milliseconds"]), spread(*row["packed_verify_of_plain"])]
