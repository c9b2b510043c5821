"""The whole way from a target to a draft of its own architecture; every stage resumes.

The folder of the draft is an ordinary checkpoint with ``distillation.json``, its provenance; ``training/`` in it holds
what a later call goes on from (token files, the target's outputs, optimizer state) and may be deleted.
"""

import dataclasses
import hashlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from hybridspec.decoding.loop import check_length, decode
from hybridspec.decoding.sampling import Sampling
from hybridspec.drafts.distillation.acceptance import measure
from hybridspec.drafts.distillation.continuations import TEMPERATURES, continue_windows
from hybridspec.drafts.distillation.corpus import Corpus, identity, prepare
from hybridspec.drafts.distillation.cut import check_kept, cut_model, shared_parts
from hybridspec.drafts.distillation.documents import text_files
from hybridspec.drafts.distillation.layer_choice import choose_layers, default_count, layer_kinds
from hybridspec.drafts.distillation.matching import Lessons, OutputPool, learn
from hybridspec.drafts.distillation.sitting import Processes, Sitting
from hybridspec.drafts.distillation.training_kernels import CHUNK, training_kernels
from hybridspec.errors import HybridspecError, InputError, UnsupportedLayerError
from hybridspec.runtime.runner import TargetRunner

PROVENANCE = "distillation.json"
#: Share of the time that goes into outputs of the target to learn from, and how they are made.
OUTPUT_SHARE = 0.2
OUTPUT_ROWS = 16
OUTPUT_PROMPT = 32

#: ``progress(stage, share of the stage that is done, what is known)``.
Progress = Callable[[str, float, str], None]


