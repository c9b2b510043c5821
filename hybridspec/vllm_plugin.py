"""A proposer for vLLM's ``custom_class`` method: a small hybrid drafts for a hybrid target, which vLLM's own draft
methods refuse.

    VLLM_USE_V2_MODEL_RUNNER=0 vllm serve TARGET --no-enable-prefix-caching \\
        --speculative-config '{"method": "custom_class", "model": "hybridspec.vllm_plugin.HybridDraftProposer",
                               "num_speculative_tokens": 4}' \\
        --additional-config '{"hybridspec": {"draft": "/path/to/draft"}}'

vLLM tells a proposer token histories, not request names, so a request is recognised by its history. Drafts are greedy.
"""

from collections import OrderedDict
from collections.abc import Sequence

from hybridspec.errors import InputError
from hybridspec.runner import TargetRunner
from hybridspec.session import Session

#: Sequences kept; the one unused for longest goes first.
MAX_SESSIONS = 64


class DraftSequence:
    """One request's draft session: ``session.tokens`` are committed, ``ahead`` are pending tokens it drafted."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.ahead: list[int] = []

    def agreement(self, history: Sequence[int]) -> int:
        """Tokens of ``history`` that the session has been fed, or -1 if it belongs to another sequence."""
        tokens = self.session.tokens
        if len(tokens) >= len(history) or history[: len(tokens)] != tokens:
            return -1
        count = 0
        while (
            count < len(self.ahead)
            and len(tokens) + count < len(history) - 1
            and self.ahead[count] == history[len(tokens) + count]
        ):
            count += 1
        return len(tokens) + count

    def propose(self, history: list[int], k: int) -> list[int]:
        """Drafts after ``history``: keeps what agrees, takes the rest back, feeds what is new."""
        kept = self.agreement(history) - self.session.length
        if self.ahead:
            self.session.commit(kept)
            self.ahead = []
        if len(history) - self.session.length > self.session.room:
            return []
        self.session.prefill(history[self.session.length : -1])
        block, drafted = history[-1:], []
        for _ in range(min(k, self.session.room)):
            drafted.append(int(self.session.verify(block)[-1].argmax()))
            self.ahead += block
            block = drafted[-1:]
        return drafted


class HybridDraftProposer:
    """vLLM builds it from ``additional_config["hybridspec"]["draft"]`` and ``num_speculative_tokens``."""

    def __init__(self, vllm_config: object) -> None:
        settings = (getattr(vllm_config, "additional_config", None) or {}).get("hybridspec") or {}
        if "draft" not in settings:
            raise InputError('--additional-config needs {"hybridspec": {"draft": "<checkpoint folder>"}}')
        self.k = vllm_config.speculative_config.num_speculative_tokens
        self.runner = TargetRunner.from_pretrained(settings["draft"], device=settings.get("device", "cpu"))
        expected = vllm_config.model_config.get_vocab_size()
        if self.runner.vocab_size != expected:
            raise InputError(f"{self.runner.path}: vocab_size is {self.runner.vocab_size}, the target's is {expected}")
        self._sequences: OrderedDict[int, DraftSequence] = OrderedDict()

    def load_model(self, *_: object, **__: object) -> None:
        """The draft is loaded already."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Sequence[int],
        token_ids_cpu: object,
        slot_mappings: object = None,
        **_: object,
    ) -> list[list[int]]:
        """Up to K tokens for each row that has just sampled; rows without a sample get none."""
        proposals: list[list[int]] = []
        for row, sampled in enumerate(sampled_token_ids):
            if not sampled:
                proposals.append([])
                continue
            history = token_ids_cpu[row, : int(num_tokens_no_spec[row])].tolist()
            proposals.append(self._sequence(history).propose(history, self.k))
        return proposals

    def _sequence(self, history: list[int]) -> DraftSequence:
        """The session that knows most of ``history``, or a new one."""
        known = max(self._sequences.values(), key=lambda s: s.agreement(history), default=None)
        if known is None or known.agreement(history) < 1:
            known = DraftSequence(self.runner.start(history[:1]))
        self._sequences[id(known)] = known
        self._sequences.move_to_end(id(known))
        while len(self._sequences) > MAX_SESSIONS:
            self._sequences.popitem(last=False)[1].session.close()
        return known
