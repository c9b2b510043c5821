"""What the modeling files of the installed transformers show, read as text: nothing of them is imported."""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

#: What the argument is called that carries a model's past, by age of transformers and model.
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params", "state")
#: Functions whose recurrence has a tape (:data:`hybridspec.hooks.adapters.RECURRENCES`) -> what papers call it.
FUNCTION_NAMES = {
    "torch_chunk_gated_delta_rule": "gated delta rule",
    "torch_recurrent_gated_delta_rule": "gated delta rule",
    "chunk_kimi_delta_attention": "Kimi delta attention",
    "recurrent_kimi_delta_attention": "Kimi delta attention",
    "mamba2_chunk_scan": "SSD (Mamba-2)",
    "mamba2_selective_state_update": "SSD (Mamba-2)",
    "mamba_selective_scan": "selective scan (Mamba-1)",
    "mamba_selective_state_update": "selective scan (Mamba-1)",
}
#: The same of classes (:data:`hybridspec.hooks.mixers.MIXERS`).
CLASS_NAMES = {
    "MiniMaxLightningAttention": "lightning attention",
    "RecurrentGemmaRecurrentBlock": "RG-LRU",
}


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
        names = FUNCTION_NAMES | CLASS_NAMES
        return tuple(dict.fromkeys(name for key, name in names.items() if key in self.definitions))

    @property
    def wrapped(self) -> bool:
        """It has a class of :mod:`hybridspec.hooks.mixers`."""
        return not self.definitions.isdisjoint(CLASS_NAMES)

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
    # These import torch, which reading a checkpoint does not need.
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    folder = Path(transformers.__file__).parent / "models"
    classes = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    classes = {key: name if isinstance(name, str) else name[0] for key, name in classes.items()}
    texts: dict[Path, str] = {}
    for model_type in classes:
        for path in (folder / model_type_to_module_name(model_type).replace(".", "/")).glob("modeling_*.py"):
            texts[path] = texts.get(path) or path.read_text(encoding="utf-8")
    by_class = {name: text for text in texts.values() for name in re.findall(r"^class (\w+)\(", text, re.MULTILINE)}
    return {key: ModelingFile(name, by_class[name]) for key, name in classes.items() if name in by_class}
