"""A decoder as a language model that can be loaded: what families build.

Shape suffixes: T tokens of the step, N rows whose logits are wanted, E hidden size.
"""

from collections.abc import Callable

from torch import Tensor, nn

from strandline.kernels.arena import ArenaTensors
from strandline.kernels.batch import StepBatch
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

    def pack(self) -> None:
        """Lay the weights out for fast GEMMs; they cannot be loaded or moved afterwards."""
        self.decoder.pack()

    def halve(self) -> None:
        """Keep weights in float16 where that loses nothing."""
        self.decoder.halve()

    def targets(self, names: frozenset[str]) -> NamedTargets:
        """Yield where the tensors go that the published weights, which hold ``names``, must have."""
        return self._published(names)
