"""The architectures that Strandline serves, by their published names."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from strandline.errors import ConfigError
from strandline.models.qwen3_5 import Qwen3_5ForCausalLM
from strandline.models.qwen3_next import Qwen3NextForCausalLM

Builder = Callable[[Any, torch.dtype, torch.device | str], nn.Module]

ARCHITECTURES: dict[str, Builder] = {
    "Qwen3NextForCausalLM": Qwen3NextForCausalLM,
    "Qwen3_5ForCausalLM": Qwen3_5ForCausalLM,
    "Qwen3_5ForConditionalGeneration": Qwen3_5ForCausalLM,
    "Qwen3_5MoeForCausalLM": Qwen3_5ForCausalLM,
    "Qwen3_5MoeForConditionalGeneration": Qwen3_5ForCausalLM,
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
