"""A transformers model and what sessions ask of it: its sizes, its tokens, and one forward pass."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hybridspec.checkpoints.modeling_files import CACHE_ARGUMENTS
from hybridspec.errors import InputError, UnsupportedLayerError
from hybridspec.hooks import adapters
from hybridspec.runtime.model_facts import clamps_steps, decoder_layers
from hybridspec.runtime.packed import PackedWeights
from hybridspec.state.base import PassOutput, SequenceCache
from hybridspec.state.block import Block

#: Told the hidden states ``[T, d]`` of a pass that the head reads.
HiddenObserver = Callable[[Tensor], object]


class LoadedModel(ABC):
    """A model that sessions run on. What a sequence holds on it, and how a pass is verified, is its subclass's.

    Attributes:
        rollback: how its sequences take tokens back.
        clamps_steps: its many-token path clamps time steps, which decoding does not.
        one_by_one: it continues wrongly from its own cache with more than one token, so it is fed one at a time there.
        packed: its packed weights, if they were asked for.
    """

    rollback: str

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, name: str | None = None) -> None:
        if not isinstance(model, nn.Module) or not hasattr(model, "config"):
            raise InputError(f"a TargetRunner runs a transformers model, not a {type(model).__name__}")
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config(decoder=True)
        self.name = name or self.config.model_type
        self.vocab_size: int = self.config.vocab_size
        self.max_length: int = getattr(self.config, "max_position_embeddings", None) or 2**31
        self.packed: PackedWeights | None = None
        parameters = inspect.signature(model.forward).parameters
        self.cache_argument = next((name for name in CACHE_ARGUMENTS if name in parameters), "")
        if not self.cache_argument:
            raise UnsupportedLayerError(f"{type(model).__name__} takes no cache, so it cannot go on with a sequence.")
        self._takes_positions = "position_ids" in parameters
        self.clamps_steps = clamps_steps(model)
        self.one_by_one = adapters.starts_from_zeros(model)

    @abstractmethod
    def new_cache(self) -> SequenceCache:
        """What an empty sequence holds."""

    def verify(self, cache: Any, block: Block) -> PassOutput:
        """:meth:`run` of a block whose tokens may be taken back."""
        return self.run(cache, block)

    def run(
        self, cache: Any, block: Block, last_only: bool = False, observers: Sequence[HiddenObserver] = ()
    ) -> PassOutput:
        """One forward pass, which ``cache`` takes in.

        Args:
            last_only: logits of the last token alone.
            observers: called with the hidden states ``[T, d]`` that the head reads.
        """
        options: dict[str, Any] = {"logits_to_keep": 1} if last_only else {}
        told = observed(self.model, observers) if observers else nullcontext()
        packed = self.packed.active() if self.packed else nullcontext()
        with torch.inference_mode(), told, packed:
            output = self.call(block, cache, **options)
        return PassOutput(output.logits, getattr(output, self.cache_argument, None))

    def call(self, block: Block, cache: Any = None, **options: Any) -> Any:
        """transformers' own output for a block, gradients included."""
        if self._takes_positions:
            # Left to themselves, some models restart at 0 for every block.
            options["position_ids"] = block.positions
        if cache is not None:
            options[self.cache_argument] = cache
        return self.model(input_ids=block.tokens, use_cache=True, **options)

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
def observed(model: nn.Module, observers: Sequence[HiddenObserver]) -> Iterator[None]:
    """Hands the decoder's output ``[T, d]`` for a single row, final norm included, to the observers."""

    def tell(_: nn.Module, __: tuple, output: Any) -> None:
        for observer in observers:
            observer(output[0][0])

    handle = model.get_decoder().register_forward_hook(tell)
    try:
        yield
    finally:
        handle.remove()
