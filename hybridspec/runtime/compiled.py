"""Compiled passes: the forward pass of a model traced once for each block length, from the tensors of our cache to
logits, tapes and windows, and compiled by torch's inductor. It takes away what Python costs per layer and step.

The trace runs the model's own code on a twin of the cache, so nothing of a model is written down here. Its attention
layers look at the whole buffer and mask what is not there, so that one program serves every length of the past. A block
without a program of its length is padded to a longer one, and the padding is dropped as rejected tokens are.

What cannot be traced (control flow that depends on the tokens, caches of other kinds), and what computes something else
once it is compiled, runs uncompiled, and a warning says so.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hybridspec.errors import UnsupportedLayerError
from hybridspec.runtime.model import LoadedModel
from hybridspec.runtime.session import Session
from hybridspec.state.base import PassOutput
from hybridspec.state.block import Block
from hybridspec.state.cache import RollbackCache
from hybridspec.state.layers import AttentionLayer, HybridLayer, KeyValueBuffer, RecurrentLayer
from hybridspec.state.pass_context import recording

#: Tokens of the blocks that are compiled; longer ones run uncompiled.
LENGTHS = (1, 2, 3, 5, 9, 17)
#: Largest difference from the uncompiled pass, relative to the largest logit.
TOLERANCE = {torch.float32: 1e-3}
HALF_TOLERANCE = 0.1


class CompiledPasses:
    """The compiled passes of one model, each made when a block first needs it (which takes minutes on a CPU), or all
    :meth:`prepare`-d.

    Args:
        start: opens a session on the model with a prompt.
    """

    def __init__(self, model: LoadedModel, start: Callable[[Sequence[int]], Session]) -> None:
        self.model, self._start = model, start
        #: By number of tokens; None where compiling failed.
        self.programs: dict[int, Callable | None] = {}
        #: Why it failed, by number of tokens.
        self.failures: dict[int, str] = {}
        self.lengths: Sequence[int] = LENGTHS
        self._tensors: TensorLayout | None = None

    def run(self, cache: RollbackCache, block: Block) -> PassOutput:
        """A recorded pass, which leaves the cache as the uncompiled one does."""
        position, tokens = cache.length + cache.pending, block.width
        size = next((length for length in self.lengths if length >= tokens), 0)
        known = size in self.programs
        if (
            not size
            or (known and self.programs[size] is None)
            or not block.is_chain
            # A first pass makes buffers, windows and states.
            or not position
            or cache.groups is None
            or len(cache.advanced) != len(cache.groups)
            or position + size > self.model.max_length
        ):
            return self.model.run(cache, block)
        if not known:
            return self._compile(cache, block, position, size)
        layout = self._tensors
        windows = layout.windows_of(cache)
        outputs = self.programs[size](*layout.inputs(cache, windows, block.padded(size), position))
        logits, fresh, tapes = layout.split(outputs)
        for group, window, new in zip(layout.windows, windows, fresh, strict=True):
            grown = torch.cat([window, new[..., :tokens]], -1)
            for (layer, index), window in zip(group, grown.unbind(), strict=True):
                cache.recurrent[layer].conv_states[index] = window
        for layer in cache.attention:
            layer.length = position + tokens
        cache.gathered = [tape.part(0, tokens) for tape in tapes] if tokens < size else tapes
        return PassOutput(logits[:, :tokens])

    def prepare(self, longest: int, tell: Callable[[str], object] = lambda text: None) -> None:
        """Makes the programs of blocks of up to ``longest`` tokens now, so that no measurement pays for it; longer
        blocks run uncompiled from then on.

        Args:
            tell: called with what is being compiled.

        Raises:
            UnsupportedLayerError: the model cannot be compiled, or computes something else then; says why.
        """
        model, hint = self.model, "Leave out --compile (compile=True)."
        if model.rollback == "recompute":
            raise UnsupportedLayerError(
                f"{model.name} cannot be compiled: it runs with rollback 'recompute', and only 'tape' and 'slots' "
                f"can. {hint}"
            )
        enough = next((number for number, length in enumerate(LENGTHS, 1) if length >= longest), len(LENGTHS))
        self.lengths = LENGTHS[:enough]
        tokens = [token % model.vocab_size for token in range(1, LENGTHS[-1] + 2)]
        for number, size in enumerate(self.lengths, 1):
            if size not in self.programs:
                tell(f"compiling {model.name}: block length {size}, {number} of {enough} (a minute or more when new)")
                with warnings.catch_warnings(), self._start(tokens) as session:
                    warnings.simplefilter("ignore")
                    session.verify(tokens[:size])
            if self.programs.get(size) is None:
                reason = self.failures.get(size, "the cache is of another kind")
                raise UnsupportedLayerError(
                    f"{model.name} cannot be compiled: a pass of {size} token{'s' * (size > 1)}: {reason}. {hint}"
                )

    def _compile(self, cache: RollbackCache, block: Block, position: int, size: int) -> PassOutput:
        """An uncompiled pass, and beside it the program of this size, which must compute the same."""
        self.programs[size] = None
        try:
            layout = self._tensors or TensorLayout.of(cache)
            inputs = [x.clone() for x in layout.inputs(cache, layout.windows_of(cache), block.padded(size), position)]
        except UnsupportedLayerError as error:
            self._warn(size, str(error))
            return self.model.run(cache, block)
        output, tokens = self.model.run(cache, block), block.width
        try:
            # Tensors of inference mode cannot be traced.
            with torch.inference_mode(False), torch.no_grad():
                inputs = [x.clone() for x in inputs]
                program = compiled(self.model, layout, inputs)
                ours, _, tapes = layout.split(program(*inputs))
        except Exception as error:
            self._warn(size, f"it cannot be compiled ({type(error).__name__}: {str(error).partition(chr(10))[0]})")
            return output
        ours, tapes = ours[:, :tokens], [tape.part(0, tokens) for tape in tapes]
        expected = [output.logits, *pytree.tree_leaves(cache.gather(tokens))]
        wrong = max(_difference(a, b) for a, b in zip([ours, *pytree.tree_leaves(tapes)], expected, strict=True))
        if wrong > TOLERANCE.get(output.logits.dtype, HALF_TOLERANCE):
            self._warn(size, f"its results are off by {wrong:.2g}")
        else:
            self._tensors, self.programs[size] = layout, program
        return output

    def _warn(self, size: int, reason: str) -> None:
        self.failures[size] = reason
        warnings.warn(f"{self.model.name}: a pass of {size} tokens runs uncompiled: {reason}.", stacklevel=2)


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest, relative to the largest value."""
    return float((ours - theirs).abs().max()) / max(float(theirs.abs().max()), 1e-9)


