"""A drop-in for transformers' own ``generate``: assisted generation on the models that it refuses as stateful.

``generate`` calls the model as it likes and afterwards asks the cache to ``crop`` what was rejected. So an enabled
model gets a cache whose crop is our commit, and a forward pass that records; everything else stays transformers'.
"""

import copy
import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from types import MethodType
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMode

from hybridspec.checkpoints.modeling_files import CACHE_ARGUMENTS
from hybridspec.errors import InputError, SessionError, UnsupportedLayerError
from hybridspec.runtime.model_facts import clamps_steps
from hybridspec.runtime.runner import TargetRunner
from hybridspec.runtime.session import SHORT_BLOCK
from hybridspec.state.cache import RollbackCache
from hybridspec.state.pass_context import Purpose, recording

#: What ``generate`` calls the cache in this version of transformers; up to 5.23 some models call it otherwise.
CACHE = next(
    n for n in CACHE_ARGUMENTS if n in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)
#: Arguments with one entry for each token of the pass, and the axis of the tokens.
BY_TOKEN = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1, "token_type_ids": 1}
#: Attribute of an enabled model: which of the overridden attributes it had of its own before.
BEFORE = "_before_hybridspec"
OVERRIDDEN = ("_is_stateful", "forward", "_prepare_cache_for_generation", "_get_candidate_generator")


def enable_assisted_generation(model: PreTrainedModel) -> ExitStack:
    """Makes ``model.generate(assistant_model=...)`` and ``model.generate(prompt_lookup_num_tokens=...)`` work, with
    the output of plain decoding.

    The same call makes a model an exact assistant of any other; an assistant of an enabled model needs none, and is
    left as it is. All other uses of ``model``, plain ``generate`` too, run as before, and so does every other model.

    Args:
        model: any model that the ``tape`` rollback serves; attention-only models as well.

    Returns:
        a context manager whose end disables the model again, for ``with enable_assisted_generation(model): ...``;
        without ``with`` the model stays enabled until :func:`disable_assisted_generation`.

    Raises:
        UnsupportedLayerError: tokens cannot be taken back from a layer by the tape; names it. Nothing changes then.
    """
    undo = ExitStack()
    if BEFORE not in vars(model):
        _check(model)
        _install(model)
        undo.callback(disable_assisted_generation, model)
    return undo


def disable_assisted_generation(model: PreTrainedModel) -> None:
    """Undoes :func:`enable_assisted_generation`; nothing happens to a model that is not enabled."""
    before = vars(model).pop(BEFORE, None)
    if before is not None:
        for name in OVERRIDDEN:
            del vars(model)[name]
        vars(model).update(before)


def _check(model: PreTrainedModel) -> None:
    training = [module for module in model.modules() if module.training]
    try:
        TargetRunner(model, rollback="tape")
    except UnsupportedLayerError as error:
        raise UnsupportedLayerError(
            f"{type(model).__name__} cannot take part in transformers' assisted generation, which needs "
            f"rollback='tape'; hybridspec.decode has other modes. {error}"
        ) from error
    finally:
        for module in training:
            module.training = True


def _install(model: PreTrainedModel) -> None:
    """Overrides attributes of this one object. Bound methods, so that a deep copy of the model runs the copy."""
    before = {name: vars(model)[name] for name in OVERRIDDEN if name in vars(model)}
    overrides = {
        BEFORE: before,
        "_is_stateful": False,
        "forward": MethodType(_recorded_forward(model), model),
        "_prepare_cache_for_generation": MethodType(_prepare_cache, model),
        "_get_candidate_generator": MethodType(_candidate_generator, model),
    }
    vars(model).update(overrides)


def _original(model: PreTrainedModel, name: str) -> Callable:
    before = vars(model)[BEFORE]
    return before[name] if name in before else MethodType(getattr(type(model), name), model)


