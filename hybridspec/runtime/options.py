"""How a model is loaded and run: one object, made once from a command line, a file or Python, and passed on whole."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from hybridspec.errors import InputError

if TYPE_CHECKING:
    # Commands that only read options need no torch.
    import torch

RollbackMode = Literal["auto", "tape", "slots", "recompute"]
#: Types that are known without a look into torch.
USUAL_TYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class LoadOptions:
    """Plain values, so that they can be written down and sent to another process.

    Args:
        dtype: type of the weights, by its name in torch (``bfloat16``); a ``torch.dtype`` is kept as its name.
        device: where the model runs, by its name in torch (``cpu``, ``cuda:1``); a ``torch.device`` likewise.
        rollback: ``tape`` (closed form), ``slots`` (one state per token, as vLLM does), ``recompute`` (copy and feed
            again, for any model), or ``auto``: ``tape`` where it is known, else ``recompute`` with a warning.
        compile: run verify passes compiled, see :mod:`hybridspec.runtime.compiled`: several times faster where Python
            is what costs time, but the first block of each size takes minutes. Needs a C++ compiler on the CPU.
        packed: keep a second copy of the larger weights for short blocks, see :mod:`hybridspec.runtime.packed`; float32
            on a CPU only.

    Raises:
        InputError: a value does not exist, or ``compile`` together with ``packed``.
    """

    dtype: str = "float32"
    device: str = "cpu"
    rollback: RollbackMode = "auto"
    compile: bool = False
    packed: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        object.__setattr__(self, "device", str(self.device))
        if self.dtype not in USUAL_TYPES:
            torch_type(self.dtype)
        if self.rollback not in get_args(RollbackMode):
            raise InputError(f"unknown rollback {self.rollback!r}: choose one of {', '.join(get_args(RollbackMode))}")
        for name in ("compile", "packed"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if self.compile and self.packed:
            raise InputError("compiled passes do not use packed weights: choose one of them (--compile, --packed)")

    @property
    def torch_dtype(self) -> "torch.dtype":
        return torch_type(self.dtype)


def torch_type(name: str) -> "torch.dtype":
    """Raises :class:`~hybridspec.errors.InputError` where torch has no such type."""
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise InputError(f"dtype must be a type of torch such as bfloat16, not {name!r}")
    return found


def load_options(options: LoadOptions | None = None, **fields: Any) -> LoadOptions:
    """``options``, or the defaults, with ``fields`` of :class:`LoadOptions` in place of their own.

    Raises:
        InputError: as :class:`LoadOptions`.
        TypeError: there is no such field.
    """
    return replace(options or LoadOptions(), **fields)