@dataclass
class TensorLayout:
    """Which tensor of a flat list is what. Inputs: token ids ``[1, T]``, the position of the first, the first position
    of each attention buffer, keys and values, windows, states; outputs: logits, fresh inputs of the windows, tapes.
    Windows, states and tapes are stacked over layers of one shape, which go by their index among the recurrent ones.
    """

    #: Layer and index of each window.
    windows: list[list[tuple[int, int]]]
    states: list[list[int]]
    tapes: pytree.TreeSpec | None = None

    @classmethod
    def of(cls, cache: RollbackCache) -> "TensorLayout":
        """Raises :class:`UnsupportedLayerError` for layers that keep anything else."""
        windows: dict[tuple, list[tuple[int, int]]] = {}
        for number, layer in enumerate(cache.recurrent):
            for index, kernel in layer.conv_states.kernels.items():
                window = layer.conv_states.get(index)
                if window is not None:
                    windows.setdefault((kernel, window.dtype, window.shape[:-1]), []).append((number, index))
        odd = [type(x).__name__ for x in cache.kept if type(x) not in (AttentionLayer, RecurrentLayer, HybridLayer)]
        if odd or any(layer.buffer is None for layer in cache.attention):
            raise UnsupportedLayerError(f"its cache has layers that are not compiled: {odd}")
        numbers = {id(layer): number for number, layer in enumerate(cache.recurrent)}
        return cls(list(windows.values()), [[numbers[id(layer)] for layer in group] for group in cache.groups])

    def windows_of(self, cache: RollbackCache) -> list[Tensor]:
        return [
            torch.stack([cache.recurrent[number].conv_states.get(index) for number, index in group])
            for group in self.windows
        ]

    def inputs(self, cache: RollbackCache, windows: list[Tensor], block: Block, position: int) -> list[Tensor]:
        for layer in cache.attention:
            layer.room(layer.buffer.keys, layer.buffer.values, position + block.width)
        buffers = [layer.buffer for layer in cache.attention]
        kernels = [cache.recurrent[group[0][0]].conv_states.kernels[group[0][1]] for group in self.windows]
        return [
            block.tokens,
            torch.tensor(position),
            torch.tensor([buffer.start for buffer in buffers], dtype=torch.long),
            *(buffer.keys for buffer in buffers),
            *(buffer.values for buffer in buffers),
            *(window[..., -kernel:].contiguous() for window, kernel in zip(windows, kernels, strict=True)),
            *cache.advanced,
        ]

    def split(self, outputs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], list[tuple]]:
        end = 1 + len(self.windows)
        return outputs[0], list(outputs[1:end]), pytree.tree_unflatten(list(outputs[end:]), self.tapes)

    def run(self, model: LoadedModel, ids: Tensor, position: Tensor, starts: Tensor, *rest: Tensor) -> list[Tensor]:
        """A pass of the model as a function of tensors."""
        twin = RollbackCache(model.config)
        layers, past = twin.recurrent, iter(rest)
        keys, values, windows = (list(islice(past, len(x))) for x in (twin.attention, twin.attention, self.windows))
        for number, layer in enumerate(twin.attention):
            see_whole_buffer(layer, KeyValueBuffer(keys[number], values[number]), position, starts[number])
        for group, stacked in zip(self.windows, windows, strict=True):
            for (number, index), window in zip(group, stacked.unbind(), strict=True):
                layers[number].conv_states.kernels[index] = window.shape[-1]
                layers[number].conv_states[index] = window
                layers[number].has_previous_state[index] = layers[number].is_conv_states_initialized[index] = True
        twin.groups = [[layers[number] for number in group] for group in self.states]
        twin.give(tuple(past))
        block = Block.rows_of(ids, position)
        with recording("verify", block):
            logits = model.call(block, twin).logits
        tapes, self.tapes = pytree.tree_flatten(twin.gather(ids.shape[1]))
        fresh = [
            torch.stack([layers[number].conv_states.get(index)[..., -ids.shape[1] :] for number, index in group])
            for group in self.windows
        ]
        return [logits, *fresh, *tapes]


