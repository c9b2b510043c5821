"""Sections of the GPU benchmark on single kernels: a copy, and the fused recurrences against their torch forms."""

import os
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu_bench import GpuBench
from hybridspec.recurrence import gated_delta, kernels, ssd

#: Of a layer as in Nemotron-H-8B: heads, channels of each, state, groups.
SSD_REAL, SSD_SMALL = (128, 64, 128, 8), (4, 16, 16, 2)


def bandwidth(bench: GpuBench) -> dict:
    """The peak that all else is held against: a copy of a large tensor, read and written."""
    size = (1 << 24) if bench.smoke else (1 << 31)
    source = torch.empty(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    taken = bench.time(lambda: target.copy_(source))
    rate = 2 * size / taken["milliseconds"] / 1e6
    bench.console.print(f"copy: {rate:.0f} GB/s")
    return taken | {"bytes": 2 * size, "gigabytes_per_second": rate}


def blocks(bench: GpuBench, tokens: int) -> dict[str, tuple[Callable, dict[str, Tensor]]]:
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


def fused(bench: GpuBench) -> dict:
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
