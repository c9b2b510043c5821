"""Static sessions beside ordinary ones, for tests."""

import random

import pytest
from torch import Tensor

from hybridspec.runtime.runner import TargetRunner
from hybridspec.runtime.session import Session
from hybridspec.runtime.static_runner import StaticRunner
from hybridspec.state.static_layers import StaticAttentionLayer, StaticRecurrentLayer
from tests import families
from tests.comparison import assert_all_close, held_tensors
from tests.families import USUAL
from tests.tiny import VOCABULARY, tiny_model

CAPACITY = 256


#: Families whose layers have no fixed size here: a sparse-attention indexer, or layers that appear as the model runs.
REFUSED = {"qwen4_exp_text", "qwen4_exp_text+ple", "glm5_next", "inkling2_loop_text"}


every_family = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in USUAL else pytest.mark.slow)
        for name in families.FAMILIES
        if name not in families.WITHOUT_TAPE | REFUSED
    ],
)


RUNNERS: dict[str, tuple[StaticRunner, TargetRunner]] = {}


def runners(name: str = "plain") -> tuple[StaticRunner, TargetRunner]:
    """The same model, static and ordinary."""
    if name not in RUNNERS:
        if name == "plain":
            ordinary = TargetRunner(tiny_model(layers=4, seed=1), rollback="tape")
        else:
            ordinary = families.family_runner(name, "tape")
        RUNNERS[name] = StaticRunner(ordinary.model, capacity=CAPACITY), ordinary
    return RUNNERS[name]


def some_tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=count)


def static_tensors(session: Session) -> dict[str, Tensor]:
    """What :func:`held_tensors` tells of an ordinary session: all that decides what is computed next."""
    cache = session.cache
    cache.show()
    assert cache.arena.place.length == session.length
    held: dict[str, Tensor | None] = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, StaticAttentionLayer) and layer.keys is not None:
            window = layer.sliding_window
            seen = slice(0 if window is None else max(0, session.length - window + 1), session.length)
            held |= {f"{index} keys": layer.keys[..., seen, :], f"{index} values": layer.values[..., seen, :]}
        if isinstance(layer, StaticRecurrentLayer):
            for which, window in layer.conv_states.items():
                held[f"{index} window {which}" if which else f"{index} window"] = window
            for which, state in layer.recurrent_states.items():
                held[f"{index} state {which}" if which else f"{index} state"] = state
    return {name: x for name, x in held.items() if x is not None and x.numel() and x.any()}


def assert_same(static: Session, ordinary: Session) -> None:
    assert static.tokens == ordinary.tokens
    assert_all_close(static_tensors(static), held_tensors(ordinary))
