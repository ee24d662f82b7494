"""A decoder as a language model that can be loaded: what families build.

Shape suffixes: T tokens of the step, N rows whose logits are wanted, E hidden size.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from strandline.errors import EngineError
from strandline.kernels.arena import ArenaTensors
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels, UsesKernels
from strandline.kernels.operation import Operation
from strandline.kernels.weights import Layout
from strandline.models.layers.decoder import Decoder
from strandline.models.protocol import ModelMemory
from strandline.models.targets import NamedTargets


class CausalLM(nn.Module):
    """A :class:`strandline.models.protocol.LoadableModel`.

    Args:
        published: as ``targets``: the family's names.
    """

    def __init__(
        self, decoder: Decoder, max_position: int, published: Callable[[frozenset[str]], NamedTargets]
    ) -> None:
        super().__init__()
        self.decoder = decoder
        self.spec = decoder.spec
        self.vocab_size = decoder.embed_ZE.shape[0]
        self.max_position = max_position
        self._published = published
        self._kernels: Kernels | None = None

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        """What its layers compute with."""
        return tuple({operation: None for user in self._users() for operation in user.operations})

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on.

        Raises:
            EngineError: an engine with other kernels has the model already.
        """
        if self._kernels is not None and self._kernels != kernels:
            raise EngineError("a model that one engine computes with was given to another one; load it once more")
        self._kernels = kernels
        for user in self._users():
            user.use_kernels(kernels)

    def _users(self) -> list[UsesKernels]:
        return [module for module in self.decoder.modules() if isinstance(module, UsesKernels)]

    def bind(self, arena: ArenaTensors) -> ModelMemory:
        """Return the arena as ``forward`` takes it."""
        return self.decoder.bind(arena)

    def forward(self, batch: StepBatch, memory: ModelMemory) -> Tensor:
        """Return the final, normalised ``hidden_TE`` of every row of the step, and advance the memory."""
        hidden_TE: Tensor = self.decoder(batch, memory)
        return hidden_TE

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Return logits ``[N, vocabulary]``, in the dtype of the activations."""
        return self.decoder.logits(hidden_NE)

    def lay_out(self, layout: Layout) -> None:
        """Choose the form of its weights; they cannot be loaded or moved afterwards."""
        self.decoder.lay_out(layout)

    def targets(self, names: frozenset[str]) -> NamedTargets:
        """Yield where the tensors go that the published weights, which hold ``names``, must have."""
        return self._published(names)
