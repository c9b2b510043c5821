"""Learning a target's distributions: its logits, each kept for several steps, and one step of a draft on them."""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

#: Entries of one logits tensor ``[rows, T, vocab]`` at most: half a gigabyte in fp32, and a step holds several.
LARGEST_LOGITS = 2**27


def rows_at_once(model: PreTrainedModel, length: int) -> int:
    """How many rows of ``length`` tokens a forward pass should take, for its logits not to fill the memory."""
    return max(1, LARGEST_LOGITS // (length * model.config.get_text_config(decoder=True).vocab_size))


class LogitsPool:
    """Windows with the target's logits on them. A draft meets each several times: a pass of the target costs more.

    Logits are kept in fp16, the newest ones, in at most ``largest_bytes``; where too few fit (a large vocabulary), each
    step gets fresh ones.
    """

    #: Steps that one pass of the target serves.
    REPEATS = 4

    def __init__(self, target: PreTrainedModel, rows: int, length: int, seed: int, largest_bytes: int = 2**30) -> None:
        self.target, self.rows, self.seed = target, rows, seed
        vocabulary = target.config.get_text_config(decoder=True).vocab_size
        windows = largest_bytes // (2 * length * vocabulary)
        self.kept: deque[tuple[Tensor, Tensor]] = deque(maxlen=windows if windows >= 16 * rows else 0)
        self.fresh_tokens = 0

    def step(self, number: int, draw: Callable[[], Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of one step's (inputs ``[rows, T]``, logits ``[rows, T, vocab]``). ``draw`` gives fresh inputs."""
        if number % self.REPEATS and self.kept:
            chosen = random.Random(f"{self.seed} {number}").sample(range(len(self.kept)), self.rows)
            inputs, logits = zip(*(self.kept[i] for i in chosen), strict=True)
            yield torch.stack(inputs), torch.stack(logits).float()
            return
        fresh = draw()
        self.fresh_tokens += fresh.numel()
        for part in fresh.split(rows_at_once(self.target, fresh.shape[1])):
            logits = target_logits(self.target, part)
            self.kept.extend(zip(part, logits.half(), strict=True))
            yield part, logits


@torch.no_grad()
def target_logits(target: PreTrainedModel, inputs: Tensor) -> Tensor:
    """Logits ``[rows, T, vocab]`` of the frozen target, in fp32."""
    return target(input_ids=inputs, use_cache=False).logits.float()


def learn(drafts: Mapping[str, PreTrainedModel], parts: Iterable[tuple[Tensor, Tensor]], rows: int) -> dict[str, float]:
    """Leaves on each draft the gradient of its loss over ``rows`` rows, given in parts of (inputs, target's logits).

    Returns losses (nats) and agreement (same argmax), by name of the draft.
    """
    found: dict[str, float] = {}
    for inputs, logits in parts:
        share = inputs.shape[0] / rows
        p, best = logits.softmax(-1), logits.argmax(-1)
        for name, draft in drafts.items():
            q = draft(input_ids=inputs, use_cache=False).logits.log_softmax(-1)
            # Cross-entropy to the target's distribution: its gradient is that of the Kullback-Leibler divergence.
            loss = -(p * q).sum(-1).mean() * share
            loss.backward()
            agreement = (q.argmax(-1) == best).float().mean().item() * share
            for key, value in ((f"{name}_loss", loss.item()), (f"{name}_agreement", agreement)):
                found[key] = found.get(key, 0.0) + value
    return found
