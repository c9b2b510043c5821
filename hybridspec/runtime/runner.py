"""TargetRunner: a transformers model whose sequences can take tokens back. Targets and drafts run on the same class."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from hybridspec.errors import ContextLengthError, InputError, UnsupportedLayerError
from hybridspec.hooks import mixers
from hybridspec.runtime.compiled import CompiledPasses
from hybridspec.runtime.loading import folder_fingerprint, load_checkpoint
from hybridspec.runtime.model import LoadedModel
from hybridspec.runtime.model_facts import check_tape
from hybridspec.runtime.options import LoadOptions, RollbackMode, load_options
from hybridspec.runtime.packed import PackedWeights
from hybridspec.runtime.selftest import check_rollback
from hybridspec.runtime.session import Session, flat_ids
from hybridspec.state.base import PassOutput, SequenceCache
from hybridspec.state.block import Block
from hybridspec.state.cache import RollbackCache
from hybridspec.state.recompute import RecomputeCache, RecomputeOnOurLayers

#: Models that passed the self-test: rollback mode -> whether they must be fed one token at a time.
_CHECKED: WeakKeyDictionary[nn.Module, dict[str, bool]] = WeakKeyDictionary()


class TargetRunner(LoadedModel):
    """Runs one model; :meth:`start` opens a sequence on it.

    Args:
        model: a transformers causal language model in evaluation mode.
        path: the checkpoint folder that it was read from.
        options: how it is run; its type and its device are those that the model has.
        fields: of :class:`~hybridspec.runtime.options.LoadOptions`, in place of those of ``options``: ``rollback``,
            ``compile``, ``packed``.

    Attributes:
        options: as asked for.
        rollback: the mode that runs; never ``auto``.
        compiled: the compiled passes, if they were asked for.
        packed: the packed weights, likewise.

    Raises:
        UnsupportedLayerError: the model has a layer that the chosen mode cannot take tokens back from; names it.
        InputError: an option does not exist, or ``packed`` for a model that it is not for.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        path: Path | None = None,
        options: LoadOptions | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(model, tokenizer, path.name if path else None)
        self.options = load_options(options, dtype=model.dtype, device=model.device, **fields)
        self.compiled: CompiledPasses | None = None
        self.path = path
        #: The model's own past cannot be continued at all, or not for several sessions: ours serves ``recompute`` too.
        self._needs_our_cache = bool(mixers.attach(model))
        may_fall_back = self.options.rollback == "auto"
        self.rollback: RollbackMode = "tape" if may_fall_back else self.options.rollback
        if self.rollback != "recompute":
            try:
                check_tape(model, self.config)
            except UnsupportedLayerError as error:
                if not may_fall_back:
                    raise
                self._fall_back(error)
        self.check(may_fall_back)
        # Set behind the self-test, which is of the model itself.
        self.compiled = CompiledPasses(self, self.start) if self.options.compile else None
        self.packed = PackedWeights(self.model) if self.options.packed else None

    def _fall_back(self, error: UnsupportedLayerError) -> None:
        warnings.warn(f"{error} Falling back to rollback='recompute', which is slower.", stacklevel=3)
        self.rollback = "recompute"

    @classmethod
    def from_pretrained(cls, path: str | Path, *, options: LoadOptions | None = None, **fields: Any) -> "TargetRunner":
        """Loads a local checkpoint folder (config, safetensors, tokenizer).

        Args:
            options: how; default: in float32 on the CPU.
            fields: of :class:`~hybridspec.runtime.options.LoadOptions`, in place of those of ``options``: ``dtype``,
                ``device``, ``rollback``, ``compile``, ``packed``.

        Raises:
            ModelLoadError: the folder or a part of it is missing or broken; names it and says what to do.
            InputError: an option does not exist.
        """
        options = load_options(options, **fields)
        folder = Path(path)
        model, tokenizer = load_checkpoint(folder, options)
        return cls(model, tokenizer, path=folder.resolve(), options=options)

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
