"""TargetRunner: a transformers model whose sequences can take tokens back. Targets and drafts run on the same class."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from hybridspec import adapters
from hybridspec.cache import RollbackCache, layer_types
from hybridspec.errors import ContextLengthError, InputError, ModelLoadError, UnsupportedLayerError
from hybridspec.recompute import RecomputeCache
from hybridspec.selftest import check_rollback
from hybridspec.session import Session

RollbackMode = Literal["tape", "recompute"]


class TargetRunner:
    """Runs one model; :meth:`start` opens a sequence on it.

    Args:
        model: a transformers causal language model in evaluation mode.
        rollback: ``tape`` (closed form, default) or ``recompute`` (copy and feed again, for any model).

    Raises:
        UnsupportedLayerError: the model has a layer that the tape cannot take tokens back from; names it.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        rollback: RollbackMode = "tape",
        path: Path | None = None,
    ) -> None:
        check_mode(rollback)
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.rollback: RollbackMode = rollback
        self.config = model.config.get_text_config(decoder=True)
        self.path = path
        self.name = path.name if path else self.config.model_type
        self.vocab_size: int = self.config.vocab_size
        self.max_length: int = getattr(self.config, "max_position_embeddings", None) or 2**31
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        if rollback == "tape":
            self._check_tape()

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        rollback: RollbackMode = "tape",
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
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
            raise ModelLoadError(f"{folder}: transformers could not load this checkpoint: {error}") from error
        # transformers fills what is missing with random numbers and a line in a log.
        broken = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
        if broken:
            raise ModelLoadError(f"{folder}: {len(broken)} tensors are missing or misshapen, the first is {broken[0]}")
        runner = cls(model.to(device), tokenizer, rollback, folder.resolve())
        check_rollback(runner)
        return runner

    def start(self, prompt: Sequence[int]) -> Session:
        """Opens a sequence with ``prompt`` committed, except its last token, which opens the first block.

        Raises:
            InputError: the prompt is empty.
            ContextLengthError: it does not fit.
        """
        if not len(prompt):
            raise InputError("the prompt is empty: give at least one token")
        if len(prompt) > self.max_length:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens, {self.name} takes {self.max_length}. Shorten it."
            )
        session = Session(self)
        try:
            session.prefill(list(prompt[:-1]))
        except BaseException:
            session.close()
            raise
        return session

    def new_cache(self) -> RollbackCache | RecomputeCache:
        return RollbackCache(layer_types(self.config)) if self.rollback == "tape" else RecomputeCache(self.config)

    @torch.inference_mode()
    def forward(
        self, cache: RollbackCache | RecomputeCache, block: Sequence[int], position: int, last_only: bool = False
    ) -> Tensor:
        """Logits ``[T, vocab]`` of a block that starts at ``position``, or ``[1, vocab]`` of its last token."""
        device = self.model.device
        ids = torch.tensor([block], device=device)
        positions = torch.arange(position, position + len(block), device=device).unsqueeze(0)
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
            **{self._cache_argument: cache.cache if isinstance(cache, RecomputeCache) else cache},
        )
        return output.logits[0]

    @property
    def fingerprint(self) -> str:
        """Name, size and time of the weight files, or of the model object: tells checkpoints apart without reading
        them.
        """
        if self.path is None:
            return f"{self.name}@{id(self.model)}"
        files = sorted(self.path.glob("*.safetensors"))
        return " ".join([str(self.path), *(f"{f.name}:{f.stat().st_size}:{f.stat().st_mtime_ns}" for f in files)])

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds at its start.

        Raises:
            InputError: the text is empty or gives no token.
        """
        if not text.strip():
            raise InputError("the prompt is empty: give some text")
        tokens = self.tokenizer(text)["input_ids"]
        if not tokens:
            raise InputError(f"the prompt {text!r} gives no token with the tokenizer of {self.name}")
        return tokens

    @property
    def stop_tokens(self) -> frozenset[int]:
        """End-of-sequence ids of the generation config, or else of the model's config."""
        generation = getattr(self.model, "generation_config", None)
        value = getattr(generation, "eos_token_id", None)
        value = self.config.eos_token_id if value is None else value
        return frozenset([] if value is None else [value] if isinstance(value, int) else value)

    def _check_tape(self) -> None:
        """Wraps the recurrences of the model, and refuses a linear-attention layer that calls none of them."""
        kinds = layer_types(self.config)
        RollbackCache(kinds)
        modules = adapters.attach(self.model)
        if "linear_attention" not in kinds:
            return
        layers = next(m for m in self.model.modules() if isinstance(m, nn.ModuleList) and len(m) == len(kinds))
        for index, (kind, layer) in enumerate(zip(kinds, layers, strict=True)):
            if kind == "linear_attention" and not any(type(m).__module__ in modules for m in layer.modules()):
                raise UnsupportedLayerError(
                    f"{self.name}: layer {index} ({type(layer).__name__} of {self.config.model_type!r}) has a "
                    "recurrence that is not known here, so its tokens cannot be taken back. Use rollback='recompute'."
                )


def check_mode(rollback: str) -> None:
    if rollback not in get_args(RollbackMode):
        raise InputError(f"unknown rollback {rollback!r}: choose one of {', '.join(get_args(RollbackMode))}")


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
