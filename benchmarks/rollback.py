"""What taking tokens back costs: one mixer layer of a real model, every rollback mode, in one interleaved run.

For each mixer family it builds transformers' own model class with one layer of the real dimensions and random weights.
A verify pass feeds K + 1 tokens through it; then all of them are kept (full commit) or 1 to K in turn (partial
commit). Modes take turns within a repetition. Times are those of the mixer with its projections, and of all that the
cache does; what the model does around the mixer (embedding, norms, an attention layer that some models insist on) is
taken off. ``replay`` is ``recompute`` on our short form: back to a snapshot, and the kept tokens once more; that is
what recompute would cost if transformers' many-token paths were as quick. ``naive`` is transformers without us: a deep
copy of its cache before the block, what is kept fed to the original. Run it on a quiet machine; it records the load.
"""

import argparse
import copy
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks import command
from benchmarks.decoders import now
from benchmarks.grids import Grid, size
from benchmarks.intervals import ratio_of_medians, summary
from benchmarks.mixer_layers import AROUND, LAYERS, VOCABULARY, MixerLayer
from benchmarks.state_bytes import plane_bytes
from benchmarks.transformers_model import TransformersModel
from hybridspec.runtime.runner import TargetRunner
from hybridspec.runtime.session import Session
from hybridspec.state.memory import recurrent_bytes

MODES = ("tape", "slots", "replay", "recompute", "naive")
PROMPT = 17
#: Of a partial commit of ``tape``, in parts of its verify pass.
WANTED = 0.02


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
        return summary(self.wall) | {"cpu_median_milliseconds": float(np.median(self.cpu) * 1e3)}


class TimedSequence:
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
        self.bytes = max(self.bytes, recurrent_bytes([session.cache]))
        if self.mode == "tape":
            self.tape_bytes = recurrent_bytes([session.cache.tapes])
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


class NaiveSequence(TimedSequence):
    """transformers alone: its cache, copied as a whole."""

    def __init__(self, runner: TargetRunner, around: Around) -> None:
        self.mode, self.around = "naive", around
        self.model, self.one_by_one = TransformersModel(runner.model), runner.one_by_one
        self.cache, self.length = self.model.dynamic_cache(), 0
        self.feed(self.cache, [3 + i % (VOCABULARY - 3) for i in range(PROMPT)])
        self.length = PROMPT
        self.forget()

    def feed(self, cache: object, block: Sequence[int]) -> None:
        """One token at a time where several would start from zeros."""
        width = 1 if self.one_by_one and self.length else len(block)
        for start in range(0, len(block), width):
            self.model(block[start : start + width], cache, self.length + start)

    def step(self, block: Sequence[int], keep: int) -> None:
        with self.verify.timed(self.around):
            scratch = copy.deepcopy(self.cache)
            self.feed(scratch, block)
        self.bytes = max(self.bytes, recurrent_bytes([self.cache, scratch]))
        whole = keep == len(block)
        with (self.full if whole else self.partial).timed(self.around):
            if whole:
                self.cache = scratch
            else:
                self.feed(self.cache, block[:keep])
        self.length += keep


def build(layer: MixerLayer, smoke: bool, seed: int) -> nn.Module:
    config = CONFIG_MAPPING[layer.model_type](**AROUND | layer.common | (layer.tiny if smoke else layer.real))
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).float().eval()


def measure(layer: MixerLayer, arguments: argparse.Namespace) -> dict:
    model = build(layer, arguments.smoke, arguments.seed)
    mixer = next(m for m in model.modules() if type(m).__name__.endswith(layer.mixer))
    runners = {mode: TargetRunner(model, rollback=mode) for mode in ("tape", "slots", "recompute")}
    around = Around(model, mixer)
    ways = {mode: TimedSequence(runners.get(mode, runners["tape"]), mode, around) for mode in MODES if mode != "naive"}
    if layer.copied:
        ways["naive"] = NaiveSequence(runners["tape"], around)
    rng = np.random.default_rng(arguments.seed)
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


def report(way: TimedSequence, tape: TimedSequence, plain: int) -> dict:
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


def share(part: Samples, whole: Samples) -> dict[str, float | list[float]]:
    wall, interval = ratio_of_medians(part.wall, whole.wall)
    cpu = float(np.median(part.cpu) / max(float(np.median(whole.cpu)), 1e-9))
    return {"wall": wall, "interval_90": interval, "cpu": cpu}


def tables(result: dict) -> list[Grid]:
    k = result["settings"]["k"]
    grids = []
    for name, family in result["families"].items():
        dimensions = ", ".join(f"{key} {value}" for key, value in family["dimensions"].items())
        grid = Grid(
            f"{name} ({family['model']}: {dimensions}); state {size(family['state_bytes'])}, "
            f"window {size(family['window_bytes'])}, tape {size(family['tape_bytes'])}",
            (
                "",
                f"verify of {k + 1}, ms (CPU)",
                "full commit, ms",
                "partial commit, ms (CPU)",
                "partial / tape's verify (90 %; CPU)",
                "held",
                "of plain",
            ),
        )
        for mode, row in family["modes"].items():
            verify, full, partial, part = (row[x] for x in ("verify", "full_commit", "partial_commit", "partial_share"))
            grid.rows.append(
                (
                    mode,
                    f"{verify['median_milliseconds']:.2f} ({verify['cpu_median_milliseconds']:.2f})",
                    f"{full['median_milliseconds']:.3f}",
                    f"{partial['median_milliseconds']:.3f} ({partial['cpu_median_milliseconds']:.3f})",
                    "{:.1%} ({:.1%} to {:.1%}; {:.1%})".format(part["wall"], *part["interval_90"], part["cpu"]),
                    "-" if row["bytes"] is None else size(row["bytes"]),
                    "-" if row["bytes_of_plain"] is None else f"{row['bytes_of_plain']:.2f}",
                )
            )
        grids.append(grid)
    if grids:
        grids[-1].notes.append(verdict(result))
    return grids


def verdict(result: dict) -> str:
    shares = {name: family["modes"]["tape"]["partial_share"]["wall"] for name, family in result["families"].items()}
    beyond = ", ".join(f"{name} {value:.1%}" for name, value in shares.items() if value > WANTED)
    return f"Partial commits of tape above {WANTED:.0%} of its verify pass: {beyond or 'none'}."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.options("rollback", __doc__, '--family "gated delta rule" --save')
    parser.add_argument("--family", action="append", choices=list(LAYERS), help="repeat for several; default: all")
    parser.add_argument("--k", type=command.at_least(1), default=4, help="drafted tokens; a block has one more")
    parser.add_argument("--repeats", type=command.at_least(1), default=30)
    parser.add_argument(
        "--warm-up", type=command.at_least(0), default=3, help="repetitions whose times are dropped (default 3)"
    )
    chosen = parser.parse_args(arguments)
    if chosen.smoke:
        chosen.repeats, chosen.warm_up = min(chosen.repeats, 4), 1
    torch.set_num_threads(chosen.threads)
    console = command.console()
    with command.recorded(chosen, console) as result:
        result["families"] = {}
        try:
            for name in chosen.family or LAYERS:
                layer = LAYERS[name]
                if layer.model_type not in CONFIG_MAPPING:
                    missing = f"transformers {version('transformers')} has no {layer.model_type}"
                    console.print(f"{name}: left out, {missing}")
                    continue
                console.print(name)
                result["families"][name] = measure(layer, chosen)
        except KeyboardInterrupt:
            console.print("interrupted; what follows is about the families that are done")
    command.show(console, tables(result))
    return 0
