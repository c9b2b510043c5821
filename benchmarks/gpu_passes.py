"""Sections of the GPU benchmark on whole passes: equality, verify, rollback, the loop, memory, prefill."""

import time

import torch

from benchmarks.gpu_bench import GpuBench
from benchmarks.gpu_kernels import blocks
from benchmarks.machine import versions
from hybridspec.decoding import acceptance
from hybridspec.decoding.proposal import Proposal
from hybridspec.decoding.sampling import Sampling
from hybridspec.recurrence.tape import rollback


def equality(bench: GpuBench) -> dict:
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
                    pairs = zip(session.cache.recurrent_states(), expected.cache.recurrent_states(), strict=True)
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


def passes(bench: GpuBench) -> dict:
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


def rollbacks(bench: GpuBench) -> dict:
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


def loop(bench: GpuBench) -> dict:
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


def memory(bench: GpuBench) -> dict:
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


def prefill(bench: GpuBench) -> dict:
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
