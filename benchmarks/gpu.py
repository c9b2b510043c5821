"""What speculative decoding of a large hybrid costs on one GPU: random weights at real dimensions, forced acceptance.

``--device cpu --smoke`` runs the same code in seconds: does it work?

The model is a stack of a few Qwen3.5-27B-like layers (three of the gated delta rule to one of attention) in bf16, made
on the device from a config: nothing is downloaded. Results are checked before they are timed. A section that fails
prints its error, the others go on, and the exit status is 1. No section starts after ``--seconds``.

Runners: ``eager`` is TargetRunner, ``static`` StaticRunner without graphs, ``graph`` StaticRunner.
"""

import argparse
import json
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks import command
from benchmarks.gpu_bench import GpuBench
from benchmarks.gpu_kernels import bandwidth, fused
from benchmarks.gpu_passes import equality, loop, memory, passes, prefill, rollbacks
from benchmarks.machine import machine, versions

#: What decides which kernels run.
PACKAGES = ("triton", "flash-linear-attention", "causal-conv1d")
SECTIONS: dict[str, Callable[[GpuBench], dict]] = {
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
    bench = GpuBench(
        device, arguments.smoke, arguments.layers, arguments.prompt, arguments.repeats, arguments.k, console
    )
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
            bench.forget_sessions()
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
