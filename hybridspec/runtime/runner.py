"""TargetRunner: a transformers model whose sequences can take tokens back. Targets and drafts run on the same class."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hybridspec.errors import ContextLengthError, InputError, UnsupportedLayerError
from hybridspec.hooks import adapters, mixers
from hybridspec.runtime.compiled import CompiledPasses
from hybridspec.runtime.loading import folder_fingerprint, load_checkpoint
from hybridspec.runtime.model_facts import CACHE_ARGUMENTS, check_tape, clamps_steps, decoder_layers
from hybridspec.runtime.options import LoadOptions, RollbackMode, load_options
from hybridspec.runtime.packed import PackedWeights
from hybridspec.runtime.prompt_text import encode_text
from hybridspec.runtime.selftest import check_rollback
from hybridspec.runtime.session import Session, flat_ids
from hybridspec.state.cache import RollbackCache
from hybridspec.state.pass_context import Purpose, recording
from hybridspec.state.recompute import RecomputeCache

#: See :attr:`hybridspec.runtime.session.Session.observers`.
Observer = Callable[[int, Tensor], None]

#: Models that passed the self-test: rollback mode -> whether they must be fed one token at a time.
_CHECKED: WeakKeyDictionary[nn.Module, dict[str, bool]] = WeakKeyDictionary()


class TargetRunner:
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
        if not isinstance(model, nn.Module) or not hasattr(model, "config"):
            raise InputError(f"a TargetRunner runs a transformers model, not a {type(model).__name__}")
        self.options = load_options(options, dtype=model.dtype, device=model.device, **fields)
        self.compiled: CompiledPasses | None = None
        self.packed: PackedWeights | None = None
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config(decoder=True)
        self.path = path
        self.name = path.name if path else self.config.model_type
        self.vocab_size: int = self.config.vocab_size
        self.max_length: int = getattr(self.config, "max_position_embeddings", None) or 2**31
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = next((name for name in CACHE_ARGUMENTS if name in parameters), "")
        if not self._cache_argument:
            raise UnsupportedLayerError(f"{type(model).__name__} takes no cache, so it cannot go on with a sequence.")
        self._takes_positions = "position_ids" in parameters
        #: Nemotron-H and Zamba2 clamp time steps in their many-token path, which decoding does not.
        self.clamps_steps = clamps_steps(model)
        #: A model that continues wrongly from its own cache with more than one token: feed it one at a time.
        self.one_by_one = adapters.starts_from_zeros(model)
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
        self.compiled = CompiledPasses(self) if self.options.compile else None
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

    def new_cache(self) -> RollbackCache | RecomputeCache:
        if self.rollback == "recompute":
            return RecomputeCache(RollbackCache(self.config) if self._needs_our_cache else None)
        return RollbackCache(self.config, slots=self.rollback == "slots")

    def forward(
        self,
        cache: Any,
        block: Sequence[int],
        position: int,
        last_only: bool = False,
        observers: Sequence[Observer] = (),
    ) -> Tensor:
        """Logits ``[T, vocab]`` of a block that starts at ``position``, or ``[1, vocab]`` of its last token."""
        return self._call(cache, block, position, last_only, observers).logits[0]

    def verify(self, cache: Any, block: Sequence[int], position: int) -> Tensor:
        """The same, compiled where that was asked for and works."""
        if self.compiled is None:
            return self.forward(cache, block, position)
        with torch.inference_mode():
            return self.compiled.forward(cache, block, position, lambda: self.forward(cache, block, position))

    def forward_natively(
        self,
        cache: RecomputeCache,
        block: Sequence[int],
        position: int,
        purpose: Purpose = "verify",
        observers: Sequence[Observer] = (),
    ) -> Tensor:
        """The same on what the model itself keeps, which it returns anew."""
        if isinstance(cache.cache, RollbackCache):
            with recording("advance"):
                logits = self.forward(cache.cache, block, position, purpose == "prefill", observers)
                cache.cache.commit_prefill(len(block))
            return logits
        single = (self.one_by_one and position > 0) or (self.clamps_steps and purpose == "verify")
        logits = []
        for start in range(0, len(block), 1 if single else len(block)):
            part = block[start : start + 1] if single else block
            output = self._call(cache.cache, part, position + start, purpose == "prefill", observers)
            cache.cache = getattr(output, self._cache_argument)
            logits.append(output.logits[0])
        return torch.cat(logits)

    @torch.inference_mode()
    def _call(
        self, cache: Any, block: Sequence[int], position: int, last_only: bool, observers: Sequence[Observer] = ()
    ) -> Any:
        options: dict[str, Any] = {"logits_to_keep": 1} if last_only else {}
        ids = torch.tensor([block], device=self.device)
        told = observed(self.model, position, observers) if observers else nullcontext()
        with told, self.packed.active() if self.packed else nullcontext():
            return self.call(ids, cache, position, **options)

    def call(self, ids: Tensor, cache: Any = None, position: int = 0, **options: Any) -> Any:
        """transformers' own output for token ids ``[B, T]`` that start at ``position``, gradients included."""
        if self._takes_positions:
            # Left to themselves, some models restart at 0 for every block.
            positions = torch.arange(ids.shape[1], device=ids.device) + position
            options["position_ids"] = positions.unsqueeze(0).expand(len(ids), -1)
        if cache is not None:
            options[self._cache_argument] = cache
        return self.model(input_ids=ids, use_cache=True, **options)

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder's layers in order.

        Raises:
            UnsupportedLayerError: it does not run a plain list of them.
        """
        layers = decoder_layers(self.model, self.config.num_hidden_layers)
        if not layers:
            raise UnsupportedLayerError(f"{self.name}: no list of {self.config.num_hidden_layers} decoder layers")
        return layers

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def fingerprint(self) -> str:
        """Name, size and time of the weight files, or of the model object: tells checkpoints apart without reading
        them.
        """
        if self.path is None:
            return f"{self.name}@{id(self.model)}"
        return folder_fingerprint(self.path)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds at its start.

        Raises:
            InputError: the text is empty or gives no token.
        """
        return encode_text(self.tokenizer, text, self.name)

    @property
    def stop_tokens(self) -> frozenset[int]:
        """End-of-sequence ids of the generation config, or else of the model's config."""
        generation = getattr(self.model, "generation_config", None)
        value = getattr(generation, "eos_token_id", None)
        value = getattr(self.config, "eos_token_id", None) if value is None else value
        return frozenset([] if value is None else [value] if isinstance(value, int) else value)


@contextmanager
def observed(model: nn.Module, position: int, observers: Sequence[Observer]) -> Iterator[None]:
    """Hands the decoder's output ``[T, d]``, final norm included, to the observers."""

    def tell(_: nn.Module, __: tuple, output: Any) -> None:
        for observer in observers:
            observer(position, output[0][0])

    handle = model.get_decoder().register_forward_hook(tell)
    try:
        yield
    finally:
        handle.remove()
