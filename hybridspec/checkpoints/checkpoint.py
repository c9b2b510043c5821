"""A checkpoint folder: its configs, the headers of its weights, and what transformers makes of its config."""

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridspec.checkpoints.config_layers import layer_count, text_part
from hybridspec.checkpoints.files import Weights, read_json, read_weights
from hybridspec.checkpoints.findings import Finding, Subject
from hybridspec.checkpoints.tensor_layers import TensorLayers, group_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: More layers than any model has; beyond it a config is nonsense, and building it takes all memory.
MOST_LAYERS = 10_000


@dataclass
class Checkpoint:
    """What was read of a checkpoint; :func:`read_checkpoint` makes it.

    Attributes:
        config: config.json; None if it could not be read, and then nothing else was.
        findings: what was wrong while reading.
    """

    folder: Path
    subject: Subject
    config: dict[str, Any] | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    weights: Weights = field(default_factory=lambda: Weights({}, False))
    findings: list[Finding] = field(default_factory=list)

    @property
    def text(self) -> dict[str, Any]:
        """The part of config.json that describes the text decoder."""
        return dict(text_part(self.config or {}))

    @property
    def model_type(self) -> str:
        """Of the text decoder, or else of the whole."""
        return str(self.text.get("model_type") or (self.config or {}).get("model_type") or "unknown")

    @functools.cached_property
    def layers(self) -> TensorLayers:
        """The decoder's layers by tensor names; those after ``num_hidden_layers`` may be prediction heads."""
        return group_tensors(self.weights.tensors)

    @functools.cached_property
    def _built(self) -> "tuple[PreTrainedConfig | None, str]":
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        kind = (self.config or {}).get("model_type")
        if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
            return None, ""
        count = layer_count(self.text)
        if count is not None and not 0 < count <= MOST_LAYERS:
            return None, f"num_hidden_layers is {count}"
        try:
            # The class itself, not AutoConfig: code that a checkpoint brings is never imported.
            config = CONFIG_MAPPING[kind].from_pretrained(self.folder, local_files_only=True)
        except Exception as error:
            return None, " ".join(str(error).split())
        if hasattr(config, "auto_map"):
            del config.auto_map
        return config, ""

    @property
    def built(self) -> "PreTrainedConfig | None":
        """The config as transformers reads it, defaults filled in; None if it does not know or refuses it."""
        return self._built[0]

    @property
    def build_error(self) -> str:
        """Why transformers refuses the config; empty if it does not, or does not know the model type."""
        return self._built[1]

    @property
    def built_text(self) -> "PreTrainedConfig | None":
        return None if self.built is None else self.built.get_text_config(decoder=True)

    def setting(self, *names: str) -> Any:
        """The first of these fields that is set: as transformers reads it, else in the text part, else at the top."""
        for name in names:
            for place in (self.built_text, self.text, self.config or {}):
                value = place.get(name) if isinstance(place, dict) else getattr(place, name, None)
                if value is not None:
                    return value
        return None

    def raw_setting(self, *names: str) -> Any:
        """The first of these fields that stands in config.json."""
        for name in names:
            for place in (self.text, self.config or {}):
                if place.get(name) is not None:
                    return place[name]
        return None

    @property
    def vocab_size(self) -> int | None:
        value = self.setting("vocab_size")
        return value if isinstance(value, int) else None

    @property
    def quantisation(self) -> str | None:
        """Method of the quantization_config."""
        value = self.raw_setting("quantization_config", "compression_config")
        if not isinstance(value, dict):
            return None
        return str(value.get("quant_method") or value.get("quant_algo") or "unknown")


def read_checkpoint(folder: str | Path, subject: Subject) -> Checkpoint:
    """Reads everything but the tokenizer; whatever is wrong becomes a finding."""
    checkpoint = Checkpoint(Path(folder), subject)
    findings = checkpoint.findings
    if not checkpoint.folder.is_dir():
        findings.append(Finding("HS001", subject, f"{folder}: no such folder."))
        return checkpoint
    if not (checkpoint.folder / "config.json").is_file():
        findings.append(Finding("HS002", subject, f"{folder} has no config.json.", "config.json"))
        return checkpoint
    checkpoint.config = read_json(checkpoint.folder, "config.json", subject, findings)
    if checkpoint.config is None:
        return checkpoint
    checkpoint.generation = read_json(checkpoint.folder, "generation_config.json", subject, findings) or {}
    checkpoint.tokenizer_config = read_json(checkpoint.folder, "tokenizer_config.json", subject, findings) or {}
    checkpoint.weights = read_weights(checkpoint.folder, subject, findings)
    return checkpoint
