"""Decoder layers whose residual stream is normalised itself (MiniMax).

Shape suffixes: T tokens of the step, E hidden size.
"""

from typing import Any, NamedTuple

from torch import Tensor

from strandline.kernels.batch import StepBatch
from strandline.models.layers.decoder import DecoderLayer, FeedForward, Mixer, ResidualNorm
from strandline.models.layers.rotary import RotaryTable
from strandline.models.layers.site import Site


class StreamScale(NamedTuple):
    """What the stream, and what a part adds to it, are multiplied by."""

    stream: float
    added: float


class NormedStreamLayer(DecoderLayer):
    """A mixer, then a feed-forward part: each reads the normalised stream and adds to that, both scaled."""

    def __init__(
        self,
        mixer: Mixer,
        mlp: FeedForward,
        norm: ResidualNorm,
        hidden_size: int,
        site: Site,
        *,
        mixer_scale: StreamScale,
        mlp_scale: StreamScale,
    ) -> None:
        super().__init__(mixer, mlp, norm, hidden_size, site)
        self.mixer_scale, self.mlp_scale = mixer_scale, mlp_scale

    @property
    def leaves_sum(self) -> bool:
        return False

    @property
    def first_part(self) -> None:
        return None  # the stream goes on from the norm's plain result

    def forward(
        self, normed_TE: Tensor, residual_TE: Tensor, rotary: RotaryTable | None, batch: StepBatch, memory: Any
    ) -> tuple[Tensor, Tensor]:
        """Return what the feed-forward part adds to the residual stream, and the stream without that."""
        del residual_TE  # the stream goes on from its norm
        mixer, mlp = self.mixer, self.mlp
        assert mixer is not None
        assert mlp is not None
        scale, mixed_TE = self.mixer_scale, self._sum(mixer(normed_TE, rotary, batch, memory))
        added_TE, stream_TE = mixed_TE * scale.added, normed_TE * scale.stream
        normed_TE, _ = self._add_norm(added_TE, stream_TE, self.mlp_norm_E, self.norm.eps)
        return self._sum(mlp(normed_TE)) * self.mlp_scale.added, normed_TE * self.mlp_scale.stream
