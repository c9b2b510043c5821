"""A proposer for vLLM's ``custom_class`` method that knows the true continuation and plants wrong tokens in it."""

import json
from pathlib import Path


class Oracle:
    """Reads ``additional_config["hybridspec_audit"]``: a JSON file with ``sequences`` (prompt and true continuation),
    ``ragged``, and ``log``, the file that it writes a JSON line to in each call:
    ``[[sequence, drafted before, accepted of these, drafted now], ...]`` of the rows that have sampled. A row whose
    history is none of the sequences is number -1 and gets no draft.
    """

    def __init__(self, vllm_config) -> None:
        job = json.loads(Path(vllm_config.additional_config["hybridspec_audit"]).read_text())
        self.k = vllm_config.speculative_config.num_speculative_tokens
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        #: All tokens, and how many of them are the prompt.
        self.sequences: list[tuple[list[int], int]] = job["sequences"]
        self.plan = plan(self.k, job["ragged"])
        self.log = open(job["log"], "a", buffering=1)  # noqa: SIM115 - open as long as the engine
        self.steps = [0] * len(self.sequences)
        #: Sequence -> length of its history and number of drafted tokens, at the last call.
        self.last: dict[int, tuple[int, int]] = {}

    def load_model(self, *_, **__) -> None:
        """There is none."""

    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=None, **_):
        proposals, told = [], []
        for row, sampled in enumerate(sampled_token_ids):
            if not sampled:
                proposals.append([])
                continue
            n = int(num_tokens_no_spec[row])
            history = token_ids_cpu[row, :n].tolist()
            number = self.find(history)
            draft = [] if number < 0 else self.draft(number, n)
            length, drafted = self.last.get(number, (n, 0))
            told.append([number, drafted, max(0, n - length - 1) if n > length else 0, len(draft)])
            self.last[number] = (n, len(draft))
            proposals.append(draft)
        self.log.write(json.dumps(told) + "\n")
        return proposals

    def find(self, history: list[int]) -> int:
        """The sequence that begins with ``history``, or goes beyond its end with it; else -1."""
        for number, (tokens, _) in enumerate(self.sequences):
            if tokens[: len(history)] == history[: len(tokens)]:
                return number
        return -1

    def draft(self, number: int, n: int) -> list[int]:
        tokens, prompt = self.sequences[number]
        if n == prompt + 1:
            self.steps[number] = 2 * number
        length, right = self.plan[self.steps[number] % len(self.plan)]
        self.steps[number] += 1
        draft = tokens[n : n + length]
        if right < len(draft):
            draft[right] = (draft[right] + 1) % self.vocab_size
        # Beyond the end of what is known any token will do: a shorter draft would be another case.
        return draft + [0] * (length - len(draft))


def plan(k: int, ragged: bool) -> list[tuple[int, int]]:
    """``(drafted, right)`` of the steps of a sequence, over and over: K tokens with 0 to K right ones before the first
    wrong one, with shorter drafts and empty ones between them if ``ragged``.
    """
    full = [(k, right) for right in range(k + 1)]
    if not ragged:
        return full
    short = [(length, length) for length in range(k)]
    return [step for i in range(k + 1) for step in (full[i], *short[i : i + 1])]
