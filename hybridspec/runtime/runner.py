"""TargetRunner: a transformers model whose sequences can take tokens back. Targets and drafts run on the same class."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from hybridspec.errors import ContextLengthError, InputError, ModelLoadError, UnsupportedLayerError
from hybridspec.hooks import mixers
from hybridspec.runtime.compiled import CompiledPasses
from hybridspec.runtime.model import LoadedModel
from hybridspec.runtime.model_facts import check_tape
from hybridspec.runtime.packed import PackedWeights
from hybridspec.runtime.selftest import check_rollback
from hybridspec.runtime.session import Session, flat_ids
from hybridspec.state.base import PassOutput, SequenceCache
from hybridspec.state.block import Block
from hybridspec.state.cache import RollbackCache
from hybridspec.state.recompute import RecomputeCache, RecomputeOnOurLayers

RollbackMode = Literal["auto", "tape", "slots", "recompute"]
#: Models that passed the self-test: rollback mode -> whether they must be fed one token at a time.
_CHECKED: WeakKeyDictionary[nn.Module, dict[str, bool]] = WeakKeyDictionary()


class TargetRunner(LoadedModel):
    """Runs one model; :meth:`start` opens a sequence on it.

    Args:
        model: a transformers causal language model in evaluation mode.
        rollback: ``tape`` (closed form), ``slots`` (one state per token, as vLLM does), ``recompute`` (copy and feed
            again, for any model), or ``auto``: ``tape`` where it is known, else ``recompute`` with a warning.
        compile: run verify passes compiled, see :mod:`hybridspec.runtime.compiled`: several times faster where Python
            is what costs time, but the first block of each size takes minutes. Needs a C++ compiler on the CPU.
        packed: keep a second copy of the larger weights for short blocks, see :mod:`hybridspec.runtime.packed`; float32
            on a CPU only.

    Attributes:
        rollback: the mode that runs; never ``auto``.
        compiled: the compiled passes, if they were asked for.
        packed: the packed weights, likewise.

    Raises:
        UnsupportedLayerError: the model has a layer that the chosen mode cannot take tokens back from; names it.
        InputError: ``packed`` together with ``compile``, or for a model that it is not for.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        rollback: RollbackMode = "auto",
        path: Path | None = None,
        compile: bool = False,
        packed: bool = False,
    ) -> None:
        check_mode(rollback)
        if compile and packed:
            raise InputError("compiled passes do not use packed weights: choose one of them (--compile, --packed)")
        super().__init__(model, tokenizer, path.name if path else None)
        #: As asked for; :attr:`rollback` is what it came to.
        self.requested_rollback = rollback
        self.compiled: CompiledPasses | None = None
        self.path = path
        #: The model's own past cannot be continued at all, or not for several sessions: ours serves ``recompute`` too.
        self._needs_our_cache = bool(mixers.attach(model))
        self.rollback: RollbackMode = "tape" if rollback == "auto" else rollback
        if self.rollback != "recompute":
            try:
                check_tape(model, self.config)
            except UnsupportedLayerError as error:
                if rollback != "auto":
                    raise
                self._fall_back(error)
        self.check(fall_back=rollback == "auto")
        # Set behind the self-test, which is of the model itself.
        self.compiled = CompiledPasses(self, self.start) if compile else None
        self.packed = PackedWeights(self.model) if packed else None

    def _fall_back(self, error: UnsupportedLayerError) -> None:
        warnings.warn(f"{error} Falling back to rollback='recompute', which is slower.", stacklevel=3)
        self.rollback = "recompute"

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        rollback: RollbackMode = "auto",
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        compile: bool = False,
        packed: bool = False,
    ) -> "TargetRunner":
        """Loads a local checkpoint folder (config, safetensors, tokenizer).

        Raises:
            ModelLoadError: the folder or a part of it is missing or broken; names it and says what to do.
        """
        folder = Path(path)
        check_mode(rollback)
        check_folder(folder)
        disable_progress_bar()
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise ModelLoadError(
                f"{folder}: transformers could not load this checkpoint: {error}. "
                "If one of its *.safetensors or tokenizer files is cut short, copy it again."
            ) from error
        # transformers fills what is missing with random numbers and a line in a log.
        broken = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
        if broken:
            raise ModelLoadError(
                f"{folder}: missing or misshapen tensors in the weights, {len(broken)} in all, the first {broken[0]}. "
                "Copy the checkpoint again."
            )
        return cls(model.to(device), tokenizer, rollback, folder.resolve(), compile, packed)

    def check(self, fall_back: bool = False) -> None:
        """The self-test of :func:`hybridspec.runtime.selftest.check_rollback`, and what can be done when it fails.

        Raises:
            UnsupportedLayerError: no way of taking tokens back is exact.
        """
        passed = _CHECKED.setdefault(self.model, {})
        if self.rollback in passed:
            self.one_by_one = passed[self.rollback]
            return
        try:
            check_rollback(self)
        except UnsupportedLayerError as error:
            if self.rollback != "recompute":
                if not fall_back:
                    raise
                self._fall_back(error)
                self.check()
                return
            if self.one_by_one:
                raise
            self.one_by_one = True
            check_rollback(self)
        passed[self.rollback] = self.one_by_one

    def start(self, prompt: Sequence[int], attach: Callable[[Session], None] | None = None) -> Session:
        """Opens a sequence with ``prompt`` committed, except its last token, which opens the first block.

        Args:
            attach: called with the session while it is still empty.

        Raises:
            InputError: the prompt is empty.
            ContextLengthError: it does not fit.
        """
        prompt = flat_ids(prompt)
        if not prompt:
            raise InputError("the prompt is empty: give at least one token")
        if len(prompt) > self.max_length:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens, {self.name} takes {self.max_length}. Shorten it."
            )
        session = Session(self)
        try:
            if attach is not None:
                attach(session)
            session.prefill(prompt[:-1])
        except BaseException:
            session.close()
            raise
        return session

    def new_cache(self) -> SequenceCache:
        if self.rollback != "recompute":
            return RollbackCache(self.config, slots=self.rollback == "slots")
        if self._needs_our_cache:
            return RecomputeOnOurLayers(self.config)
        return RecomputeCache(self.one_by_one, self.clamps_steps)

    def verify(self, cache: Any, block: Block) -> PassOutput:
        """One forward pass over a block whose tokens may be taken back, compiled where that was asked for and works."""
        if self.compiled is None:
            return self.run(cache, block)
        with torch.inference_mode():
            return self.compiled.run(cache, block)

    @property
    def fingerprint(self) -> str:
        """Name, size and time of the weight files, or of the model object: tells checkpoints apart without reading
        them.
        """
        if self.path is None:
            return f"{self.name}@{id(self.model)}"
        return folder_fingerprint(self.path)


def check_mode(rollback: str) -> None:
    if rollback not in get_args(RollbackMode):
        raise InputError(f"unknown rollback {rollback!r}: choose one of {', '.join(get_args(RollbackMode))}")


def folder_fingerprint(folder: Path) -> str:
    """A checkpoint folder with name, size and time of its weight files, which are not read."""
    files = sorted(folder.glob("*.safetensors"))
    return " ".join([str(folder), *(f"{f.name}:{f.stat().st_size}:{f.stat().st_mtime_ns}" for f in files)])


def check_folder(folder: Path) -> None:
    """Raises :class:`ModelLoadError` unless ``folder`` holds a config, weights and a tokenizer."""
    if not folder.is_dir():
        raise ModelLoadError(
            f"{folder}: no such folder. Give a local checkpoint folder (config.json, *.safetensors, tokenizer)."
        )
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder}: config.json is missing. Is this a Hugging Face checkpoint folder?")
    try:
        AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ModelLoadError(f"{folder / 'config.json'}: {error}") from error
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise ModelLoadError(f"{folder}: no weights (*.safetensors). Was the download complete, or Git LFS not pulled?")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ModelLoadError(f"{folder}: no tokenizer (tokenizer.json). Copy it from the model's source.")
