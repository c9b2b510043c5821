"""Fused GPU forms of short verify passes: outputs and tape in one launch, where the torch form needs a dozen.

One file for each kernel; :func:`chosen` says when they run. Every kernel has the same twin in
:mod:`hybridspec.recurrence`, whose rollback takes its tape.
"""

import functools
import importlib.util
import os
from typing import Literal, get_args

from torch import Tensor

from hybridspec.errors import InputError

#: ``auto``: Triton for CUDA tensors where it is installed; ``torch``: never; ``triton``: always, also on the CPU, which
#: takes Triton's interpreter (``TRITON_INTERPRET=1``).
Choice = Literal["auto", "torch", "triton"]
VARIABLE = "HYBRIDSPEC_KERNELS"


def chosen(x: Tensor) -> bool:
    """Whether the recurrences of a block on the device of ``x`` run as Triton kernels.

    Raises:
        InputError: the environment variable ``HYBRIDSPEC_KERNELS`` holds something unknown, or asks for Triton where it
            is not installed.
    """
    choice = os.environ.get(VARIABLE, "auto")
    if choice == "torch" or (choice == "auto" and not x.is_cuda):
        return False
    if choice not in get_args(Choice):
        raise InputError(f"{VARIABLE}={choice!r} is unknown: set it to one of {', '.join(get_args(Choice))}")
    if choice == "triton" and not installed():
        raise InputError(f"{VARIABLE}=triton, but Triton is not installed: pip install 'hybridspec[cuda]'")
    return installed()


@functools.cache
def installed() -> bool:
    return importlib.util.find_spec("triton") is not None