class AssistedCache(RollbackCache):
    """What ``generate`` sees of a rollback cache.

    Args:
        is_assistant: it belongs to the assistant, which feeds whatever its cache turns out not to hold.
    """

    is_croppable = True
    is_compileable = False

    def __init__(self, config: PreTrainedConfig, is_assistant: bool = False) -> None:
        super().__init__(config)
        self._config, self._is_assistant = config, is_assistant

    @property
    def is_linear(self) -> list[bool]:
        """Never all of them: transformers would feed an assistant the whole text again on top of its state."""
        return super().is_linear if self.attention else [False] * len(self.layers)

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back ``-tokens_to_remove`` tokens; those before them are kept for good.

        An assistant that must take back more than was fed since the last crop, as between different tokenizers, starts
        over.

        Raises:
            SessionError: the target must, or the number is a length to keep instead of a negative one.
        """
        rejected = -int(tokens_to_remove)
        if self._is_assistant and self.pending < rejected <= self.length + self.pending:
            self.__init__(self._config, is_assistant=True)
        elif 0 <= rejected <= self.pending:
            self.commit([range(self.pending - rejected)])
        else:
            raise SessionError(f"cannot take back {rejected} tokens: {self.pending} were fed since the last crop")


def _prepare_cache(
    self: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    generation_mode: GenerationMode,
    *arguments: Any,
    **options: Any,
) -> None:
    """In assisted generation, as target and as assistant, our cache; in any other mode what transformers does."""
    if generation_config.assistant_early_exit is not None:
        raise InputError(
            "an enabled model cannot be its own assistant by assistant_early_exit: give an assistant_model"
        )
    assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
    given = next((model_kwargs[n] for n in CACHE_ARGUMENTS if model_kwargs.get(n) is not None), None)
    if (assisted or generation_config.is_assistant) and generation_config.use_cache is not False:
        if isinstance(given, AssistedCache) and not assisted:
            cache = given
        elif given is None and generation_config.cache_implementation is None:
            cache = AssistedCache(self.config.get_text_config(decoder=True), not assisted)
        else:
            raise InputError(
                f"assisted generation with this {type(self).__name__} needs a fresh cache of hybridspec's: leave out "
                f"cache, {CACHE} and cache_implementation, or call disable_assisted_generation first"
            )
        model_kwargs[CACHE] = cache
    else:
        _original(self, "_prepare_cache_for_generation")(
            generation_config, model_kwargs, generation_mode, *arguments, **options
        )


def _candidate_generator(
    self: PreTrainedModel, *arguments: Any, assistant_model: PreTrainedModel | None = None, **options: Any
) -> Any:
    """Serves an assistant that is not enabled through an enabled twin with the same weights."""
    if assistant_model is not None and BEFORE not in vars(assistant_model):
        try:
            _check(assistant_model)
        except UnsupportedLayerError:
            # transformers itself takes back tokens from what it does not call stateful.
            if assistant_model._is_stateful:
                raise
        else:
            assistant_model = copy.copy(assistant_model)
            _install(assistant_model)
    return _original(self, "_get_candidate_generator")(*arguments, assistant_model=assistant_model, **options)


def _recorded_forward(model: PreTrainedModel) -> Callable:
    signature = inspect.signature(model.forward)
    own_name = next(name for name in CACHE_ARGUMENTS if name in signature.parameters)
    clamps = clamps_steps(model)

    @functools.wraps(type(model).forward)
    def forward(self: PreTrainedModel, *arguments: Any, **inputs: Any) -> Any:
        native = _original(self, "forward")
        inputs = dict(zip(signature.parameters, arguments, strict=False)) | inputs
        cache = next((x for x in inputs.values() if isinstance(x, AssistedCache)), None)
        if cache is None:
            return native(**inputs)
        mask = inputs.get("attention_mask")
        if clamps and isinstance(mask, torch.Tensor) and mask.ndim == 2 and bool((mask == 0).any()):
            raise InputError(
                f"{type(model).__name__} clamps time steps in prompts only, which cannot be followed on a padded "
                "prompt: leave out the padding"
            )
        inputs = {name: x for name, x in inputs.items() if x is not cache}
        output = _feed(native, cache, inputs | {own_name: cache})
        setattr(output, CACHE, cache)
        return output

    # generate looks up which arguments there are; `self` is bound.
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *signature.parameters.values()]
    if own_name != CACHE:
        parameters.insert(-1, inspect.Parameter(CACHE, inspect.Parameter.KEYWORD_ONLY, default=None))
    forward.__signature__ = inspect.Signature(parameters)
    return forward


def _feed(forward: Callable, cache: AssistedCache, inputs: dict[str, Any]) -> Any:
    """One forward pass of ``generate``, in parts; the output holds the logits of all of them.

    What follows the prompt can be taken back, and so can the last tokens of the prompt: an assistant is asked for
    that.
    """
    mask = inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and bool((mask == 1).all()):
        inputs = inputs | {"attention_mask": None}
    logits, start = [], 0
    for purpose, tokens in _parts(inputs, fresh=cache.length + cache.pending == 0):
        output = _feed_part(forward, cache, purpose, _part(inputs, start, tokens), tokens)
        logits.append(output.logits)
        start += tokens
    if len(logits) > 1:
        output.logits = torch.cat(logits, 1)
    return output


def _parts(inputs: dict[str, Any], fresh: bool) -> list[tuple[Purpose, int]]:
    """How a pass is cut: the bulk of a prompt, the end of the prompt, and the drafted tokens behind it.

    ``generate`` asks for the logits of the drafted tokens and of the one before them. Drafted tokens run apart from
    the prompt, because some models compute a prompt otherwise than what they decode.
    """
    ids = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
    tokens, wanted = ids.shape[1], inputs.get("logits_to_keep")
    whole = any(isinstance(x, torch.Tensor) for name, x in inputs.items() if name not in BY_TOKEN)
    whole |= bool(inputs.get("output_hidden_states") or inputs.get("output_attentions"))
    if whole or not isinstance(wanted, int) or not 1 <= wanted <= tokens:
        return [("prefill" if fresh and wanted == 1 else "verify", tokens)]
    known = tokens - wanted + 1
    bulk = max(0, known - SHORT_BLOCK)
    if not fresh and not bulk:
        return [("verify", tokens)]
    parts: list[tuple[Purpose, int]] = [("advance", bulk), ("prefill", known - bulk), ("verify", wanted - 1)]
    return [(purpose, count) for purpose, count in parts if count]


def _part(inputs: dict[str, Any], start: int, tokens: int) -> dict[str, Any]:
    parts = {n: inputs[n].narrow(axis, start, tokens) for n, axis in BY_TOKEN.items() if inputs.get(n) is not None}
    return inputs | parts


def _feed_part(forward: Callable, cache: AssistedCache, purpose: Purpose, inputs: dict[str, Any], tokens: int) -> Any:
    if purpose == "advance":
        cache.commit([range(cache.pending)])
    else:
        cache.begin_block()
    with recording(purpose):
        output = forward(**inputs)
    if purpose == "advance":
        cache.commit_prefill(tokens)
    else:
        cache.end_block(tokens)
    return output
