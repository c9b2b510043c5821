"""A proposer for vLLM's ``custom_class`` method: any draft of ours, above all a small hybrid one for a hybrid target,
which vLLM's own draft methods refuse.

    VLLM_USE_V2_MODEL_RUNNER=0 vllm serve TARGET --no-enable-prefix-caching \\
        --speculative-config '{"method": "custom_class", "model": "hybridspec.vllm_plugin.HybridDraftProposer",
                               "num_speculative_tokens": 4}' \\
        --additional-config '{"hybridspec": {"draft": "/path/to/draft", "length": "svip:threshold=0.3"}}'

Settings under ``hybridspec`` (see :class:`~hybridspec.engines.vllm.settings.ProposerSettings`): ``draft`` names the
strategy as on our command line, ``length`` the draft-length rule, at work for each request by itself: rows of one batch
get proposals of different lengths, none longer than ``num_speculative_tokens``.

vLLM tells a proposer token histories, not request names, and not when a request ends. A request is recognised by its
history. Its state is freed when it is missing from a few calls, when ``max_sequences`` are open, or when nothing was
asked for ``idle_seconds``. Drafts are greedy, and vLLM verifies them as such at any temperature. One row is drafted
after the other.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from packaging.version import Version

from hybridspec.decoding.target import EngineTarget
from hybridspec.drafts.registry import make_draft, make_length
from hybridspec.engines.export.key_sets import installed
from hybridspec.engines.vllm.requests import Request, Requests
from hybridspec.engines.vllm.settings import ProposerSettings
from hybridspec.errors import ContextLengthError, InputError
from hybridspec.runtime.loading import load_tokenizer
from hybridspec.runtime.options import LoadOptions
from hybridspec.specs import STRATEGIES


class HybridDraftProposer:
    """vLLM makes one for each engine and calls :meth:`propose` after each of its steps.

    Attributes:
        requests: those that hold draft state.

    Raises:
        InputError: a setting is wrong, or the strategy needs the target's own session.
        IncompatiblePairError: draft and target number tokens otherwise.
    """

    def __init__(self, vllm_config: Any) -> None:
        additional = getattr(vllm_config, "additional_config", None)
        settings = ProposerSettings.read(additional, engine_options(vllm_config))
        self.k: int = vllm_config.speculative_config.num_speculative_tokens
        target = engine_target(vllm_config, settings.load)
        self.vocab_size: int = target.vocab_size
        refuse_readers(settings.draft)
        draft = make_draft(settings.draft, target)
        rule = self.k if settings.length is None else settings.length
        make_length(rule)
        scheduler = getattr(vllm_config, "scheduler_config", None)
        capacity = settings.max_sequences or getattr(scheduler, "max_num_seqs", None) or 64
        self.requests = Requests(draft, lambda: make_length(rule), capacity)
        self.max_length = target.max_length
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


def engine_options(vllm_config: Any) -> LoadOptions:
    """The type and the device of the target, which a draft has too unless a setting says otherwise."""
    dtype = getattr(getattr(vllm_config, "model_config", None), "dtype", "float32")
    device = getattr(getattr(vllm_config, "device_config", None), "device_type", "cpu")
    return LoadOptions(dtype=dtype, device=device)


def engine_target(vllm_config: Any, options: LoadOptions) -> EngineTarget:
    """The target that vLLM runs, for strategies that draft for it with ``options``."""
    model = vllm_config.model_config
    source: Any = getattr(model, "tokenizer", None)
    has_tokenizer = source is not None and not getattr(model, "skip_tokenizer_init", False)
    return EngineTarget(
        name=str(getattr(model, "model", "the target")),
        vocab_size=model.get_vocab_size(),
        tokenizer=load_tokenizer(source) if has_tokenizer else None,
        max_length=getattr(model, "max_model_len", None) or 2**31,
        options=options,
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
