"""A proposer for vLLM's ``custom_class`` method: any draft of ours, above all a small hybrid one for a hybrid target,
which vLLM's own draft methods refuse.

    VLLM_USE_V2_MODEL_RUNNER=0 vllm serve TARGET --no-enable-prefix-caching \\
        --speculative-config '{"method": "custom_class", "model": "hybridspec.vllm_plugin.HybridDraftProposer",
                               "num_speculative_tokens": 4}' \\
        --additional-config '{"hybridspec": {"draft": "/path/to/draft", "length": "svip:threshold=0.3"}}'

Settings under ``hybridspec`` (see :class:`Settings`): ``draft`` names the strategy as on our command line, ``length``
the draft-length rule, at work for each request by itself: rows of one batch get proposals of different lengths, none
longer than ``num_speculative_tokens``.

vLLM tells a proposer token histories, not request names, and not when a request ends. A request is recognised by its
history. Its state is freed when it is missing from a few calls, when ``max_sequences`` are open, or when nothing was
asked for ``idle_seconds``. Drafts are greedy, and vLLM verifies them as such at any temperature. One row is drafted
after the other.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from packaging.version import Version

from hybridspec.drafts.registry import make_draft, make_length
from hybridspec.engines.export.key_sets import installed
from hybridspec.engines.vllm.requests import Request, Requests
from hybridspec.errors import ContextLengthError, InputError
from hybridspec.runtime.runner import check_mode
from hybridspec.specs import STRATEGIES


@dataclass(frozen=True)
class Settings:
    """``additional_config["hybridspec"]``.

    Args:
        draft: a checkpoint folder, or a strategy with options: ``prompt-lookup:longest=3``.
        length: a draft-length rule; default: always ``num_speculative_tokens``.
        max_sequences: most requests that hold draft state; default: vLLM's ``max_num_seqs``.
        idle_seconds: after so long without a request all state is freed.
        device, dtype: of the draft model; default: the target's.
        rollback: as of :class:`~hybridspec.runtime.runner.TargetRunner`.

    Raises:
        InputError: a value is of the wrong kind; names it.
    """

    draft: str
    length: str | int | None = None
    max_sequences: int | None = None
    idle_seconds: float = 60.0
    device: str | None = None
    dtype: str | None = None
    rollback: str = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.draft, str) or not self.draft:
            raise InputError(f"{PLACE}: draft must be a folder or a strategy, not {self.draft!r}")
        count = self.max_sequences
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise InputError(f"{PLACE}: max_sequences must be a whole number of at least 1, not {count!r}")
        if not isinstance(self.idle_seconds, int | float) or not self.idle_seconds > 0:
            raise InputError(f"{PLACE}: idle_seconds must be a number above 0, not {self.idle_seconds!r}")
        if self.dtype is not None and not isinstance(getattr(torch, str(self.dtype), None), torch.dtype):
            raise InputError(f"{PLACE}: dtype must be a type of torch such as bfloat16, not {self.dtype!r}")
        check_mode(self.rollback)

    @classmethod
    def read(cls, additional_config: object) -> "Settings":
        """Raises :class:`InputError` for a setting that does not exist."""
        found = additional_config.get("hybridspec") if isinstance(additional_config, Mapping) else None
        if not isinstance(found, Mapping) or "draft" not in found:
            raise InputError('--additional-config needs {"hybridspec": {"draft": "<checkpoint folder or strategy>"}}')
        known = [f.name for f in fields(cls)]
        unknown = [name for name in found if name not in known]
        if unknown:
            raise InputError(f"{PLACE}: {unknown[0]!r} is no setting. It takes {', '.join(known)}.")
        return cls(**found)


PLACE = '--additional-config "hybridspec"'


class HybridDraftProposer:
    """vLLM makes one for each engine and calls :meth:`propose` after each of its steps.

    Attributes:
        requests: those that hold draft state.

    Raises:
        InputError: a setting is wrong, or the strategy needs the target's own session.
        IncompatiblePairError: draft and target number tokens otherwise.
    """

    def __init__(self, vllm_config: Any) -> None:
        settings = Settings.read(getattr(vllm_config, "additional_config", None))
        self.k: int = vllm_config.speculative_config.num_speculative_tokens
        target = engine_target(vllm_config, settings)
        self.vocab_size: int = target.vocab_size
        refuse_readers(settings.draft)
        draft = make_draft(settings.draft, target)
        rule = self.k if settings.length is None else settings.length
        make_length(rule)
        scheduler = getattr(vllm_config, "scheduler_config", None)
        capacity = settings.max_sequences or getattr(scheduler, "max_num_seqs", None) or 64
        self.requests = Requests(draft, lambda: make_length(rule), capacity)
        self.max_length: int = getattr(vllm_config.model_config, "max_model_len", None) or 2**31
        self.fills_up = wants_full_drafts(vllm_config)
        self._idle_seconds = settings.idle_seconds
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._last_call = time.monotonic()

    def load_model(self, *_: object, **__: object) -> None:
        """The draft is loaded already."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Sequence[int],
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
        **_: object,
    ) -> list[list[int]]:
        """Up to K tokens for each row; none for a row that has not sampled, which is in the middle of its prompt. Where
        short drafts are not safe (:func:`wants_full_drafts`), any token fills them up.

        Args:
            sampled_token_ids: what each row has just sampled.
            num_tokens_no_spec: length of each row's history, these included.
            token_ids_cpu: the histories, ``[rows, width]``.
        """
        with self._lock:
            active = [row for row, sampled in enumerate(sampled_token_ids) if sampled]
            # Batched rows share the engine's step.
            seconds = (time.monotonic() - self._last_call) / max(1, len(active))
            proposals: list[list[int]] = [[] for _ in sampled_token_ids]
            seen: set[Request] = set()
            for row in active:
                history = np.asarray(token_ids_cpu[row, : int(num_tokens_no_spec[row])])
                proposals[row] = self._propose(history, seconds, seen)
            self.requests.end_call(seen)
            self._last_call = time.monotonic()
            if self._timer is None and len(self.requests):
                self._wait(self._idle_seconds)
        return proposals

    def _propose(self, history: np.ndarray, seconds: float, seen: set[Request]) -> list[int]:
        begun = time.monotonic()
        room = max(0, min(self.k, self.max_length - len(history) - 1))
        filler = [int(history[-1])] * room if self.fills_up else []
        try:
            request = self.requests.find(history, self.k + 1, seconds)
        except ContextLengthError:
            return filler
        seen.add(request)
        tokens = request.propose(room)
        request.draft_seconds = time.monotonic() - begun
        # A draft may have more rows than the target; vLLM must not see their numbers.
        known = next((i for i, token in enumerate(tokens) if token >= self.vocab_size), len(tokens))
        filler = filler[known:]
        request.filled = len(filler)
        return [*tokens[:known], *filler]

    def _wait(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._free_if_idle)
        self._timer.daemon = True
        self._timer.start()

    def _free_if_idle(self) -> None:
        with self._lock:
            self._timer = None
            left = self._last_call + self._idle_seconds - time.monotonic()
            if left <= 0:
                self.requests.clear()
            elif len(self.requests):
                self._wait(left)


