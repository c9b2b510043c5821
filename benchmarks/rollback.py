"""What taking tokens back costs: one mixer layer of a real model, every rollback mode, in one interleaved run.

    python benchmarks/rollback.py

For each mixer family it builds transformers' own model class with one layer of the real dimensions and random weights.
A verify pass feeds K + 1 tokens through it; then all of them are kept (full commit) or 1 to K in turn (partial
commit). Modes take turns within a repetition. Times are those of the mixer with its projections, and of all that the
cache does; what the model does around the mixer (embedding, norms, an attention layer that some models insist on) is
taken off. ``replay`` is ``recompute`` on our short form: back to a snapshot, and the kept tokens once more; that is
what recompute would cost if transformers' many-token paths were as quick. Run it on a quiet machine; it records the
load.
"""

import argparse
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hybridspec.layers import RecurrentLayer
from hybridspec.runner import TargetRunner
from hybridspec.session import Session
from hybridspec.storages import recurrent_bytes

MODES = ("tape", "slots", "replay", "recompute")
VOCABULARY = 64
PROMPT = 17
#: Of a partial commit of ``tape``, in parts of its verify pass.
WANTED = 0.05


@dataclass(frozen=True)
class Layer:
    """One layer of a real model.

    ``real`` and ``tiny`` are the fields of the config that set its dimensions; ``mixer`` ends the mixer's class name.
    """

    model: str
    model_type: str
    mixer: str
    common: dict
    real: dict
    tiny: dict


