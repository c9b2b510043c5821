"""What speculative decoding of a large hybrid costs on one GPU: random weights at real dimensions, forced acceptance.

``--device cpu --smoke`` runs the same code in seconds: does it work?

The model is a stack of a few Qwen3.5-27B-like layers (three of the gated delta rule to one of attention) in bf16, made
on the device from a config: nothing is downloaded. Results are checked before they are timed. A section that fails
prints its error, the others go on, and the exit status is 1. No section starts after ``--seconds``.

Runners: ``eager`` is TargetRunner, ``static`` StaticRunner without graphs, ``graph`` StaticRunner.
"""

import argparse
import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks import command
from benchmarks.machine import machine, versions
from hybridspec.decoding import acceptance
from hybridspec.decoding.proposal import Proposal
from hybridspec.decoding.sampling import Sampling
from hybridspec.recurrence import gated_delta, kernels, ssd
from hybridspec.recurrence.tape import rollback
from hybridspec.runtime.runner import TargetRunner
from hybridspec.runtime.session import Session
from hybridspec.runtime.static_runner import StaticRunner

#: What decides which kernels run.
PACKAGES = ("triton", "flash-linear-attention", "causal-conv1d")
#: Dimensions as in Qwen3.5-27B, which has 64 of these layers.
REAL = {
    "vocab_size": 248_320,
    "hidden_size": 5120,
    "intermediate_size": 17_408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_value_heads": 48,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
#: Of a layer as in Nemotron-H-8B: heads, channels of each, state, groups.
SSD_REAL, SSD_SMALL = (128, 64, 128, 8), (4, 16, 16, 2)
#: Largest difference, relative to the root mean square of what is compared, that rounding explains. A state that holds
#: one token too many is off by 0.1 and more.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


class WrongResultError(AssertionError):
    """What is about to be timed computes something else than its twin."""


@dataclass
class Bench:
    """Settings, results so far, and the model that most sections share."""

    device: torch.device
    smoke: bool
    layers: int
    prompt: int
    repeats: int
    longest: int
    console: Console
    dtype: torch.dtype = torch.bfloat16
    results: dict[str, Any] = field(default_factory=dict)
    _model: PreTrainedModel | None = None
    _runners: dict[str, TargetRunner] = field(default_factory=dict)
    _sessions: dict[str, Session] = field(default_factory=dict)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dimensions(self) -> dict[str, int]:
        return SMALL if self.smoke else REAL

    @property
    def paths(self) -> tuple[str, ...]:
        return ("eager", "static", "graph") if self.is_cuda else ("eager", "static")

    @property
    def capacity(self) -> int:
        return self.prompt + (128 if self.smoke else 1024)

    @property
    def model(self) -> PreTrainedModel:
        if self._model is None:
            config = CONFIG_MAPPING["qwen3_5_text"](
                **self.dimensions,
                num_hidden_layers=self.layers,
                tie_word_embeddings=False,
                max_position_embeddings=32_768,
            )
            torch.manual_seed(0)
            with torch.device(self.device):
                self._model = AutoModelForCausalLM.from_config(config, dtype=self.dtype).eval()
        return self._model

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        return np.random.default_rng(seed).integers(3, self.dimensions["vocab_size"], count).tolist()

    def runner(self, name: str) -> TargetRunner:
        """By path, or rollback mode of an eager runner."""
        if name not in self._runners:
            if name in ("static", "graph"):
                runner = StaticRunner(self.model, capacity=self.capacity, graphs=name == "graph")
            else:
                runner = TargetRunner(self.model, rollback="tape" if name == "eager" else name)
            self._runners[name] = runner
        return self._runners[name]

    def session(self, name: str) -> Session:
        """At a prompt, and kept for the sections that follow; see :meth:`back`."""
        if name not in self._sessions:
            self._sessions[name] = self.runner(name).start(self.tokens(self.prompt))
        session = self._sessions[name]
        if session.room < self.longest + 2 or session.length > self.capacity - 8 * self.longest:
            session.close()
            self._sessions[name] = session = self.runner(name).start(self.tokens(self.prompt))
        return session

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def time(self, function: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> dict[str, float]:
        """Milliseconds of wall clock until the device has finished; ``before`` runs untimed each time."""
        times = []
        for repeat in range(-max(2, self.repeats // 5), self.repeats):
            before()
            self.wait()
            start = time.perf_counter()
            function()
            self.wait()
            if repeat >= 0:
                times.append(1e3 * (time.perf_counter() - start))
        low, median, high = np.quantile(times, [0.25, 0.5, 0.75])
        return {"milliseconds": float(median), "quartile_1": float(low), "quartile_3": float(high)}

    def check(self, actual: Tensor, expected: Tensor, what: str, tolerance: float | None = None) -> float:
        """Relative error.

        Raises:
            WrongResultError: it is larger than rounding explains.
        """
        actual, expected = actual.float(), expected.float()
        scale = expected.square().mean().sqrt().clamp(min=1e-9)
        error = float(((actual - expected).square().mean().sqrt() / scale).cpu())
        limit = TOLERANCE[self.dtype] if tolerance is None else tolerance
        # Written so that a NaN fails.
        if not error <= limit:
            raise WrongResultError(f"{what}: off by {error:.2g} of its size, more than {limit:.2g}")
        return error

    def table(self, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(title=title, title_justify="left")
        for index, heading in enumerate(headings):
            table.add_column(heading, justify="right" if index else "left")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)


def bandwidth(bench: Bench) -> dict:
    """The peak that all else is held against: a copy of a large tensor, read and written."""
    size = (1 << 24) if bench.smoke else (1 << 31)
    source = torch.empty(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    taken = bench.time(lambda: target.copy_(source))
    rate = 2 * size / taken["milliseconds"] / 1e6
    bench.console.print(f"copy: {rate:.0f} GB/s")
    return taken | {"bytes": 2 * size, "gigabytes_per_second": rate}


def blocks(bench: Bench, tokens: int) -> dict[str, tuple[Callable, dict[str, Tensor]]]:
    """For each kernel: the torch form, and a block at real dimensions as a model hands it over."""
    generator = torch.Generator(bench.device).manual_seed(tokens)

    def normal(*shape: int, dtype: torch.dtype = bench.dtype) -> Tensor:
        # Tokens in front of heads in memory.
        x = torch.randn(shape[0], shape[2], shape[1], *shape[3:], generator=generator, device=bench.device)
        return x.to(dtype).transpose(1, 2)

    d = bench.dimensions
    value_heads, key_heads = d["linear_num_value_heads"], d["linear_num_key_heads"]
    key_size, value_size = d["linear_key_head_dim"], d["linear_value_head_dim"]
    heads, size, state_size, groups = SSD_SMALL if bench.smoke else SSD_REAL
    step = normal(1, heads, tokens, dtype=torch.float32).abs()
    delta = {
        "query": normal(1, key_heads, tokens, key_size),
        "key": normal(1, key_heads, tokens, key_size),
        "value": normal(1, value_heads, tokens, value_size),
        "log_decay": -normal(1, value_heads, tokens, dtype=torch.float32).abs(),
        "beta": normal(1, value_heads, tokens).sigmoid(),
        "state": torch.randn(1, value_heads, key_size, value_size, generator=generator, device=bench.device),
    }
    space = {
        "inputs": normal(1, heads, tokens, size),
        "step": step,
        "rate": -torch.arange(1, heads + 1, device=bench.device) / heads,
        "write": normal(1, groups, tokens, state_size),
        "read": normal(1, groups, tokens, state_size),
        "state": torch.randn(1, heads, size, state_size, generator=generator, device=bench.device),
    }

    def delta_in_torch(**arguments: Tensor) -> tuple:
        arguments = {name: x.float() for name, x in arguments.items()}
        for name in ("query", "key"):
            arguments[name] = gated_delta.l2_normalise(arguments[name]).repeat_interleave(value_heads // key_heads, 1)
        arguments["query"] = arguments["query"] * key_size**-0.5
        return gated_delta.verify(**arguments)

    def space_in_torch(**arguments: Tensor) -> tuple:
        return ssd.verify(**{name: x.float() for name, x in arguments.items()})

    return {"gated delta rule": (delta_in_torch, delta), "SSD": (space_in_torch, space)}


def fused(bench: Bench) -> dict:
    """Kernels against their torch forms: first the same outputs and tape, then the time."""
    interpreted = not bench.is_cuda
    if interpreted and not (kernels.installed() and os.environ.get("TRITON_INTERPRET") == "1"):
        bench.console.print("kernels: left out, they need a GPU, or Triton and TRITON_INTERPRET=1")
        return {"left_out": "no GPU"}
    if not kernels.installed():
        raise ModuleNotFoundError("Triton is not installed: pip install 'hybridspec[cuda]'")
    from hybridspec.recurrence.kernels import gated_delta as delta_kernel
    from hybridspec.recurrence.kernels import ssd as space_kernel

    scale = bench.dimensions["linear_key_head_dim"] ** -0.5
    fused_forms = {
        "gated delta rule": lambda **arguments: delta_kernel.verify(**arguments, scale=scale, normalise=True),
        "SSD": space_kernel.verify,
    }
    result: dict[str, dict] = {}
    peak = bench.results.get("bandwidth", {}).get("gigabytes_per_second")
    repeats, bench.repeats = bench.repeats, 1 if interpreted else bench.repeats
    rows = []
    try:
        for tokens in (1, 3) if bench.smoke else (1, 2, 3, 5, 9, 17):
            for name, (in_torch, arguments) in blocks(bench, tokens).items():
                kernel = fused_forms[name]
                actual, expected = kernel(**arguments), in_torch(**arguments)
                parts = [
                    (actual[0], expected[0], "outputs"),
                    *zip(actual[1], expected[1], actual[1]._fields, strict=True),
                ]
                # A GPU multiplies matrices of the torch form in fp32, or in TF32 if somebody allowed it.
                errors = {what: bench.check(a, e, f"{name}, {tokens} tokens, {what}", 1e-2) for a, e, what in parts}
                moved = sum(x.nbytes for x in (*arguments.values(), actual[0], *actual[1]))
                times = {
                    way: bench.time(lambda f=f, a=arguments: f(**a))
                    for way, f in (("kernel", kernel), ("torch", in_torch))
                }
                rate = moved / times["kernel"]["milliseconds"] / 1e6
                key = f"{name}, {tokens} tokens"
                result[key] = times | {"bytes": moved, "gigabytes_per_second": rate, "errors": errors}
                speedup = times["torch"]["milliseconds"] / times["kernel"]["milliseconds"]
                rows.append(
                    [
                        key,
                        f"{1e3 * times['kernel']['milliseconds']:.1f}",
                        f"{1e3 * times['torch']['milliseconds']:.1f}",
                        f"{speedup:.2f}",
                        f"{rate:.0f}" + (f" ({rate / peak:.0%})" if peak else ""),
                    ]
                )
    finally:
        bench.repeats = repeats
    bench.table("one layer", ("", "kernel, us", "torch, us", "torch / kernel", "GB/s (of a copy)"), rows)
    return result


def states(session: Session) -> list[Tensor]:
    getattr(session.cache, "show", lambda: None)()
    found = [getattr(layer, "recurrent_states", {}).get(0) for layer in session.cache.layers]
    return [x for x in found if x is not None]


def equality(bench: Bench) -> dict:
    """Every path against an eager session that was fed only what was kept; the closed form against float64."""
    worst: dict[str, float] = {}
    block, prompt = bench.tokens(bench.longest + 1, seed=1), bench.tokens(bench.prompt)
    for name in bench.paths:
        for keep in (1, bench.longest // 2 + 1, bench.longest + 1):
            with bench.runner(name).start(prompt) as session, bench.runner("eager").start(prompt) as expected:
                errors = []
                # The second time a captured graph is replayed from the other plane.
                for _ in range(3):
                    session.verify(block)
                    session.commit(keep)
                    expected.verify(block[:keep])
                    expected.commit(keep)
                    pairs = zip(states(session), states(expected), strict=True)
                    errors += [bench.check(a, e, f"{name}, {keep} kept, layer {i}") for i, (a, e) in enumerate(pairs)]
                logits = session.verify(block[:2]), expected.verify(block[:2])
                errors.append(bench.check(*logits, f"{name}, {keep} kept, next logits"))
                worst[f"{name}, {keep} kept"] = max(errors)
    for name, (in_torch, arguments) in blocks(bench, bench.longest + 1).items():
        _, tape = in_torch(**arguments)
        exact = type(tape)(*(x.double() for x in tape))
        before = arguments["state"]
        for keep in range(1, tape.length + 1):
            what = f"{name}, closed form, {keep} kept"
            pair = rollback(before, tape, keep), rollback(before.double(), exact, keep)
            worst[what] = bench.check(*pair, what, 1e-4)
    bench.console.print(f"equality: largest relative error {max(worst.values()):.1e} over {len(worst)} cases")
    return worst


def passes(bench: Bench) -> dict:
    """A plain step of the target, and verify passes of K drafted tokens, kept whole each time."""
    result: dict[str, dict] = {}
    weights = sum(p.nbytes for p in bench.model.parameters()) - bench.model.get_input_embeddings().weight.nbytes
    peak = bench.results.get("bandwidth", {}).get("gigabytes_per_second")
    rows = []
    for k in range(bench.longest + 1):
        row = [f"verify(K={k})" if k else "plain step"]
        for name in bench.paths:
            block = bench.tokens(k + 1, seed=k)

            def step(name: str = name, block: list[int] = block) -> None:
                bench.session(name).verify(block)

            def back(name: str = name) -> None:
                session = bench.session(name)
                session.commit(0)

            taken = bench.time(step, back)
            back()
            rate = weights / taken["milliseconds"] / 1e6
            result[f"{name}, K={k}"] = taken | {"gigabytes_per_second": rate}
            ratio = taken["milliseconds"] / result[f"{name}, K=0"]["milliseconds"]
            share = f", {rate / peak:.0%} of a copy" if peak else ""
            row.append(f"{taken['milliseconds']:.3f} ({ratio:.2f}{share})")
        rows.append(row)
    headings = ("", *(f"{name}, ms (steps)" for name in bench.paths))
    bench.table(f"{bench.layers} layers, {weights / 1e9:.2f} GB of weights read in a pass", headings, rows)
    return result | {"weights_bytes": weights}


def rollbacks(bench: Bench) -> dict:
    """What a commit costs by the number of drafted tokens accepted, in every mode."""
    result: dict[str, dict] = {}
    modes = {"tape": "eager", "slots": "slots", "recompute": "recompute"} | {n: n for n in bench.paths if n != "eager"}
    k = min(bench.longest, 8)
    block = bench.tokens(k + 1, seed=9)
    rows = []
    verify = bench.results.get("passes", {})
    for label, name in modes.items():
        row = [label]
        # What verify costs in this path, to hold a commit against.
        whole = verify.get(f"{name if name in bench.paths else 'eager'}, K={k}", {}).get("milliseconds")
        for accepted in range(k + 1):

            def verified(name: str = name) -> None:
                session = bench.session(name)
                session.commit(0)
                session.verify(block)

            taken = bench.time(lambda n=name, a=accepted: bench.session(n).commit(a + 1), verified)
            result[f"{label}, {accepted} of {k}"] = taken
            row.append(f"{taken['milliseconds']:.3f}" + (f" ({taken['milliseconds'] / whole:.1%})" if whole else ""))
        rows.append(row)
    headings = ("accepted", *(f"{accepted}" for accepted in range(k + 1)))
    bench.table(f"commit after verify(K={k}), ms (of that verify pass)", headings, rows)
    return result


def loop(bench: Bench) -> dict:
    """The loop with the draft taken off and acceptance forced: what it takes beyond its verify passes and commits."""
    result: dict[str, dict] = {}
    k = min(bench.longest, 4)
    rows = []
    for name in bench.paths:
        runner = bench.runner(name)
        steps = 8 if bench.smoke else 64
        with runner.start(bench.tokens(bench.prompt)) as session:
            parts = {"verify": 0.0, "accept": 0.0, "commit": 0.0}
            kept, last, whole = 0, 5, 0.0
            for step in range(-4, steps):
                if step == 0:
                    bench.wait()
                    whole, parts, kept = time.perf_counter(), dict.fromkeys(parts, 0.0), 0
                accepted = (3 * step) % (k + 1)
                if session.room < k + 2:
                    break
                begun = time.perf_counter()
                proposal = Proposal(bench.tokens(k, seed=step & 0xFFFF))
                drafted = time.perf_counter()
                logits = session.verify([last, *proposal.tokens])
                bench.wait()
                verified = time.perf_counter()
                verdict = acceptance.verdict(logits, proposal, Sampling(), "token", None)
                decided = time.perf_counter()
                session.commit(accepted + 1)
                bench.wait()
                parts["verify"] += verified - drafted
                parts["accept"] += decided - verified
                parts["commit"] += time.perf_counter() - decided
                whole += drafted - begun
                last, kept = verdict.token, kept + accepted + 1
            whole = time.perf_counter() - whole
        each = {part: 1e3 * seconds / steps for part, seconds in parts.items()}
        total = 1e3 * whole / steps
        overhead = total - each["verify"] - each["commit"]
        result[name] = {"step": total, **each, "overhead": overhead, "tokens_per_second": kept / whole}
        rows.append(
            [
                name,
                *(f"{each[part]:.3f}" for part in parts),
                f"{total:.3f}",
                f"{overhead:.3f} ({overhead / total:.1%})",
                f"{kept / whole:.1f}",
            ]
        )
    headings = ("", "verify, ms", "accept, ms", "commit, ms", "step, ms", "overhead, ms", "tokens/s")
    bench.table(f"loop at K={k}, 0 to {k} accepted in turn, draft taken off", headings, rows)
    return result


def memory(bench: Bench) -> dict:
    """Bytes that a sequence holds, by what they are for."""
    session = bench.session("static")
    session.verify(bench.tokens(2, seed=3))
    session.commit(1)
    arena = session.cache.arena
    plane = sum(group.planes[0].nbytes for group in arena.groups)
    tape = sum(x.nbytes for group in arena.groups for x in group.tape) // arena.place.longest
    windows = sum(p[0].nbytes for layer in arena.recurrent for p in layer.conv_states.planes.values())
    keys = sum(x.nbytes for layer in arena.attention for x in (layer.keys, layer.values)) // arena.place.capacity
    result = {
        "state_plane": plane,
        "tape_of_a_token": tape,
        "window_plane": windows,
        "keys_and_values_of_a_token": keys,
    }
    bench.console.print(", ".join(f"{name.replace('_', ' ')} {size / 2**20:.3f} MiB" for name, size in result.items()))
    if bench.is_cuda:
        result["allocated_at_most"] = torch.cuda.max_memory_allocated(bench.device)
    return result


def prefill(bench: Bench) -> dict:
    """A long prompt in transformers' own form, which takes flash-linear-attention where it is installed."""
    tokens = bench.tokens(64 if bench.smoke else 2048, seed=4)
    runner = bench.runner("eager")

    def run() -> None:
        with runner.start(tokens):
            pass

    repeats, bench.repeats = bench.repeats, max(2, bench.repeats // 10)
    try:
        taken = bench.time(run)
    finally:
        bench.repeats = repeats
    rate = 1e3 * len(tokens) / taken["milliseconds"]
    by = "flash-linear-attention" if versions(("flash-linear-attention",)) else "PyTorch"
    bench.console.print(f"prefill of {len(tokens)} tokens ({by}): {taken['milliseconds']:.1f} ms, {rate:.0f} tokens/s")
    return taken | {"tokens_per_second": rate, "by": by}


SECTIONS: dict[str, Callable[[Bench], dict]] = {
    "bandwidth": bandwidth,
    "kernels": fused,
    "equality": equality,
    "passes": passes,
    "rollbacks": rollbacks,
    "loop": loop,
    "memory": memory,
    "prefill": prefill,
}


def described(device: torch.device) -> dict:
    """Device, machine and versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, **machine(torch.get_num_threads()), **versions(PACKAGES)}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the sections.

    Returns:
        0, or 1 if a section failed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks gpu",
        description=__doc__,
        epilog="example: python -m benchmarks gpu --json gpu.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true", help="tiny dimensions, few repeats: does it run?")
    parser.add_argument("--section", action="append", choices=list(SECTIONS), help="repeat for several; default: all")
    parser.add_argument("--layers", type=int, default=16, help="three of four are gated delta rule layers (default 16)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens before the first block (default 512)")
    parser.add_argument("--k", type=int, default=8, help="longest draft (default 8)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=420, help="no section starts after these (default 420)")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    arguments = parser.parse_args(argv)
    for name in ("layers", "prompt", "k", "repeats"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1")
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is visible: --device cpu --smoke runs the same code without one")
    if device.type != "cuda" and not arguments.smoke:
        parser.error("without a GPU only --smoke is quick enough")
    if arguments.smoke:
        arguments.layers, arguments.prompt = min(arguments.layers, 4), min(arguments.prompt, 40)
        arguments.k, arguments.repeats = min(arguments.k, 3), min(arguments.repeats, 3)
    console = command.console()
    bench = Bench(device, arguments.smoke, arguments.layers, arguments.prompt, arguments.repeats, arguments.k, console)
    results = bench.results
    results["machine"] = described(device)
    results["settings"] = {n: getattr(arguments, n) for n in ("layers", "prompt", "k", "repeats", "smoke")}
    results["settings"]["dimensions"] = bench.dimensions
    failed: dict[str, str] = {}
    left_out: list[str] = []
    start = time.perf_counter()
    console.print(", ".join(f"{key} {value}" for key, value in results["machine"].items()), soft_wrap=True)
    for name in arguments.section or SECTIONS:
        if time.perf_counter() - start > arguments.seconds:
            left_out.append(name)
            continue
        begun = time.perf_counter()
        try:
            with torch.inference_mode():
                results[name] = SECTIONS[name](bench)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
            console.print(f"{name}: FAILED, {failed[name]}", style="red", markup=False)
            bench._sessions.clear()
        console.print(f"{name}: {time.perf_counter() - begun:.1f} s", style="dim")
        results |= {"failed": failed, "left_out": left_out, "seconds": time.perf_counter() - start}
        if arguments.json:
            # After each section: what was measured stays, whatever happens next.
            arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    if left_out:
        console.print(f"no time left for {', '.join(left_out)}")
    console.print(
        f"{len(failed)} of {len(arguments.section or SECTIONS)} sections failed", style="red" if failed else ""
    )
    return 1 if failed else 0
