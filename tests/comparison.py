"""What a session holds, as plain tensors, and whether that is what a fresh session would hold."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hybridspec.runtime.session import Session
from hybridspec.state.cache import RollbackCache
from hybridspec.state.layers import AttentionLayer, IndexedLayer, RecurrentLayer
from tests.reference import next_logits

#: Largest allowed difference, in units of the largest entry. fp32 rounding through 8 layers and 600 tokens stays under
#: a third of it, with tape and recompute alike.
TOLERANCE = 1e-5


def held_tensors(session: Session) -> dict[str, Tensor]:
    """Every tensor that decides what the session computes next, by layer.

    The same names in all rollback modes, as long as the model keeps its past in transformers' own cache layers; what it
    keeps elsewhere goes by the names of its attributes.
    """
    # The recompute mode keeps a cache of the model's own or, for models whose own cannot be continued, one of ours.
    cache = getattr(session.cache, "cache", session.cache)
    held: dict[str, Tensor | None] = {}
    if isinstance(cache, RollbackCache):
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, AttentionLayer):
                assert layer.length == session.length + session.cache.pending, f"layer {index} counts other tokens"
            held |= {f"{index} {name}": tensor for name, tensor in _rollback_tensors(layer).items()}
    else:
        return native_tensors(cache)
    return _something(held)


def _something(held: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Nothing yet, an empty tensor and zeros all mean the same start of a sequence."""
    return {name: x for name, x in held.items() if x is not None and x.numel() and x.any()}


def _rollback_tensors(layer: object) -> dict[str, Tensor | None]:
    """What one of our layers holds, without the columns that nothing will ever look at again."""
    held: dict[str, Tensor | None] = {}
    if isinstance(layer, AttentionLayer) and layer.buffer is not None:
        buffer, window = layer.buffer, layer.sliding_window
        first = 0 if window is None else max(0, layer.length - window + 1)
        assert first >= buffer.start, f"position {first} is still in the window, but was dropped"
        seen = slice(first - buffer.start, layer.length - buffer.start)
        held |= {"keys": buffer.keys[..., seen, :], "values": buffer.values[..., seen, :]}
    if isinstance(layer, IndexedLayer):
        held |= {"indexer_keys": layer.indexer_keys, "indexer_position_ids": layer.indexer_position_ids}
    if isinstance(layer, RecurrentLayer):
        for index, kernel in layer.conv_states.kernels.items():
            window = layer.conv_states.get(index)
            held[_numbered("window", index)] = None if window is None else window[..., window.shape[-1] - kernel :]
        for index, state in layer.recurrent_states.items():
            held[_numbered("state", index)] = state
    return held


def _numbered(name: str, index: int) -> str:
    """The first of a layer's windows and states has no number: most layers have no second."""
    return f"{name} {index}" if index else name


#: Attribute of transformers' caches and cache layers -> its name here.
NAMES = {"layers": "", "conv_states": "window", "recurrent_states": "state"}


def native_tensors(cache: object) -> dict[str, Tensor]:
    """What a cache of transformers' own holds, whatever its kind."""
    return _something(dict(_named_tensors(cache)))


def _named_tensors(thing: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside a cache of whatever kind: in layers, lists and dictionaries of them, attributes."""
    if isinstance(thing, Tensor):
        yield name, thing
    elif isinstance(thing, dict | list | tuple):
        several = name.endswith((" window", " state"))
        for key, part in thing.items() if isinstance(thing, dict) else enumerate(thing):
            yield from _named_tensors(part, _numbered(name, key) if several else f"{name} {key}".strip())
    elif type(thing).__module__.startswith("transformers."):
        for key, part in vars(thing).items():
            if key != "_sliding_window_tensor":
                yield from _named_tensors(part, f"{name} {NAMES.get(key, key)}".strip())


def assert_close(actual: Tensor, expected: Tensor, name: str, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    error = (actual - expected).abs().max().item()
    limit = tolerance * expected.abs().max().item()
    assert error <= limit, f"{name}: differs by {error:.2e}, more than {limit:.2e}"


def assert_same_tensors(actual: Session, expected: Session, tolerance: float = TOLERANCE) -> None:
    assert_all_close(held_tensors(actual), held_tensors(expected), tolerance)


def assert_all_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert_close(ours[name], theirs[name], name, tolerance)


def assert_same_output(model: nn.Module, prompt: list[int], actual: list[int], expected: list[int]) -> None:
    """Equal tokens. If they are not, the message tells a tie, which rounding decides, from a wrong state: by how much
    the expected token won in a pass without cache, in units of the logits' spread.
    """
    at = next((i for i, (a, b) in enumerate(zip(actual, expected, strict=False)) if a != b), len(expected))
    if at == len(expected) == len(actual):
        return
    logits = next_logits(model, [*prompt, *expected[:at]])[-1]
    first, second = logits.topk(2).values.tolist()
    raise AssertionError(
        f"token {at} is {actual[at : at + 1]} instead of {expected[at : at + 1]}; the two likeliest tokens there have "
        f"a margin of {(first - second) / logits.std().item():.1e} of the logits' spread"
    )


def assert_varied(tokens: list[int]) -> None:
    """A model that repeats itself gives the same output from a wrong state as from the right one."""
    distinct = len(set(tokens))
    assert distinct >= len(tokens) // 3, f"only {distinct} distinct tokens of {len(tokens)}: {tokens}"


def fresh(session: Session, tokens: list[int]) -> Session:
    """A new session on the same model and mode that only ever saw ``tokens``."""
    return session.runner.start([*tokens, 0])


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
            tensor.add_(1)
