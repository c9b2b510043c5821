"""Bytes that a decoding step needs of a sequence's recurrent past."""

from hybridspec.runtime.session import Session
from hybridspec.state.layers import RecurrentLayer


def plane_bytes(session: Session) -> tuple[int, int]:
    """Bytes of the recurrent states and of the convolution windows at a committed position: what decoding needs."""
    layers = [layer for layer in session.cache.layers if isinstance(layer, RecurrentLayer)]
    states = [layer.recurrent_states.get(0) for layer in layers]
    windows = [window for layer in layers for window in layer.conv_states.values()]
    state, window = ([x for x in tensors if x is not None] for tensors in (states, windows))
    return sum(x.nbytes for x in state), sum(x.nbytes for x in window)
