"""Checkpoints as an export sees them: a config, a tokenizer, and headers of the tensors that matter; no model."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.checkpoints import ROWS, write_json, write_tokenizer
from tests.families import FAMILIES, TOKENS, is_known

HEAD = {"mtp.fc.weight": torch.zeros(2, 4)}
#: Where a family's config lacks what real ones have.
ANNOUNCED = {"qwen3_5_text": {"mtp_num_hidden_layers": 1}, "qwen3_5_moe_text": {"mtp_num_hidden_layers": 1}}


def architecture(model_type: str) -> str:
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    name = causal or MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type]
    return name if isinstance(name, str) else name[0]


def write_stand_in(
    folder: Path,
    family: str,
    tensors: Mapping[str, torch.Tensor] | None = None,
    tokenizer: bool = True,
    **changes: object,
) -> Path:
    """A folder with the config of a family of :mod:`tests.families`; ``tensors`` are all that its weight file has."""
    if not is_known(family):
        pytest.skip(f"this version of transformers has no {family}")
    folder.mkdir(parents=True, exist_ok=True)
    arguments = TOKENS | FAMILIES[family] | {"vocab_size": ROWS} | ANNOUNCED.get(family, {}) | changes
    model_type = family.split("+")[0]
    config = CONFIG_MAPPING[model_type](**arguments).to_dict()
    config.setdefault("model_type", model_type)
    if not config.get("architectures"):
        config["architectures"] = [architecture(model_type)]
    write_json(folder / "config.json", json.loads(json.dumps(config, default=str)))
    if tokenizer:
        write_tokenizer(folder)
    if tensors:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Writes a stand-in once and gives its folder; do not change what it gives."""
    written: dict[str, str] = {}

    def get(family: str, head: bool = False, **changes: object) -> str:
        key = f"{family} {head} {sorted(changes.items())}"
        if key not in written:
            folder = tmp_path_factory.mktemp("stand-in")
            written[key] = str(write_stand_in(folder, family, HEAD if head else None, **changes))
        return written[key]

    return get
