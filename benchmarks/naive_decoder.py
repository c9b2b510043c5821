"""What one writes first: speculative decoding of a hybrid with a copy of the whole cache and a second forward pass.

transformers alone. Before each verify pass the target's cache is deep-copied; after a rejection the copy is thrown away
and the accepted tokens are fed to the original. The draft is treated alike: a copy from before it drafts, and what was
accepted is fed to that in the next round, together with the token that the target chose.
"""

import copy
from pathlib import Path
from typing import Any

from benchmarks.decoders import Decoder, now, timed
from benchmarks.transformers_model import TransformersModel
from hybridspec.decoding.timed_generation import TimedGeneration


class Naive(Decoder):
    """K tokens of the draft per step; K at least 1."""

    def __init__(self, target: Path, draft: Path) -> None:
        self.target, self.draft = TransformersModel(target), TransformersModel(draft)

    def decode(self, prompt: list[int], new_tokens: int, k: int) -> TimedGeneration:
        begun = now()
        cache, drafted = self.target.dynamic_cache(), self.draft.dynamic_cache()
        committed = list(prompt)
        if len(prompt) > 1:
            self.target(prompt[:-1], cache, 0, last_only=True)
            self.draft(prompt[:-1], drafted, 0, last_only=True)
        seen = len(prompt) - 1
        steps: list[tuple[int, int]] = []
        timed_from = now()
        while (left := len(prompt) + new_tokens - len(committed)) > 0:
            wanted = min(k, left - 1)
            proposal, drafted, seen = self.propose(committed, drafted, seen, wanted)
            choices, accepted, cache = self.verify(committed, proposal, cache)
            steps.append((len(proposal), accepted))
            new = [*proposal[:accepted], choices[accepted]]
            stop = next((i for i, token in enumerate(new) if token in self.target.stop_tokens), None)
            committed += new if stop is None else new[: stop + 1]
            if stop is not None:
                break
        tokens = committed[len(prompt) :]
        return timed(tokens, begun, timed_from, steps=steps)

    def propose(self, committed: list[int], cache: Any, seen: int, wanted: int) -> tuple[list[int], Any, int]:
        """Drafted tokens, and the draft's cache with the number of committed tokens in it."""
        if not wanted:
            return [], cache, seen
        token = self.draft.greedy(committed[seen:], cache, seen)
        proposal, seen = [token], len(committed)
        scratch = copy.deepcopy(cache)
        while len(proposal) < wanted:
            token = self.draft.greedy([token], scratch, seen + len(proposal) - 1)
            proposal.append(token)
        return proposal, cache, seen

    def verify(self, committed: list[int], proposal: list[int], cache: Any) -> tuple[list[int], int, Any]:
        """The target's choice after each token of the block, how many proposed ones meet it, and the cache then."""
        block, position = [committed[-1], *proposal], len(committed) - 1
        scratch = copy.deepcopy(cache)
        choices = self.target(block, scratch, position).argmax(-1).tolist()
        accepted = next((i for i, token in enumerate(proposal) if token != choices[i]), len(proposal))
        if accepted == len(proposal):
            return choices, accepted, scratch
        self.target(block[: accepted + 1], cache, position, last_only=True)
        return choices, accepted, cache
