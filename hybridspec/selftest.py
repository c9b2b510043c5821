"""A few tokens at load time: is the rollback of this very model, on this version of transformers, exact?"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridspec.errors import UnsupportedLayerError

if TYPE_CHECKING:
    from hybridspec.runner import TargetRunner
    from hybridspec.session import Session

#: Largest difference, relative to the spread of what is compared, that rounding explains.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
HALF_TOLERANCE = 0.1


def check_rollback(runner: "TargetRunner") -> None:
    """Feeds 4 tokens, then 5 of which it keeps 2; compares the logits after one more, and the recurrent states.

    The logits' reference is one pass over the kept tokens without a cache; that of the states a session that saw only
    those.

    Raises:
        UnsupportedLayerError: they differ, or the model does not run this way at all.
    """
    advice = (
        "No rollback mode serves this model yet." if runner.rollback == "recompute" else "Try rollback='recompute'."
    )
    tokens = [1 + (i * 7919) % (runner.vocab_size - 1) for i in range(10)]
    kept, rejected = tokens[:7], tokens[7:]
    try:
        with runner.start(kept[:5]) as session, runner.start(kept[:5]) as reference:
            session.verify(kept[4:6] + rejected)
            session.commit(2)
            reference.verify(kept[4:6])
            reference.commit(2)
            states = [(_states(session), _states(reference))]
            logits = session.verify(kept[6:])[-1].float()
        with torch.inference_mode():
            ids = torch.tensor([kept], device=runner.model.device)
            expected = runner.model(input_ids=ids, use_cache=False).logits[0, -1].float()
    except Exception as error:
        raise UnsupportedLayerError(
            f"{runner.name}: the rollback self-test could not run ({type(error).__name__}: {error}). {advice}"
        ) from error
    tolerance = TOLERANCE.get(runner.model.dtype, HALF_TOLERANCE)
    if runner.clamps_steps:
        # The reference takes the many-token path.
        tolerance = HALF_TOLERANCE
    for what, ours, theirs in (("logits", [logits], [expected]), *(("states", *pair) for pair in states)):
        difference = max((_difference(a, b) for a, b in zip(ours, theirs, strict=True)), default=0.0)
        if not difference <= tolerance:
            raise UnsupportedLayerError(
                f"{runner.name}: after a rollback the {what} of this {runner.config.model_type!r} model are off by "
                f"{difference:.2g} of their spread. {advice}"
            )


def _states(session: "Session") -> list[Tensor]:
    """Recurrent states that the cache exposes, where it does."""
    cache = getattr(session.cache, "cache", session.cache)
    states = [getattr(layer, "recurrent_states", {}).get(0) for layer in getattr(cache, "layers", ())]
    return [state.float().clone() for state in states if state is not None]


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.std().clamp(min=1e-9))
