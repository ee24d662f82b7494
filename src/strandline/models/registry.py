"""The architectures that Strandline serves, by their published names."""

from collections.abc import Callable
from typing import Any

import torch

from strandline.errors import ConfigError
from strandline.models.causal_lm import CausalLM
from strandline.models.qwen3_5 import build_qwen3_5
from strandline.models.qwen3_next import build_qwen3_next

Builder = Callable[[Any, torch.dtype, torch.device | str], CausalLM]

ARCHITECTURES: dict[str, Builder] = {
    "Qwen3NextForCausalLM": build_qwen3_next,
    "Qwen3_5ForCausalLM": build_qwen3_5,
    "Qwen3_5ForConditionalGeneration": build_qwen3_5,
    "Qwen3_5MoeForCausalLM": build_qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": build_qwen3_5,
}


def builder_for(config: Any) -> Builder:
    """Return what builds the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: its architecture is not supported.
    """
    names = config.architectures or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    asked = ", ".join(names) or "no architecture"
    raise ConfigError(f"the model's configuration names {asked}; supported: {', '.join(sorted(ARCHITECTURES))}")
