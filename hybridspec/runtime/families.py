"""Which model types of the installed transformers can take tokens back, by which modes, and what to know about each.

Nothing is built and no modeling file is imported: the text of a modeling file shows which of our recurrences it has,
and the cache layers that transformers makes for the default config show what else it keeps. The self-test that runs
when a model is loaded has the last word.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import transformers
from transformers import DynamicCache, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from hybridspec.checkpoints.modeling_files import ModelingFile, modeling_files
from hybridspec.errors import InputError, UnsupportedLayerError
from hybridspec.runtime.runner import RollbackMode
from hybridspec.state.layers import RecurrentLayer, rollback_layers

MODES: tuple[str, ...] = tuple(mode for mode in get_args(RollbackMode) if mode != "auto")

#: Cache layer of transformers -> the attention that fills it.
ATTENTION_NAMES = {
    "DynamicLayer": "full attention",
    "DynamicSlidingWindowLayer": "sliding attention",
    "DynamicIndexedLayer": "sparse attention",
    "LinearAttentionAndFullAttentionLayer": "full attention",
    "LinearAttentionAndSlidingWindowAttentionLayer": "sliding attention",
}
CONVOLUTION = "short convolution"
UNKNOWN_RECURRENCE = "its recurrence is not known here"


@dataclass(frozen=True)
class Note:
    """Something to know about a model type: a few words, and a sentence or two."""

    name: str
    text: str


FROM_ZERO = Note(
    "ignores its state",
    "transformers' many-token scan starts from zeros whatever the cache holds. The tape runs its own scan; recompute "
    "feeds one token at a time.",
)
CLAMPED = Note(
    "two paths",
    "transformers clamps time steps in the many-token path and not in the one-token path, so the two compute different "
    "functions. A verify pass computes what decoding computes; recompute feeds one token at a time.",
)
TIES_ATTENTION = Note(
    "attention ties",
    "Sparse attention picks positions by score: at a tie rounding alone can change a token, with every state right.",
)
TIES_EXPERTS = Note(
    "expert ties",
    "Experts are picked by score: at a tie rounding alone can change a token, with every state right.",
)
OUR_LAYERS = Note(
    "our cache layers",
    "Its own cache cannot continue a sequence by blocks; our cache layers take its place in every mode.",
)
STATE_ON_MODULES = Note(
    "state on modules",
    "transformers keeps its state on the modules, one sequence for each model object; our cache layers take its place "
    "in every mode.",
)
NO_CACHE = Note("no cache", "Its forward pass takes or returns no cache, so there is nothing to roll back.")
POSITIONS = Note("positions", "It counts positions from its padding token on, as encoders do, which sessions do not.")
TEXT_PART = Note("text part", "A multimodal checkpoint, of which the text part runs.")
NOT_CAUSAL = Note(
    "no causal class",
    "AutoModelForCausalLM cannot load it: load the multimodal model and give it to TargetRunner.",
)
NOT_HERE = Note("newer", "This version of transformers does not have it.")
#: What stands in the way of a tape, where the code alone does not say it.
OBSTACLES = {
    "rwkv": "the WKV recurrence of RWKV-4, with its running maximum",
    "xlstm": "the mLSTM, with its normaliser and running maximum",
    "zaya": "compressed convolutional attention, with its delayed values",
    "deepseek_v4": "compressed attention, with its buffers of unfinished windows",
}
#: Hybrids that the oldest supported transformers does not have -> a version that has it (an earlier one may).
NEWER = {
    "kimi_linear": "5.17",
    "bailing_hybrid": "5.20",
    "lfm3": "5.23",
    "inkling2_text": "5.23",
    "lara_mini": "5.24",
    "inkling2_loop_text": "5.24",
}


@dataclass(frozen=True)
class Family:
    """A model type, and how its tokens can be taken back.

    Attributes:
        model_type: as in config.json.
        hybrid: it has a recurrence or short convolutions, or transformers marks it as stateful.
        since: None if the installed transformers has it, else a version that does; no more is known then.
        mixers: recurrences and convolutions first, then kinds of attention.
        modes: the rollback modes that should run, the default one first; none if empty.
        inside: multimodal model types whose text part this is.
    """

    model_type: str
    hybrid: bool
    since: str | None = None
    mixers: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    inside: tuple[str, ...] = ()


def families(dense: bool = False) -> list[Family]:
    """Every hybrid that is known, by model type; with ``dense``, the causal models without a recurrence too.

    Takes a few seconds, most of them for imports.
    """
    files = modeling_files()
    inside: dict[str, list[str]] = {}
    chosen: dict[str, PreTrainedConfig | None] = {}
    for model_type, file in files.items():
        causal = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if file.hybrid or (dense and causal):
            config = default_config(model_type)
            text_type = model_type if config is None else text_part(config).model_type
            if config is not None and text_part(config) is not config:
                inside.setdefault(text_type, []).append(model_type)
            if causal or text_type not in files:
                chosen[model_type] = config
    found = [
        describe(model_type, files[model_type], config, tuple(sorted(inside.get(model_type, ()))))
        for model_type, config in chosen.items()
    ]
    found += [Family(key, True, version, notes=(NOT_HERE,)) for key, version in NEWER.items() if key not in files]
    return sorted(found, key=lambda family: family.model_type)


def text_part(config: PreTrainedConfig) -> PreTrainedConfig:
    return config.get_text_config(decoder=True)


def default_config(model_type: str) -> PreTrainedConfig | None:
    """None for a type whose config must be told something."""
    try:
        return CONFIG_MAPPING[model_type]()
    except Exception:
        return None


def describe(
    model_type: str, file: ModelingFile, config: PreTrainedConfig | None, inside: tuple[str, ...] = ()
) -> Family:
    """The facts about one model type, from its modeling file and its default config."""
    attention, obstacle = past(file, config)
    mixers = list(file.recurrences)
    if file.convolutions and not mixers:
        mixers.append(CONVOLUTION)
    if obstacle == UNKNOWN_RECURRENCE:
        mixers.append("another recurrence")
    if file.attention:
        mixers += attention or ["full attention"]

    notes = []
    if obstacle:
        why = OBSTACLES.get(model_type, obstacle)
        notes.append(Note("no tape", f"Its tokens cannot be taken back by the tape: {why}."))
    usable = file.takes_cache and (file.returns_cache or file.wrapped)
    if not usable:
        notes.append(NO_CACHE)
    elif file.wrapped:
        notes.append(OUR_LAYERS if file.returns_cache else STATE_ON_MODULES)
    if file.has(r"position_embeddings = nn\.Embedding\([^)]*padding_idx"):
        usable = False
        notes.append(POSITIONS)
    modes = tuple(mode for mode in MODES if usable and (mode == "recompute" or not obstacle))
    if "mamba_selective_scan" in file.definitions:
        notes.append(FROM_ZERO)
    if file.has(r"time_step_limit = \("):
        notes.append(CLAMPED)
    if "sparse attention" in mixers:
        notes.append(TIES_ATTENTION)
    if any(name.endswith("Experts") for name in file.definitions):
        notes.append(TIES_EXPERTS)
    if config is not None and text_part(config) is not config:
        notes.append(TEXT_PART if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else NOT_CAUSAL)
    return Family(model_type, file.hybrid, None, tuple(mixers), modes, tuple(notes), inside)


def past(file: ModelingFile, config: PreTrainedConfig | None) -> tuple[list[str], str | None]:
    """Kinds of attention in the default config, and what keeps the tape from serving it, if anything does."""
    if config is None:
        return [], "it has no default config that would show its layers"
    config = text_part(config)
    foreign = [kind.replace("_", " ") for kind in sorted(set(getattr(config, "layer_types", None) or ()))]
    try:
        theirs = DynamicCache(config=config).layers
        ours = rollback_layers(theirs, config)
    except (KeyError, UnsupportedLayerError):
        # A layer type that the modeling file itself adds to transformers' cache, when it is imported.
        return foreign, f"its layers ({', '.join(foreign)}) keep their past in a class of their own"
    except Exception as error:
        return [], f"transformers makes no cache for its default config ({error})"
    kinds = sorted({ATTENTION_NAMES.get(type(layer).__name__, "") for layer in theirs} - {""})
    recurrent = file.stateful or any(isinstance(layer, RecurrentLayer) for layer in ours)
    known = file.recurrences or (file.convolutions and not file.stateful)
    return kinds, UNKNOWN_RECURRENCE if recurrent and not known else None


def matching(families: Sequence[Family], words: str) -> list[Family]:
    """Those whose model type, mixers or multimodal types contain ``words``, whatever the case.

    Raises:
        InputError: none does; names the nearest model types.
    """

    def names(family: Family) -> list[str]:
        return [family.model_type, *family.mixers, *family.inside]

    wanted = words.lower().replace("-", "_")
    found = [f for f in families if any(wanted in name.lower().replace("-", "_") for name in names(f))]
    if not found:
        known = sorted({name for family in families for name in names(family)})
        near = difflib.get_close_matches(words.lower(), known, 3, 0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "hybridspec families --all lists what is known."
        raise InputError(f"no model type or mixer {words!r} in transformers {transformers.__version__}: {hint}")
    return found
