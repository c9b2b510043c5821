"""Models that take no cache but a class of their own."""

import functools
import importlib

#: Model type -> the one cache class that the model takes.
CACHES = {"minimax": "MiniMaxCache"}


@functools.cache
def accepted(ours: type, model_type: str) -> type:
    """The class ``ours``, or one that is also what a model of this type insists on. Ours comes first in all it does."""
    name = CACHES.get(model_type)
    if name is None:
        return ours
    theirs = getattr(importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}"), name)
    return type(ours.__name__, (ours, theirs), {"__module__": ours.__module__, "linear_cache": ()})