def see_whole_buffer(layer: AttentionLayer, buffer: KeyValueBuffer, position: Tensor, start: Tensor) -> None:
    """Makes ``layer`` write at a ``position`` that is a tensor, and show its buffer, which begins at ``start``, as a
    whole: transformers' masks leave out what lies outside of the past.
    """

    def update(keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        columns = torch.arange(keys.shape[-2], device=keys.device) + (position - start)
        buffer.keys.index_copy_(-2, columns, keys)
        buffer.values.index_copy_(-2, columns, values)
        return buffer.keys, buffer.values

    layer.use(buffer)
    layer.length, layer.update = position, update
    layer.get_mask_sizes = lambda query_length: (buffer.keys.shape[-2], start)


def compiled(model: LoadedModel, layout: TensorLayout, inputs: list[Tensor]) -> Callable:
    """The program for such inputs, whatever the sizes of the attention buffers."""
    # Imports that take a while.
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    attention = len(inputs[2])

    def fake(number: int, x: Tensor) -> Tensor:
        sizes = [DimDynamic.STATIC] * x.ndim
        if 3 <= number < 3 + 2 * attention:
            sizes[-2] = DimDynamic.DYNAMIC
        return mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    fakes = [fake(number, x) for number, x in enumerate(inputs)]
    with mode:
        graph = make_fx(lambda *tensors: layout.run(model, *tensors))(*fakes)
    return torch._inductor.compile(graph, fakes)
