"""Multi-token prediction: a layer that drafts the token after the next one.

From the final hidden state of a token and the embedding of the token after it, it computes a hidden state whose logits,
by the model's own head, predict the token after that. It is an attention layer with keys and values of its own, which
lie at the position of the first of the two tokens. Its own hidden state can stand for the model's, to draft further.

Source: ``mtp.*`` as Qwen and NVIDIA (Nemotron 3) publish it; DeepSeek-AI, "DeepSeek-V3 Technical Report", section 2.2.

Shape suffixes: T tokens of the step, N of these, E hidden size.
"""

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from strandline.kernels.arena import LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.collectives.rank_sums import bind_sum_add_norm
from strandline.kernels.gemm.weights import Layout
from strandline.kernels.operation import Operation
from strandline.models.layers.decoder import DecoderLayer, Mixer, ResidualNorm
from strandline.models.layers.projection import Projection
from strandline.models.layers.rotary import RotaryTable
from strandline.models.layers.site import Site
from strandline.models.layers.targets import NamedTargets
from strandline.specs import LayerSpec


class KeepingMixer(Mixer, Protocol):
    """A mixer that keeps streams alone."""

    def keep(self, hidden_TE: Tensor, rotary: RotaryTable | None, batch: StepBatch, memory: Any) -> None:
        """Store what a call would, and compute nothing else."""


class DraftLayer(nn.Module):
    """Norms of its two inputs, a projection of both, a decoder layer, and a norm.

    Args:
        layer: whose mixer is a ``KeepingMixer``; its feed-forward part adds to the stream as in ``DecoderLayer.feed``.
        published: as ``targets``, given this layer: the family's names.
    """

    def __init__(
        self,
        layer: DecoderLayer,
        published: Callable[["DraftLayer", frozenset[str]], NamedTargets],
        norm: ResidualNorm,
        hidden_size: int,
        site: Site,
    ) -> None:
        super().__init__()
        self.layer, self.norm = layer, norm
        self._published = published
        self.fc = Projection(hidden_size, 2 * hidden_size, site)
        """Columns: embedding, hidden state."""
        self.embedding_norm_E, self.hidden_norm_E, self.norm_E = (norm.weight(site, hidden_size) for _ in range(3))

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        return (self.norm.norm, self.norm.add_norm)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        add_norm: Operation[..., Any] = self.norm.add_norm
        self._norm = kernels[self.norm.norm]
        self._add_norm = bind_sum_add_norm(kernels, add_norm) if self.layer.leaves_sum else kernels[add_norm]

    @property
    def spec(self) -> LayerSpec:
        return self.layer.spec

    def bind(self, memory: LayerMemory) -> Any:
        """Return the layer's memory as ``forward`` takes it."""
        return self.layer.bind(memory)

    def forward(
        self,
        embedded_TE: Tensor,
        hidden_TE: Tensor,
        rotary: RotaryTable | None,
        batch: StepBatch,
        memory: Any,
        rows_N: Tensor | None = None,
    ) -> Tensor:
        """Return normalised hidden states.

        Args:
            embedded_TE: of the tokens after those that ``batch`` gives positions of.
            hidden_TE: final, normalised hidden states of those.
            rows_N: rows to return; None: all. Of the others, what later tokens read is stored.
        """
        normed_TE, residual_TE = self._joined(embedded_TE, hidden_TE)
        mixed_NE, residual_NE = self.layer.mix(normed_TE, rotary, batch, memory), residual_TE
        if rows_N is not None:
            mixed_NE, residual_NE = mixed_NE.index_select(0, rows_N), residual_NE.index_select(0, rows_N)
        added_NE, residual_NE = self.layer.feed(mixed_NE, residual_NE)
        drafted_NE: Tensor
        drafted_NE, _ = self._add_norm(added_NE, residual_NE, self.norm_E, self.norm.eps)
        return drafted_NE

    def keep(
        self, embedded_TE: Tensor, hidden_TE: Tensor, rotary: RotaryTable | None, batch: StepBatch, memory: Any
    ) -> None:
        """Store what ``forward`` would of these tokens, for later ones to read, and draft nothing.

        These are the layer's keys and values, which do not depend on other tokens: no attention, no feed-forward part.
        """
        normed_TE, _ = self._joined(embedded_TE, hidden_TE)
        cast(KeepingMixer, self.layer.mixer).keep(normed_TE, rotary, batch, memory)

    def _joined(self, embedded_TE: Tensor, hidden_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the decoder layer, and its residual stream."""
        eps = self.norm.eps
        embedded_TE = self._norm(embedded_TE, self.embedding_norm_E, eps)
        hidden_TE = self._norm(hidden_TE, self.hidden_norm_E, eps)
        residual_TE = self.fc.multiply(torch.cat((embedded_TE, hidden_TE), dim=-1))
        first_norm_E = self.layer.first_norm_E
        return residual_TE if first_norm_E is None else self._norm(residual_TE, first_norm_E, eps), residual_TE

    def lay_out(self, layout: Layout) -> None:
        """Choose the form of its weights; they cannot be loaded or moved afterwards."""
        for module in self.modules():
            if isinstance(module, Projection):
                module.lay_out(layout)

    def targets(self, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors."""
        yield from self._published(self, names)
