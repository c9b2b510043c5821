"""A few tokens at load time: does the rollback of this very model, on this version of transformers, give the right
state?
"""

from typing import TYPE_CHECKING

import torch

from hybridspec.errors import UnsupportedLayerError

if TYPE_CHECKING:
    from hybridspec.runner import TargetRunner

#: Largest difference of logits, relative to their spread, that rounding explains.
TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6}
HALF_TOLERANCE = 0.1


def check_rollback(runner: "TargetRunner") -> None:
    """Feeds 4 tokens, then 5 of which it keeps 2, then one more; compares with a pass that never saw the other 3.

    Raises:
        UnsupportedLayerError: the logits differ, or the model does not run this way at all.
    """
    tokens = [1 + (i * 7919) % (runner.vocab_size - 1) for i in range(10)]
    kept, rejected = tokens[:7], tokens[7:]
    try:
        with runner.start(kept[:5]) as session:
            session.verify(kept[4:6] + rejected)
            session.commit(2)
            rolled_back = session.verify(kept[6:])[-1].float()
        with torch.inference_mode():
            ids = torch.tensor([kept], device=runner.model.device)
            expected = runner.model(input_ids=ids, use_cache=False).logits[0, -1].float()
    except Exception as error:
        raise UnsupportedLayerError(
            f"{runner.name}: the rollback self-test could not run ({type(error).__name__}: {error}). "
            "Use rollback='recompute'."
        ) from error
    difference = float((rolled_back - expected).abs().max() / expected.std().clamp(min=1e-9))
    if not difference <= TOLERANCE.get(runner.model.dtype, HALF_TOLERANCE):
        raise UnsupportedLayerError(
            f"{runner.name}: after a rollback the logits are off by {difference:.2g} of their spread, so the tape does not "
            f"fit this model ({runner.config.model_type!r}). Use rollback='recompute'."
        )
