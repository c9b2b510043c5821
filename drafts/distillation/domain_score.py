"""Teacher-forced losses of a target and its drafts, and how well these follow it."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybridspec.drafts.distillation.logit_distillation import rows_at_once


@dataclass
class DomainScore:
    """Held-out numbers of one domain; losses in nats per token."""

    tokens: int
    bytes_per_token: float
    target_loss: float
    draft_loss: dict[str, float]
    agreement: dict[str, float]
    acceptance: dict[str, float]


@torch.inference_mode()
def score(
    target: PreTrainedModel, drafts: dict[str, PreTrainedModel], windows: Tensor, bytes_per_token: float
) -> DomainScore:
    """Teacher-forced losses; a draft's agreement (same argmax) and acceptance (1 - total variation) against the
    target.
    """
    totals: dict[str, float] = {}
    for row in windows.split(min(4, rows_at_once(target, windows.shape[1]))):
        inputs, labels = row[:, :-1], row[:, 1:].flatten()
        p = target(input_ids=inputs, use_cache=False).logits.flatten(0, 1).log_softmax(-1)
        totals["target"] = totals.get("target", 0.0) - p.gather(1, labels[:, None]).sum().item()
        for name, draft in drafts.items():
            q = draft(input_ids=inputs, use_cache=False).logits.flatten(0, 1).log_softmax(-1)
            for key, value in (
                (f"{name} loss", -q.gather(1, labels[:, None]).sum()),
                (f"{name} agreement", (p.argmax(-1) == q.argmax(-1)).sum()),
                (f"{name} acceptance", torch.minimum(p.exp(), q.exp()).sum()),
            ):
                totals[key] = totals.get(key, 0.0) + value.item()
    tokens = windows[:, 1:].numel()

    def mean(kind: str) -> dict[str, float]:
        return {name: totals[f"{name} {kind}"] / tokens for name in drafts}

    return DomainScore(
        tokens, bytes_per_token, totals["target"] / tokens, mean("loss"), mean("agreement"), mean("acceptance")
    )
