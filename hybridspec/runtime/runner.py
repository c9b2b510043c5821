"""TargetRunner: a transformers model whose sequences can take tokens back. Targets and drafts run on the same class."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from hybridspec.errors import ContextLengthError, InputError, ModelLoadError, UnsupportedLayerError
from hybridspec.hooks import adapters, mixers
from hybridspec.runtime.compiled import CompiledPasses
from hybridspec.runtime.packed import PackedWeights
from hybridspec.runtime.selftest import check_rollback
from hybridspec.runtime.session import Session, flat_ids
from hybridspec.state.cache import RollbackCache
from hybridspec.state.layers import RecurrentLayer
from hybridspec.state.pass_context import Purpose, recording
from hybridspec.state.recompute import RecomputeCache

RollbackMode = Literal["auto", "tape", "slots", "recompute"]
#: See :attr:`hybridspec.runtime.session.Session.observers`.
Observer = Callable[[int, Tensor], None]

#: What the argument is called that carries a model's past, by age of transformers and model.
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params", "state")
UNLIMITED = (0.0, float("inf"))
#: Models that passed the self-test: rollback mode -> whether they must be fed one token at a time.
_CHECKED: WeakKeyDictionary[nn.Module, dict[str, bool]] = WeakKeyDictionary()


class TargetRunner:
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
        if not isinstance(model, nn.Module) or not hasattr(model, "config"):
            raise InputError(f"a TargetRunner runs a transformers model, not a {type(model).__name__}")
        #: As asked for; :attr:`rollback` is what it came to.
        self.requested_rollback = rollback
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
        self.compiled = CompiledPasses(self) if compile else None
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
        if not text.strip():
            raise InputError("the prompt is empty: give some text")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            character = f"U+{ord(text[error.start]):04X} at character {error.start}"
            raise InputError(f"the prompt holds half a surrogate pair ({character}), which is no text") from error
        tokens = self.tokenizer(text)["input_ids"]
        if not tokens:
            raise InputError(f"the prompt {text!r} gives no token with the tokenizer of {self.name}")
        return tokens

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


def clamps_steps(model: nn.Module) -> bool:
    """Whether the many-token path clamps time steps; the one-token path never does."""
    return any(tuple(getattr(m, "time_step_limit", None) or UNLIMITED) != UNLIMITED for m in model.modules())


def check_tape(model: nn.Module, config: PreTrainedConfig) -> None:
    """Wraps the recurrences of ``model``.

    Raises:
        UnsupportedLayerError: a layer keeps its past in a way that is not known here; names its index and class.
    """
    cache = RollbackCache(config)
    modules = adapters.attach(model)
    if not getattr(model, "_is_stateful", False):
        return
    layers = decoder_layers(model, len(cache.layers))
    for index, (kept, layer) in enumerate(zip(cache.layers, layers, strict=False)):
        # A stateful model without a recurrent cache layer keeps its state elsewhere.
        suspect = isinstance(kept, RecurrentLayer) or not cache.recurrent
        if suspect and not any(type(m).__module__ in modules for m in layer.modules()):
            raise UnsupportedLayerError(
                f"layer {index} ({type(layer).__name__} of {config.model_type!r}) has a recurrence that is not known "
                "here, so its tokens cannot be taken back. Use rollback='recompute'."
            )


def decoder_layers(model: nn.Module, count: int) -> Sequence[nn.Module]:
    """The ``count`` layers that the decoder runs one after the other; none if it has no such list."""
    return next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count), ())


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
