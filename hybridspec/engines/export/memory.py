"""How many sequences a GPU holds when the recurrent state is kept once per drafted token, as vLLM keeps it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from hybridspec.checkpoints.memory import BYTES, GIB, LayerMemory
from hybridspec.engines.export.models import ExportedModel

#: vLLM's default share of a GPU (``config/cache.py`` of 0.32 and 0.33).
UTILIZATION = 0.92
MIB = 2**20


def page_bytes(layer: LayerMemory, k: int, state_dtype: str | None) -> int:
    """One slot of a recurrent layer: the state, and convolution windows of kernel - 1 + K columns
    (``model_executor/layers/mamba/mamba_utils.py``). vLLM pads it to the page of an attention layer, which is not
    counted here.
    """
    state = prod(layer.state) * BYTES.get(state_dtype or layer.model_dtype, 4) if layer.state else 0
    windows = sum(prod(shape[:-1]) * (shape[-1] - 1 + k) for shape in layer.windows)
    return state + windows * BYTES[layer.model_dtype]


def slot_bytes(layers: Sequence[LayerMemory], k: int, state_dtype: str | None) -> int:
    """One slot of all recurrent layers of one sequence."""
    return sum(page_bytes(layer, k, state_dtype) for layer in layers)


@dataclass(frozen=True)
class MemoryAdvice:
    """``max_num_seqs`` from memory; bytes over all GPUs of the tensor-parallel group.

    Attributes:
        slots: states per sequence: 1 + K, and one more with prefix caching.
        slot, kv: bytes of one slot, and of keys and values of ``length`` tokens, per sequence.
        draft_kv: of the draft model, per sequence, its states included.
        sequences: that fit; None if ``gpu_memory`` is not known.
    """

    slots: int
    slot: int
    kv: int
    draft_kv: int
    length: int
    weights: int | None
    draft_weights: int
    gpu_memory: float | None = None
    gpus: int = 1
    utilization: float = UTILIZATION
    sequences: int | None = None

    @property
    def each(self) -> int:
        return self.slots * self.slot + self.kv + self.draft_kv

    @property
    def formula(self) -> str:
        """The arithmetic with its numbers."""
        draft = f" + {amount(self.draft_kv)} of the draft" if self.draft_kv else ""
        each = (
            f"{self.slots} x {amount(self.slot)} of state + {amount(self.kv)} of keys and values for {self.length} "
            f"tokens{draft} = {amount(self.each)} per sequence"
        )
        if self.sequences is None:
            return each
        draft = f" - {amount(self.draft_weights)} of draft weights" if self.draft_weights else ""
        gpus = f"{self.gpus} x " if self.gpus > 1 else ""
        return (
            f"({gpus}{self.gpu_memory:g} GiB x {self.utilization:g} - {amount(self.weights or 0)} of weights{draft}) "
            f"/ ({each}) = {self.sequences}"
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"bytes_per_sequence": self.each, "formula": self.formula}


def advise(
    target: ExportedModel,
    draft: ExportedModel | None,
    *,
    k: int,
    prefix_caching: bool,
    length: int,
    gpu_memory: float | None,
    gpus: int,
    utilization: float | None,
    dtype: str | None = None,
    state_dtype: str | None = None,
    kv_dtype: str | None = None,
) -> MemoryAdvice | None:
    """None where a layer of the target has no formula.

    Args:
        draft: a model that vLLM itself, or our proposer beside it, keeps on the same GPU.
        k: 0 is plain decoding, with one slot.
        gpu_memory: GiB of one GPU.
        dtype, state_dtype, kv_dtype: as engine arguments choose them; None or ``auto`` is vLLM's default.
    """
    if target.layers is None:
        return None
    slots = 1 + k + (prefix_caching and k > 0)
    values = "fp8" if str(kv_dtype).startswith("fp8") else kv_dtype if kv_dtype in BYTES else None
    layers = [replace(layer, model_dtype=dtype) for layer in target.layers] if dtype in BYTES else target.layers
    kv = sum(layer.kv_bytes(length, values) for layer in layers)
    draft_layers = draft.layers if draft is not None and draft.layers is not None else ()
    draft_kv = sum(layer.kv_bytes(length) + 2 * layer.state_bytes for layer in draft_layers)
    draft_weights = (draft.weights or 0) if draft is not None else 0
    share = utilization or UTILIZATION
    chosen = target.state_dtype if state_dtype in (None, "auto") else state_dtype
    slot = slot_bytes(layers, k, chosen)
    sequences = None
    if gpu_memory is not None and target.weights is not None:
        room = int(gpu_memory * GIB * share * gpus) - target.weights - draft_weights
        sequences = max(0, room // max(1, slots * slot + kv + draft_kv))
    return MemoryAdvice(
        slots, slot, kv, draft_kv, length, target.weights, draft_weights, gpu_memory, gpus, share, sequences
    )


def amount(number: int) -> str:
    """Bytes for people."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} B"
