"""Multi-token prediction: a layer that drafts the token after the next one.

From the final hidden state of a token and the embedding of the token after it, it computes a hidden state whose logits,
by the model's own head, predict the token after that. It is an attention layer with keys and values of its own, which
lie at the position of the first of the two tokens. Its own hidden state can stand for the model's, to draft further.

Source: ``mtp.*`` as Qwen and NVIDIA (Nemotron 3) publish it; DeepSeek-AI, "DeepSeek-V3 Technical Report", section 2.2.

Shape suffixes: T tokens of the step, N of these, E hidden size.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from strandline.kernels.arena import LayerMemory
from strandline.kernels.binding import Kernels
from strandline.kernels.gemm.weights import Layout
from strandline.kernels.operation import Operation
from strandline.models.layers.decoder import DecoderLayer, Mixer
from strandline.models.layers.parts.projection import Projection
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.step import Step
from strandline.models.layers.parts.targets import NamedTargets
from strandline.models.layers.streams.residual import PreNorm, ResidualNorm, Stream
from strandline.specs import LayerSpec


class KeepingMixer(Mixer, Protocol):
    """A mixer that keeps streams alone."""

    def keep(self, hidden_TE: Tensor, step: Step, memory: Any) -> None:
        """Store what a call would, and compute nothing else."""


class DraftLayer(nn.Module):
    """A ``Drafter``: norms of its two inputs, a projection of both, a decoder layer, and a norm.

    Args:
        layer: whose mixer is a ``KeepingMixer`` on a ``Stream``.
        published: as ``targets``, given this layer: the family's names.
    """

    target_layers = ()
    block = None

    def __init__(
        self,
        layer: DecoderLayer[Any, Any],
        published: Callable[["DraftLayer", frozenset[str]], NamedTargets],
        norm: ResidualNorm,
        hidden_size: int,
        site: Site,
    ) -> None:
        super().__init__()
        self.layer, self.norm, self.final = layer, norm, PreNorm(norm, hidden_size, site)
        self._published = published
        self.fc = Projection(hidden_size, 2 * hidden_size, site)
        """Columns: embedding, hidden state."""
        self.embedding_norm_E, self.hidden_norm_E = (norm.weight(site, hidden_size) for _ in range(2))

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        return self.final.operations

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._norm = kernels[self.norm.norm]
        self.final.connect(kernels)

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return (self.layer.spec,)

    def bind(self, memories: Sequence[LayerMemory]) -> Any:
        """Return the layer's memory as ``forward`` takes it."""
        [memory] = memories
        return self.layer.bind(memory)

    def forward(
        self, embedded_TE: Tensor, hidden_TE: Tensor, step: Step, memory: Any, rows_N: Tensor | None = None
    ) -> Tensor:
        """Return normalised hidden states.

        Args:
            embedded_TE: embeddings of the tokens after those that ``batch`` gives positions of.
            hidden_TE: final, normalised hidden states of those.
            rows_N: rows to return; None: all. Of the others, what later tokens read is stored.
        """
        stream: Stream = self.layer.mix(self._joined(embedded_TE, hidden_TE), step, memory)
        return self.final.leave(self.layer.feed(stream if rows_N is None else stream.rows(rows_N)))

    def keep(self, embedded_TE: Tensor, hidden_TE: Tensor, step: Step, memory: Any) -> None:
        """Store what ``forward`` would of these tokens, for later ones to read, and draft nothing.

        These are the layer's keys and values, which do not depend on other tokens: no attention, no feed-forward part.
        """
        assert self.layer.mixer_residual is not None
        normed_TE, _ = self.layer.mixer_residual.enter(self._joined(embedded_TE, hidden_TE))
        cast(KeepingMixer, self.layer.mixer).keep(normed_TE, step, memory)

    def _joined(self, embedded_TE: Tensor, hidden_TE: Tensor) -> Stream:
        """Return the residual stream before the decoder layer."""
        eps = self.norm.eps
        embedded_TE = self._norm(embedded_TE, self.embedding_norm_E, eps)
        hidden_TE = self._norm(hidden_TE, self.hidden_norm_E, eps)
        return Stream(self.fc.multiply(torch.cat((embedded_TE, hidden_TE), dim=-1)))

    def lay_out(self, layout: Layout) -> None:
        """Choose the form of its weights; they cannot be loaded or moved afterwards."""
        for module in self.modules():
            if isinstance(module, Projection):
                module.lay_out(layout)

    def targets(self, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors."""
        yield from self._published(self, names)