LAYERS = {
    # hf.co/Qwen/Qwen3.5-27B: 48 value heads and 16 key heads of 128.
    "gated delta rule": Layer(
        "Qwen3.5-27B",
        "qwen3_5_text",
        "GatedDeltaNet",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 16,
        },
        {
            "hidden_size": 5120,
            "linear_num_value_heads": 48,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
        {
            "hidden_size": 64,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    # hf.co/moonshotai/Kimi-Linear-48B-A3B-Instruct: 32 heads of 128.
    "Kimi delta attention": Layer(
        "Kimi-Linear-48B-A3B",
        "kimi_linear",
        "DeltaAttention",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "dense"],
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
        {"hidden_size": 2304, "linear_num_heads": 32, "linear_head_dim": 128},
        {"hidden_size": 64, "linear_num_heads": 4, "linear_head_dim": 16},
    ),
    # hf.co/nvidia/Nemotron-H-8B-Base-8K: 128 heads of 64, state of 128, 8 groups.
    "SSD": Layer(
        "Nemotron-H-8B",
        "nemotron_h",
        "Mamba2Mixer",
        {
            "layers_block_type": ["linear_attention", "full_attention"],
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "use_mamba_kernels": False,
        },
        {
            "hidden_size": 4096,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
        },
        {"hidden_size": 64, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
    ),
    # hf.co/ai21labs/Jamba-v0.1: inner width of 8192, state of 16.
    "selective scan": Layer(
        "Jamba-v0.1",
        "jamba",
        "MambaMixer",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "use_mamba_kernels": False,
        },
        {"hidden_size": 4096, "mamba_expand": 2, "mamba_d_state": 16, "mamba_dt_rank": 256},
        {"hidden_size": 64, "mamba_expand": 2, "mamba_d_state": 16, "mamba_dt_rank": 8},
    ),
    # hf.co/MiniMaxAI/MiniMax-Text-01: 64 heads of 128.
    "lightning attention": Layer(
        "MiniMax-Text-01",
        "minimax",
        "LightningAttention",
        {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 1, "num_experts_per_tok": 1},
        {"hidden_size": 6144, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128},
        {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    ),
    # hf.co/google/recurrentgemma-9b: width of 4096, 16 blocks of gates.
    "RG-LRU": Layer(
        "RecurrentGemma-9B",
        "recurrent_gemma",
        "RecurrentBlock",
        {"block_types": ["recurrent", "attention"], "num_key_value_heads": 1},
        {"hidden_size": 4096, "lru_width": 4096, "num_attention_heads": 16, "head_dim": 256},
        {"hidden_size": 64, "lru_width": 64, "num_attention_heads": 4, "head_dim": 16},
    ),
    # hf.co/LiquidAI/LFM2-2.6B: width of 2048, window of 3.
    "short convolution": Layer(
        "LFM2-2.6B",
        "lfm2",
        "ShortConv",
        {
            "layer_types": ["conv", "full_attention"],
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
        },
        {"hidden_size": 2048},
        {"hidden_size": 64},
    ),
}
AROUND = {
    "num_hidden_layers": 2,
    "intermediate_size": 8,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Around:
    """Seconds (wall, CPU) that a model has spent outside of ``mixer``."""

    def __init__(self, model: nn.Module, mixer: nn.Module) -> None:
        self.total = self._since = (0.0, 0.0)
        model.register_forward_pre_hook(self._leave)
        mixer.register_forward_pre_hook(self._enter)
        mixer.register_forward_hook(self._leave)
        model.register_forward_hook(self._enter)

    def _leave(self, *_: object) -> None:
        self._since = now()

    def _enter(self, *_: object) -> None:
        self.total = plus(self.total, minus(now(), self._since))


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def plus(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    return a[0] + b[0], a[1] + b[1]


def minus(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    return a[0] - b[0], a[1] - b[1]


@dataclass
class Samples:
    """Seconds (wall, CPU) of each repetition."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @contextmanager
    def timed(self, around: Around) -> Iterator[None]:
        begun, before = now(), around.total
        yield
        wall, cpu = minus(minus(now(), begun), minus(around.total, before))
        self.wall.append(wall)
        self.cpu.append(cpu)

    def summary(self) -> dict[str, float]:
        low, middle, high = np.quantile(self.wall, [0.25, 0.5, 0.75]) * 1e3
        return {
            "median_milliseconds": float(middle),
            "quartile_1": float(low),
            "quartile_3": float(high),
            "cpu_median_milliseconds": float(np.median(self.cpu) * 1e3),
        }


class Way:
    """One sequence under one rollback mode, and the times of its steps."""

    def __init__(self, runner: TargetRunner, mode: str, around: Around) -> None:
        self.mode, self.around = mode, around
        self.session: Session = runner.start([3 + i % (VOCABULARY - 3) for i in range(PROMPT)])
        self.verify, self.full, self.partial = Samples(), Samples(), Samples()
        self.bytes = self.tape_bytes = 0

    def step(self, block: Sequence[int], keep: int) -> None:
        session, mark = self.session, None
        with self.verify.timed(self.around):
            if self.mode == "replay":
                mark = session.snapshot()
            session.verify(block)
        self.bytes = max(self.bytes, session.recurrent_bytes)
        if self.mode == "tape":
            self.tape_bytes = recurrent_bytes([session.cache._blocks])
        whole = keep == len(block)
        with (self.full if whole else self.partial).timed(self.around):
            if mark is not None and not whole:
                session.restore(mark)
                session.verify(block[:keep])
            session.commit(keep)

    def forget(self) -> None:
        """Drops what a warm-up has measured: its windows still share the storage of the prompt's."""
        self.verify, self.full, self.partial = Samples(), Samples(), Samples()
        self.bytes = self.tape_bytes = 0


def plane_bytes(session: Session) -> tuple[int, int]:
    """Bytes of the recurrent states and of the convolution windows at a committed position: what decoding needs."""
    layers = [layer for layer in session.cache.layers if isinstance(layer, RecurrentLayer)]
    states = [layer.recurrent_states.get(0) for layer in layers]
    windows = [window for layer in layers for window in layer.conv_states.values()]
    state, window = ([x for x in tensors if x is not None] for tensors in (states, windows))
    return sum(x.nbytes for x in state), sum(x.nbytes for x in window)


def build(layer: Layer, smoke: bool) -> nn.Module:
    config = CONFIG_MAPPING[layer.model_type](**AROUND | layer.common | (layer.tiny if smoke else layer.real))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float().eval()


def measure(layer: Layer, arguments: argparse.Namespace) -> dict:
    model = build(layer, arguments.smoke)
    mixer = next(m for m in model.modules() if type(m).__name__.endswith(layer.mixer))
    runners = {mode: TargetRunner(model, rollback=mode) for mode in ("tape", "slots", "recompute")}
    around = Around(model, mixer)
    ways = {mode: Way(runners.get(mode, runners["tape"]), mode, around) for mode in MODES}
    rng = np.random.default_rng(0)
    k = arguments.k
    gc.collect()
    gc.disable()
    try:
        for repeat in range(-arguments.warm_up, arguments.repeats):
            if repeat == 0:
                for way in ways.values():
                    way.forget()
            for way in list(ways.values())[:: -1 if repeat % 2 else 1]:
                for keep in (k + 1, 1 + repeat % k):
                    way.step(rng.integers(3, VOCABULARY, k + 1).tolist(), keep)
    finally:
        gc.enable()
    state, window = plane_bytes(ways["tape"].session)
    tape = ways["tape"]
    return {
        "model": layer.model,
        "model_type": layer.model_type,
        "mixer": type(mixer).__name__,
        "dimensions": layer.tiny if arguments.smoke else layer.real,
        "mixer_parameters": sum(p.numel() for p in mixer.parameters()),
        "state_bytes": state,
        "window_bytes": window,
        "tape_bytes": tape.tape_bytes,
        "modes": {mode: report(way, tape, state + window) for mode, way in ways.items()},
    }


def report(way: Way, tape: Way, plain: int) -> dict:
    """Times and bytes of one mode.

    Shares are of the verify pass of ``tape``, the quickest there is. Bytes are those held while a block is pending,
    also in parts of the ``plain`` ones that decoding without speculation holds.
    """
    return {
        "verify": way.verify.summary(),
        "full_commit": way.full.summary(),
        "partial_commit": way.partial.summary(),
        "full_share": share(way.full, tape.verify),
        "partial_share": share(way.partial, tape.verify),
        "partial_share_of_own_verify": share(way.partial, way.verify),
        # A replay is measured on a cache that has a tape, which it would not need.
        "bytes": None if way.mode == "replay" else way.bytes,
        "bytes_of_plain": None if way.mode == "replay" else way.bytes / plain,
    }


def share(part: Samples, whole: Samples, draws: int = 2000) -> dict[str, float | list[float]]:
    """Ratio of medians, with a 90 % bootstrap interval over repetitions."""
    rng = np.random.default_rng(0)
    over, under = np.array(part.wall), np.array(whole.wall)
    samples = [np.median(rng.choice(over, len(over))) / np.median(rng.choice(under, len(under))) for _ in range(draws)]
    return {
        "wall": float(np.median(over) / np.median(under)),
        "interval_90": [float(x) for x in np.quantile(samples, [0.05, 0.95])],
        "cpu": float(np.median(part.cpu) / max(float(np.median(whole.cpu)), 1e-9)),
    }


def machine(threads: int) -> dict:
    """Where and with what this ran."""
    names = [
        line.partition(":")[2].strip()
        for line in (Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ())
        if line.startswith("model name")
    ]
    packages = ("torch", "transformers", "hybridspec", "numpy")
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def family_table(name: str, result: dict, k: int) -> Table:
    dimensions = ", ".join(f"{key} {value}" for key, value in result["dimensions"].items())
    table = Table(
        title=f"{name} ({result['model']}: {dimensions}); state {size(result['state_bytes'])}, "
        f"window {size(result['window_bytes'])}, tape {size(result['tape_bytes'])}",
        title_justify="left",
    )
    headings = (
        "",
        f"verify of {k + 1}, ms (CPU)",
        "full commit, ms",
        "partial commit, ms (CPU)",
        "partial / tape's verify (90 %; CPU)",
        "held",
        "of plain",
    )
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    for mode, row in result["modes"].items():
        verify, full, partial, part = (row[x] for x in ("verify", "full_commit", "partial_commit", "partial_share"))
        table.add_row(
            mode,
            f"{verify['median_milliseconds']:.2f} ({verify['cpu_median_milliseconds']:.2f})",
            f"{full['median_milliseconds']:.3f}",
            f"{partial['median_milliseconds']:.3f} ({partial['cpu_median_milliseconds']:.3f})",
            "{:.1%} ({:.1%} to {:.1%}; {:.1%})".format(part["wall"], *part["interval_90"], part["cpu"]),
            "-" if row["bytes"] is None else size(row["bytes"]),
            "-" if row["bytes_of_plain"] is None else f"{row['bytes_of_plain']:.2f}",
        )
    return table


def size(count: int) -> str:
    return f"{count / 1024:.1f} KiB" if count < 1024**2 else f"{count / 1024**2:.2f} MiB"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", choices=list(LAYERS), help="repeat for several; default: all")
    parser.add_argument("--k", type=int, default=4, help="drafted tokens; a block has one more (default 4)")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=3, help="repetitions whose times are dropped")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="tiny dimensions, few repeats: does it run?")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    arguments = parser.parse_args(argv)
    if arguments.k < 1 or arguments.repeats < 1:
        parser.error("--k and --repeats must be at least 1")
    if arguments.smoke:
        arguments.repeats, arguments.warm_up = min(arguments.repeats, 4), 1
    torch.set_num_threads(arguments.threads)
    console = Console(width=None if Console().is_terminal else 150)
    result = {
        "machine": machine(arguments.threads),
        "settings": {"k": arguments.k, "repeats": arguments.repeats, "smoke": arguments.smoke},
        "load_average_at_start": os.getloadavg()[0],
        "families": {},
    }
    console.print(", ".join(f"{key} {value}" for key, value in result["machine"].items()), soft_wrap=True)
    for name in arguments.family or LAYERS:
        layer = LAYERS[name]
        if layer.model_type not in CONFIG_MAPPING:
            console.print(f"{name}: left out, transformers {version('transformers')} has no {layer.model_type}")
            continue
        result["families"][name] = measure(layer, arguments)
        console.print(family_table(name, result["families"][name], arguments.k))
    result["load_average_at_end"] = os.getloadavg()[0]
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    beyond = {
        name: round(family["modes"]["tape"]["partial_share"]["wall"], 3)
        for name, family in result["families"].items()
        if family["modes"]["tape"]["partial_share"]["wall"] > WANTED
    }
    if not arguments.smoke:
        console.print(f"Partial commits of tape above {WANTED:.0%} of its verify pass: {beyond or 'none'}")
    loads = (result[f"load_average_at_{when}"] for when in ("start", "end"))
    console.print("load average {:.1f} at the start, {:.1f} at the end".format(*loads))


if __name__ == "__main__":
    sys.exit(main())
