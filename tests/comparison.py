"""What a session holds, as plain tensors, and whether that is what a fresh session would hold."""

import torch
from torch import Tensor

from hybridspec.cache import AttentionLayer, RecurrentLayer, RollbackCache
from hybridspec.session import Session

#: Largest allowed difference, in units of the largest entry. fp32 rounding through 8 layers and 600 tokens stays under
#: a third of it, with tape and recompute alike.
TOLERANCE = 1e-5


def held_tensors(session: Session) -> dict[str, Tensor]:
    """Every tensor that decides what the session computes next, by layer; the same names in both rollback modes."""
    cache = session.cache
    layers = cache.layers if isinstance(cache, RollbackCache) else cache.cache.layers
    held: dict[str, Tensor | None] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer, AttentionLayer):
            assert layer.length == session.length + session.cache.pending, f"layer {index} counts other tokens"
            if layer.buffer is not None:
                held[f"{index} keys"] = layer.buffer.keys[..., : layer.length, :]
                held[f"{index} values"] = layer.buffer.values[..., : layer.length, :]
        elif hasattr(layer, "conv_states"):
            kernel = layer.kernel if isinstance(layer, RecurrentLayer) else layer.conv_kernel_size[0]
            window = layer.conv_states[0]
            held[f"{index} window"] = None if window is None else window[..., -kernel:]
            held[f"{index} state"] = layer.recurrent_states[0]
        else:
            held[f"{index} keys"], held[f"{index} values"] = layer.keys, layer.values
    # Nothing yet, an empty tensor and zeros all mean the same start of a sequence.
    return {name: x for name, x in held.items() if x is not None and x.numel() and x.any()}


def assert_close(actual: Tensor, expected: Tensor, name: str) -> None:
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    error = (actual - expected).abs().max().item()
    limit = TOLERANCE * expected.abs().max().item()
    assert error <= limit, f"{name}: differs by {error:.2e}, more than {limit:.2e}"


def assert_same_tensors(actual: Session, expected: Session) -> None:
    ours, theirs = held_tensors(actual), held_tensors(expected)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert_close(ours[name], theirs[name], name)


def fresh(session: Session, tokens: list[int]) -> Session:
    """A new session on the same model and mode that only ever saw ``tokens``."""
    return session._runner.start([*tokens, 0])


def assert_holds(session: Session, tokens: list[int]) -> None:
    """As if the session had only ever seen ``tokens``: in what it holds, and in what it computes and keeps next."""
    assert session.tokens == tokens
    assert session.length == len(tokens)
    expected = fresh(session, tokens)
    assert_same_tensors(session, expected)
    # The states that a rollback starts from are not those that a forward pass reads: use both.
    for block, keep in (([3, 1, 4], 2), ([1, 5], 2)):
        assert_close(session.verify(block), expected.verify(block), "next logits")
        for each in (session, expected):
            each.commit(keep)
        assert_same_tensors(session, expected)


def perturbed(session: Session) -> None:
    """Makes every held tensor wrong, to show that a comparison would notice."""
    with torch.inference_mode():
        for tensor in held_tensors(session).values():
            tensor.add_(1.0)
