"""The economize package: snapshot of the recurrent states, and accepted tokens run again after a rejection."""

import logging
from pathlib import Path

from benchmarks.decoders import Decoder, Moment, now, timed
from benchmarks.transformers_model import TransformersModel
from hybridspec.decoding.timed_generation import TimedGeneration


class Economize(Decoder):
    """Its ``draft_model`` technique with the greedy verifier: a cycle of K + 1 tokens; K = 0 is its plain decoding."""

    def __init__(self, target: Path, draft: Path) -> None:
        import economize
        from economize.techniques.draft_model import DraftModelConfig

        logging.getLogger("economize").setLevel(logging.ERROR)
        base = TransformersModel(target)
        self.stop_tokens = base.stop_tokens
        self.model = economize.apply(base.model, DraftModelConfig(model=str(draft)))
        self.options = economize.DecodeConfig

    def decode(self, prompt: list[int], new_tokens: int, k: int) -> TimedGeneration:
        import torch

        ends: list[tuple[int, Moment]] = []

        def stopped(tokens: torch.Tensor) -> bool:
            """Called after each committed token with all tokens so far."""
            ends.append((len(tokens) - len(prompt), now()))
            return int(tokens[-1]) in self.stop_tokens

        begun = now()
        # Left at its default, plain decoding tells of eight tokens at a time: the clock would start late.
        options = self.options(cycle_length=k + 1, sync_interval=1)
        result = self.model.decode(torch.tensor(prompt), new_tokens, decoding=options, stop=stopped)
        tokens = result.tokens.tolist()
        # After its first pass the draft reads the prompt; the tokens of the second pass come together.
        cycle = result.acceptance[0][1] + 1 if k and result.acceptance else 0
        done, timed_from = ends[min(cycle, len(ends) - 1)]
        return timed(tokens, begun, timed_from, done, result.acceptance)
