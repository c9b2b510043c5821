"""A transformers model with nothing of ours around it, for the ways that are compared with ours."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.utils.logging import disable_progress_bar

from hybridspec.checkpoints.modeling_files import CACHE_ARGUMENTS


class TransformersModel:
    """Loaded from a checkpoint folder, or a model that is there already."""

    def __init__(self, source: Path | nn.Module) -> None:
        disable_progress_bar()
        if isinstance(source, Path):
            source = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True)
        self.model = source.eval()
        parameters = inspect.signature(self.model.forward).parameters
        self.cache_argument = next(name for name in CACHE_ARGUMENTS if name in parameters)

    @property
    def stop_tokens(self) -> frozenset[int]:
        ids = self.model.generation_config.eos_token_id
        return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)

    def dynamic_cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    def static_cache(self, length: int) -> StaticCache:
        return StaticCache(config=self.model.config, max_cache_len=length)

    @torch.inference_mode()
    def reset(self, cache: StaticCache) -> None:
        """Empties a cache that was filled by calls of this object: outside of inference mode torch refuses that."""
        cache.reset()

    @torch.inference_mode()
    def __call__(
        self,
        tokens: Sequence[int],
        cache: Any,
        position: int,
        forward: Callable[..., Any] | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits ``[T, vocab]`` of tokens that start at ``position``, which the cache then holds."""
        count = len(tokens)
        options = {"logits_to_keep": 1} if last_only else {}
        output = (forward or self.model)(
            input_ids=torch.tensor([tokens]),
            position_ids=torch.arange(position, position + count).unsqueeze(0),
            use_cache=True,
            **{self.cache_argument: cache},
            **options,
        )
        return output.logits[0]

    def greedy(
        self, tokens: Sequence[int], cache: Any, position: int, forward: Callable[..., Any] | None = None
    ) -> int:
        """The most likely token after ``tokens``."""
        return int(self(tokens, cache, position, forward, last_only=True)[-1].argmax())
