"""Facts that a config.json states about a model as a whole, under any of the names in use."""

import re
from typing import Any

from hybridspec.checkpoints.checkpoint import Checkpoint

#: Fields that choose the type of a recurrent state: vLLM's, Qwen's, NVIDIA's, xLSTM's, and kin.
STATE_DTYPE = re.compile(
    r"^(mamba_ssm(_cache)?_dtype|mamba_cache_dtype|ssm_(state_|cache_)?dtype|inference_state_dtype|"
    r"(recurrent|linear|linear_attn)_state_dtype|state_dtype)$"
)


CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")


def state_dtypes(checkpoint: Checkpoint) -> dict[str, str]:
    """Fields of config.json that choose the type of a recurrent state, and their values without ``torch.``."""
    found = {}
    for place in (checkpoint.config or {}, checkpoint.text):
        for name, value in place.items():
            if STATE_DTYPE.match(name) and isinstance(value, str):
                found[name] = value.removeprefix("torch.")
    return found


def context_length(checkpoint: Checkpoint) -> int | None:
    value = checkpoint.setting(*CONTEXT)
    return value if isinstance(value, int) else None


def rope(checkpoint: Checkpoint) -> dict[str, Any]:
    """Rope settings in one form, whether the config has rope_parameters or the older rope_theta and rope_scaling."""
    built = getattr(checkpoint.built_text, "rope_parameters", None)
    value = built or checkpoint.raw_setting("rope_parameters")
    if isinstance(value, dict):
        return dict(value)
    found = {}
    theta, scaling = checkpoint.raw_setting("rope_theta"), checkpoint.raw_setting("rope_scaling")
    if theta is not None:
        found["rope_theta"] = theta
    return found | (scaling if isinstance(scaling, dict) else {})
