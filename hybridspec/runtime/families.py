"""Which model types of the installed transformers can take tokens back, by which modes, and what to know about each.

Nothing is built and no modeling file is imported: the text of a modeling file shows which of our recurrences it has,
and the cache layers that transformers makes for the default config show what else it keeps. The self-test that runs
when a model is loaded has the last word.
"""

import difflib
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import transformers
from transformers import DynamicCache, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from hybridspec.errors import InputError, UnsupportedLayerError
from hybridspec.hooks.adapters import RECURRENCES
from hybridspec.hooks.mixers import MIXERS
from hybridspec.runtime.model_facts import CACHE_ARGUMENTS
from hybridspec.runtime.runner import RollbackMode
from hybridspec.state.layers import RecurrentLayer, rollback_layers

MODES: tuple[str, ...] = tuple(mode for mode in get_args(RollbackMode) if mode != "auto")

#: What papers call the recurrence of a transformers function or class; one that is missing here goes by its own name.
RECURRENCE_NAMES = {
    "torch_chunk_gated_delta_rule": "gated delta rule",
    "torch_recurrent_gated_delta_rule": "gated delta rule",
    "chunk_kimi_delta_attention": "Kimi delta attention",
    "recurrent_kimi_delta_attention": "Kimi delta attention",
    "mamba2_chunk_scan": "SSD (Mamba-2)",
    "mamba2_selective_state_update": "SSD (Mamba-2)",
    "mamba_selective_scan": "selective scan (Mamba-1)",
    "mamba_selective_state_update": "selective scan (Mamba-1)",
    "MiniMaxLightningAttention": "lightning attention",
    "RecurrentGemmaRecurrentBlock": "RG-LRU",
}
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


@dataclass(frozen=True)
class ModelingFile:
    """What the text of a modeling file shows about the model class ``name``."""

    name: str
    text: str

    def has(self, pattern: str) -> bool:
        return re.search(pattern, self.text) is not None

    @functools.cached_property
    def definitions(self) -> frozenset[str]:
        """Names of its functions and classes."""
        return frozenset(re.findall(r"^(?:def|class) (\w+)", self.text, re.MULTILINE))

    @property
    def recurrences(self) -> tuple[str, ...]:
        """Names of the recurrences that have a tape."""
        found = [name for name in (*RECURRENCES, *MIXERS) if name in self.definitions]
        return tuple(dict.fromkeys(RECURRENCE_NAMES.get(name, name) for name in found))

    @property
    def wrapped(self) -> bool:
        """It has a class of :mod:`hybridspec.hooks.mixers`."""
        return not self.definitions.isdisjoint(MIXERS)

    @functools.cached_property
    def stateful(self) -> bool:
        return "_is_stateful = True" in self.text or ".update_recurrent_state(" in self.text

    @functools.cached_property
    def convolutions(self) -> bool:
        return ".update_conv_state(" in self.text

    @functools.cached_property
    def hybrid(self) -> bool:
        return bool(self.recurrences) or self.stateful or self.convolutions or '"linear_attention"' in self.text

    @property
    def attention(self) -> bool:
        return self.has(r"ALL_ATTENTION_FUNCTIONS|scaled_dot_product_attention|[Ss]oftmax\(")

    @functools.cached_property
    def model_class(self) -> str:
        found = re.search(rf"^class {self.name}\(.*?(?=^\S|\Z)", self.text, re.MULTILINE | re.DOTALL)
        return found[0] if found else ""

    @property
    def takes_cache(self) -> bool:
        signature = re.search(r"def forward\(.*?\) ?(->.*?)?:$", self.model_class, re.MULTILINE | re.DOTALL)
        return signature is not None and re.search(rf"\b({'|'.join(CACHE_ARGUMENTS)}):", signature[0]) is not None

    @property
    def returns_cache(self) -> bool:
        return re.search(rf"\b({'|'.join(CACHE_ARGUMENTS)})=\w+\.", self.model_class) is not None


@functools.cache
def modeling_files() -> dict[str, ModelingFile]:
    """The modeling file of each model type that generates text, read from where transformers is installed."""
    folder = Path(transformers.__file__).parent / "models"
    classes = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    classes = {key: name if isinstance(name, str) else name[0] for key, name in classes.items()}
    texts: dict[Path, str] = {}
    for model_type in classes:
        for path in (folder / model_type_to_module_name(model_type).replace(".", "/")).glob("modeling_*.py"):
            texts[path] = texts.get(path) or path.read_text(encoding="utf-8")
    by_class = {name: text for text in texts.values() for name in re.findall(r"^class (\w+)\(", text, re.MULTILINE)}
    return {key: ModelingFile(name, by_class[name]) for key, name in classes.items() if name in by_class}


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
