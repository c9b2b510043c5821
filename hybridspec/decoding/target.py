"""What drafts and workloads may ask of a target, whether it runs here or in a serving engine."""

from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from hybridspec.runtime.options import LoadOptions
from hybridspec.runtime.prompt_text import encode_text


class Target(Protocol):
    """:class:`~hybridspec.runtime.runner.TargetRunner` and :class:`EngineTarget` are targets."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int:
        """Rows of its logits, padding included."""

    @property
    def max_length(self) -> int:
        """Tokens of its context."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None: ...

    @property
    def options(self) -> LoadOptions:
        """How it runs, and so how a model that drafts for it is loaded."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""


@dataclass(frozen=True)
class EngineTarget:
    """A target that runs in a serving engine: none of its weights are here.

    Args:
        options: for a model that drafts for it in this process.
    """

    name: str
    vocab_size: int
    tokenizer: PreTrainedTokenizerBase | None = None
    max_length: int = 2**31
    options: LoadOptions = LoadOptions()

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, as :meth:`~hybridspec.runtime.runner.TargetRunner.encode` gives them."""
        return encode_text(self.tokenizer, text, self.name)
