"""The architectures that Strandline serves, by their published names, and what the engine asks of a model."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from strandline.errors import ConfigError
from strandline.kernels.batch import LayerMemory, StepBatch
from strandline.models.qwen3_5 import Qwen3_5ForCausalLM
from strandline.models.qwen3_next import Qwen3NextForCausalLM
from strandline.models.targets import NamedTargets
from strandline.specs import ModelSpec


class CausalLM(Protocol):
    """A model as the engine and the loader see it."""

    spec: ModelSpec
    """One layer spec per layer; every size in the engine follows from it."""
    vocab_size: int
    max_position: int

    def forward(self, batch: StepBatch, memory: Sequence[LayerMemory]) -> Tensor:
        """Return the final, normalised ``hidden_TE`` of every row of the step, and advance the memory."""

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Return float32 logits ``[N, vocabulary]``."""

    def pack(self) -> None:
        """Lay the weights out for fast products; they cannot be loaded or moved afterwards."""

    def halve(self) -> None:
        """Keep weights in float16 where that loses nothing; as after ``pack``."""

    def targets(self, names: frozenset[str]) -> NamedTargets:
        """Yield where the tensors go that the published weights, which hold ``names``, must have."""

    def named_parameters(self) -> Any:
        """As of ``torch.nn.Module``."""


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