def engine_target(vllm_config: Any, settings: Settings) -> SimpleNamespace:
    """What strategies ask of a target that is a runner, for one that runs in vLLM."""
    from transformers import AutoTokenizer

    model = vllm_config.model_config
    folder = getattr(model, "tokenizer", None)
    skipped = folder is None or getattr(model, "skip_tokenizer_init", False)
    dtype = getattr(torch, settings.dtype) if settings.dtype else getattr(model, "dtype", torch.float32)
    device = settings.device or getattr(getattr(vllm_config, "device_config", None), "device_type", "cpu")
    return SimpleNamespace(
        name=str(getattr(model, "model", "the target")),
        vocab_size=model.get_vocab_size(),
        tokenizer=None if skipped else AutoTokenizer.from_pretrained(folder, local_files_only=True),
        model=SimpleNamespace(dtype=dtype),
        compiled=None,
        packed=None,
        device=device,
        requested_rollback=settings.rollback,
    )


def wants_full_drafts(vllm_config: Any) -> bool:
    """Whether a draft shorter than K may kill the engine or leave it a stale state: of a hybrid before vLLM 0.33, whose
    window of the convolution is rolled by K tokens, and whose rows without a draft forget how many were accepted.
    """
    found = installed()
    old = found is not None and Version(found[1]).release < (0, 33)
    return old and bool(getattr(vllm_config.model_config, "is_hybrid", False))


def refuse_readers(spec: str) -> None:
    """Raises :class:`InputError` for a strategy that reads the target's own session."""
    name = spec.partition(":")[0]
    if name in STRATEGIES.names() and STRATEGIES.find(name).reads_target:
        raise InputError(
            f"{name} drafts from the target's hidden states or cache, which vLLM does not show to a proposer. "
            "Give a small model or prompt-lookup; for mtp use vLLM's own method of that name."
        )