@dataclass(frozen=True)
class Settings:
    """What to make.

    Args:
        layers: how many of the target's layers the draft gets, chosen by :func:`choose_layers`; None: a twelfth.
        keep_layers: their numbers, instead.
        minutes: time for the target's outputs and the training, over all sittings.
        k: draft length of the held-out measurement.
        rows: windows of corpus text in a step; as many of the target's outputs come beside them.
        length: tokens of a window.
        rate: factor on the learning rates.
        prompts: held-out prompts to decode, each by ``new_tokens``.
        train_shared: train embeddings, norm and head too, instead of keeping the target's.
    """

    layers: int | None = None
    keep_layers: tuple[int, ...] | None = None
    minutes: float = 10.0
    k: int = 4
    rows: int = 2
    length: int = 256
    seed: int = 0
    rate: float = 1.0
    prompts: int = 14
    new_tokens: int = 48
    train_shared: bool = False

    def __post_init__(self) -> None:
        for name, least in (("k", 1), ("rows", 1), ("length", 8), ("prompts", 1), ("new_tokens", 2), ("seed", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name in ("minutes", "rate"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.layers is not None and self.keep_layers is not None:
            raise InputError("give a number of layers or the layers to keep, not both")

    def identity(self) -> dict:
        """What a sitting must have in common with an earlier one; budget and measurement may differ."""
        return {name: getattr(self, name) for name in ("rows", "length", "seed", "rate", "train_shared")}


def distill(
    target: TargetRunner,
    corpus: Sequence[Path],
    out: Path,
    settings: Settings = Settings(),
    held_out: Sequence[Path] = (),
    progress: Progress = lambda *_: None,
) -> dict:
    """Makes a draft of ``target`` in the folder ``out``, or goes on where an earlier call stopped.

    Args:
        target: loaded with :meth:`TargetRunner.from_pretrained`.
        corpus: text files, ``.gz`` files, JSON Lines, and folders of these.
        held_out: text to test on; without any, a part of the corpus is kept back.

    Returns:
        What ``distillation.json`` holds. ``complete`` is false if SIGINT ended the training early; what was trained is
        saved then, and the same call goes on.

    Raises:
        InputError: an option, the corpus or ``out`` is not usable; says what to do.
        UnsupportedLayerError: no draft can be cut of these layers.
        HybridspecError: the loss is no longer a number.
    """
    return _Distillation(target, corpus, out, settings, held_out, progress).run()


class _Distillation:
    def __init__(
        self,
        target: TargetRunner,
        corpus: Sequence[Path],
        out: Path,
        settings: Settings,
        held_out: Sequence[Path],
        progress: Progress,
    ) -> None:
        self.target, self.settings, self.out, self.progress = target, settings, out, progress
        self.model: PreTrainedModel = target.model
        self.work = out / "training"
        kinds = layer_kinds(self.model)
        if settings.keep_layers is not None:
            self.kept = check_kept(settings.keep_layers, len(kinds))
        else:
            self.kept = choose_layers(kinds, default_count(kinds) if settings.layers is None else settings.layers)
        self.draft = cut_model(self.model, self.kept).float()
        try:
            self.untrained = TargetRunner(self.draft, target.tokenizer, target.rollback)
        except UnsupportedLayerError as error:
            raise UnsupportedLayerError(
                f"a draft of layers {', '.join(map(str, self.kept))} cannot run by itself: {error} Or choose more "
                "--layers, or others with --keep-layers."
            ) from error
        self.files, tests = (text_files([Path(path) for path in paths]) for paths in (corpus, held_out))
        if not self.files:
            raise InputError("no corpus: give text files or folders of them")
        if settings.length > target.max_length:
            raise InputError(f"windows of {settings.length} tokens exceed the context of {target.max_length}")
        # Whatever the prompt, it has two tokens.
        check_length(target, [0, 0], settings.new_tokens, settings.k)
        self.known = {
            "target": fingerprint(target),
            "kept_layers": self.kept,
            "corpus": identity(self.files),
            "heldout": identity(tests),
            **settings.identity(),
        }
        self.state = self._open()
        self.corpus: Corpus = prepare(
            self.files,
            tests,
            target.tokenizer,
            target.vocab_size,
            self.work / "tokens",
            settings.length,
            settings.minutes,
            lambda text, share: progress("corpus", share, text),
        )
        self.prompts = self.corpus.prompts(target.tokenizer, settings.prompts, longest=96)
        for source, prompt in self.prompts:
            try:
                check_length(target, prompt, settings.new_tokens, settings.k)
            except HybridspecError as error:
                raise type(error)(f"held-out prompt of {source}: {error}") from error
        # Not before: a corpus that was refused may be another the next time.
        self._save_state()
        self.windows = self.corpus.held_out_windows(target.tokenizer, settings.length, count=16)

    def _open(self) -> dict:
        """The state of earlier calls in ``out``, or a fresh one.

        Raises:
            InputError: ``out`` holds something else.
        """
        if self.target.path and self.out.resolve() == self.target.path:
            raise InputError(f"--out {self.out}: is the target itself. Choose another folder.")
        record = self.work / "state.json"
        if not record.is_file() and (self.out / "config.json").exists():
            raise InputError(
                f"--out {self.out}: holds a checkpoint, and nothing that its training could go on from. "
                "Choose another folder."
            )
        try:
            self.work.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--out {self.out}: cannot make this folder: {error.strerror}") from error
        if not os.access(self.work, os.W_OK):
            raise InputError(f"--out {self.out}: this folder is not writable. Choose another.")
        if not record.is_file():
            return {"known": self.known, "held_out": {}, "losses": None, "output_seconds": 0.0, "fresh_tokens": 0}
        with self._going_on(record):
            state = json.loads(record.read_text(encoding="utf-8"))
        for name, value in self.known.items():
            if state["known"][name] != value:
                raise InputError(
                    f"--out {self.out}: begun with another {name.replace('_', ' ')} ({_short(state['known'][name])}, "
                    f"now {_short(value)}). Choose another folder, or the same {name.replace('_', ' ')}."
                )
        return state

    @contextmanager
    def _going_on(self, path: Path) -> Iterator[None]:
        """Turns whatever is wrong with a file of an earlier sitting into an :class:`InputError`."""
        try:
            yield
        except Exception as error:
            raise InputError(
                f"{path}: training cannot go on from it ({error}). Delete the folder {self.out}, or choose another."
            ) from error

    def _save_state(self) -> None:
        _write_json(self.work / "state.json", self.state)

    def run(self) -> dict:
        rollback = self.target.rollback
        before = self._measured("before", 0, lambda: self.untrained)
        self._make_outputs()
        sitting = self._train()
        self.draft.save_pretrained(self.out)
        self.target.tokenizer.save_pretrained(self.out)
        provenance = self._provenance(sitting, before, None)
        if sitting.stop_asked:
            return provenance
        load = lambda: TargetRunner.from_pretrained(self.out, rollback=rollback)  # noqa: E731
        return self._provenance(sitting, before, self._measured("after", sitting.step, load))

    def _measured(self, name: str, steps: int, load: Callable[[], TargetRunner]) -> dict:
        """Held-out figures of the draft after ``steps``, measured now or in an earlier sitting."""
        settings, stored = self.settings, self.state["held_out"]
        key = [steps, settings.k, settings.prompts, settings.new_tokens]
        if stored.get(name, {}).get("key") != key:
            stage = f"held-out text, {name}"
            figures = measure(
                self.target,
                load(),
                self.prompts,
                self.windows,
                settings.k,
                settings.new_tokens,
                lambda text, share: self.progress(stage, share, text),
            )
            stored[name] = {"key": key, "figures": dataclasses.asdict(figures)}
            self._save_state()
        return stored[name]["figures"]

    def _make_outputs(self) -> None:
        """Adds to the pool of the target's own outputs until their share of the time is used."""
        settings, pool_file = self.settings, self.work / "outputs.npy"
        budget = 60 * settings.minutes * OUTPUT_SHARE
        length = settings.length + 1
        prompt = min(OUTPUT_PROMPT, length // 2)
        sampler = self.corpus.sampler(settings.seed)
        with self._going_on(pool_file):
            pool = [np.load(pool_file)] if pool_file.is_file() else []
        while self.state["output_seconds"] < budget:
            begun = time.monotonic()
            made = sum(map(len, pool))
            self.progress("outputs of the target", self.state["output_seconds"] / budget, f"{made} made")
            windows = sampler.batch(made, 1, OUTPUT_ROWS, prompt - 1)
            generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + made)
            share = self.state["output_seconds"] / budget
            tick = lambda n, made=made, share=share: self.progress(  # noqa: E731
                "outputs of the target", share, f"{made} made, {OUTPUT_ROWS} at {n} of {length} tokens"
            )
            try:
                rows = continue_windows(self.model, windows, length, generator, tick)
            except UnsupportedLayerError:
                rows = self._continue_one_by_one(windows, length, generator, tick)
            pool.append(rows.numpy().astype(self.corpus.dtype))
            partial = pool_file.with_suffix(".partial.npy")
            np.save(partial, np.concatenate(pool))
            partial.replace(pool_file)
            self.state["output_seconds"] += time.monotonic() - begun
            self._save_state()
        self.progress("outputs of the target", 1.0, f"{sum(map(len, pool))} made")

    def _continue_one_by_one(
        self, windows: torch.Tensor, length: int, generator: torch.Generator, tick: Callable[[int], None]
    ) -> torch.Tensor:
        """As :func:`continue_windows`, for a model that only our own sessions can continue."""
        rows = []
        for number, window in enumerate(windows.tolist()):
            sampling = Sampling(TEMPERATURES[number % len(TEMPERATURES)])
            options = {"max_new_tokens": length - len(window), "sampling": sampling, "generator": generator}
            rows.append(
                [*window, *(token.id for token in decode(self.target, window, stop_tokens=frozenset(), **options))]
            )
            tick(round(length * (number + 1) / len(windows)))
        return torch.tensor(rows)

    def _train(self) -> Sitting:
        settings, draft = self.settings, self.draft
        if not settings.train_shared:
            for parameter in shared_parts(draft):
                parameter.requires_grad_(False)
        corpus = self.corpus.sampler(settings.seed)
        outputs = OutputPool([self.work / "outputs.npy"], settings.seed)
        lessons = Lessons(self.model, 2 * settings.rows, settings.length, settings.seed)
        losses: dict[str, float] = {}

        def watch(row: dict) -> None:
            losses.update(loss=row["draft_loss"], agreement=row["draft_agreement"])
            text = f"loss {row['draft_loss']:.3f}, agreement {row['draft_agreement']:.0%}"
            self.progress("training", row["progress"], f"{text}, {row['tokens_per_second']} tokens/s")

        def draw(step: int) -> torch.Tensor:
            parts = [source.batch(step, 0, settings.rows, settings.length) for source in (corpus, outputs)]
            return torch.cat(parts)[:, :-1]

        def train_step(step: int, share: float) -> tuple[dict[str, float], int]:
            rows = 2 * settings.rows
            found = learn({"draft": draft}, lessons.step(step, lambda: draw(step)), rows)
            if not np.isfinite(found["draft_loss"]):
                raise HybridspecError(
                    f"the loss is {found['draft_loss']} in step {step}: training went astray. Use a smaller --rate "
                    "and another --out."
                )
            return found, rows * settings.length

        self.model.requires_grad_(False)
        draft.train()
        with self._going_on(self.work / "checkpoint.pt"):
            sitting = Sitting(
                self.work,
                {"draft": draft},
                settings.minutes * (1 - OUTPUT_SHARE),
                Processes(0, 1),
                save_every=30.0,
                muon_lr=0.02 * settings.rate,
                adam_lr=4e-3 * settings.rate,
                watch=watch,
            )
        with _kernels(settings.length):
            sitting.run(train_step)
        draft.eval()
        self.state["fresh_tokens"] += lessons.fresh_tokens
        self.state["losses"] = losses or self.state["losses"]
        self._save_state()
        return sitting

    def _provenance(self, sitting: Sitting, before: dict, after: dict | None) -> dict:
        settings = self.settings
        provenance = {
            "schema": 1,
            "complete": after is not None,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "target": {
                "name": self.target.name,
                "path": str(self.target.path) if self.target.path else None,
                "model_type": self.target.config.model_type,
                "layers": self.target.config.num_hidden_layers,
                "sha256": self.known["target"],
            },
            "kept_layers": self.kept,
            "parameters": sum(p.numel() for p in self.draft.parameters()),
            "trained_parameters": sum(p.numel() for p in self.draft.parameters() if p.requires_grad),
            "settings": dataclasses.asdict(settings),
            "corpus": {
                "files": list(map(str, self.files)),
                "tokens": self.corpus.tokens,
                "held_out_texts": {name: len(texts) for name, texts in self.corpus.held_out.items()},
            },
            "steps": sitting.step,
            "tokens_trained": sitting.tokens,
            "different_tokens": self.state["fresh_tokens"],
            "minutes": {
                "training": round(sitting.trained_seconds / 60, 2),
                "outputs": round(self.state["output_seconds"] / 60, 2),
            },
            "losses": self.state["losses"],
            "held_out": {"before": before, "after": after},
            "threads": torch.get_num_threads(),
            "versions": {name: version(name) for name in ("hybridspec", "torch", "transformers")},
        }
        _write_json(self.out / PROVENANCE, provenance)
        return provenance


def _kernels(length: int) -> AbstractContextManager:
    return training_kernels() if length % CHUNK == 0 else nullcontext()


def fingerprint(runner: TargetRunner) -> str:
    """SHA-256 over config and weights: the same for a copy of the checkpoint elsewhere."""
    digest = hashlib.sha256()
    if runner.path is None:
        for name, tensor in runner.model.state_dict().items():
            digest.update(name.encode() + tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
    files = sorted(runner.path.glob("*.safetensors")) or sorted(runner.path.glob("pytorch_model*.bin"))
    for path in [runner.path / "config.json", *files]:
        digest.update(path.name.encode())
        with open(path, "rb") as file:
            while part := file.read(2**24):
                digest.update(part)
    return digest.hexdigest()


def _short(value: object) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 16 else str(value)


def _write_json(path: Path, content: dict) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
