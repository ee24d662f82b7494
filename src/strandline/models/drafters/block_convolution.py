"""DFlash2's convolutions over the tokens of a block, before and after each part of a drafter's layer.

Each token has its own filters, for groups of channels: a sum of a fixed one and a projection of the part's input. A
token reads none before its block.

Shape suffixes: T rows of blocks, N blocks, E hidden size, W taps, G all filters of groups of channels; base_2WE and
filters have one of each before and after the part.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from strandline.models.layers.decoder import DecoderLayer
from strandline.models.layers.parts.projection import Projection
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.step import Step
from strandline.models.layers.parts.targets import NamedTargets, whole
from strandline.models.layers.streams.residual import Stream

BEFORE, AFTER = 0, 1


class BlockConvolution(nn.Module):
    """The convolutions before and after one part of a layer."""

    def __init__(self, num_taps: int, group_size: int, hidden_size: int, site: Site) -> None:
        super().__init__()
        self._group_size = group_size
        self.base_2WE = site.parameter(2, num_taps, hidden_size)
        self.projection = Projection(2 * num_taps * (hidden_size // group_size), hidden_size, site)

    def filters(self, normed_TE: Tensor) -> Tensor:
        """Return the filters of all tokens, ``[T, 2, W, E]``, given the part's input before it is convolved."""
        change_TG = self.projection.multiply(normed_TE)
        change = change_TG.view(len(normed_TE), *self.base_2WE.shape[:2], -1).repeat_interleave(self._group_size, -1)
        return self.base_2WE + change

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        yield f"{prefix}base_kernel", whole(self.base_2WE)
        yield from self.projection.targets(f"{prefix}kernel_projection.")


def convolve(x_TE: Tensor, filters_TWE: Tensor, index_T: Tensor) -> Tensor:
    """Return the weighted sum of each token and those before it in its block.

    Args:
        index_T: index of each token in its block.
    """
    out_TE = filters_TWE[:, 0] * x_TE
    for tap in range(1, filters_TWE.shape[1]):
        # Filled, not multiplied by zero: a neighbour's rows may hold NaN.
        out_TE += filters_TWE[:, tap] * x_TE.roll(tap, 0).masked_fill((index_T < tap)[:, None], 0.0)
    return out_TE


class LayerConvolutions(nn.Module):
    """The convolutions of one layer."""

    def __init__(self, num_taps: int, group_size: int, hidden_size: int, site: Site) -> None:
        super().__init__()
        self.mixer, self.mlp = (BlockConvolution(num_taps, group_size, hidden_size, site) for _ in range(2))

    def forward(
        self, layer: DecoderLayer[Any, Any], stream: Stream, step: Step, memory: object, index_T: Tensor
    ) -> Stream:
        """Return the residual stream after a layer of pre-normalised parts, and these convolutions around them.

        A part's output may be a summand of this rank: the convolution after it is linear.
        """
        assert layer.mixer_residual is not None
        assert layer.mlp_residual is not None
        normed_TE, stream = layer.mixer_residual.enter(stream)
        filters = self.mixer.filters(normed_TE)
        mixed_TE = layer.mixer(convolve(normed_TE, filters[:, BEFORE], index_T), step, memory)
        stream = layer.mixer_residual.add(convolve(mixed_TE, filters[:, AFTER], index_T), stream)
        normed_TE, stream = layer.mlp_residual.enter(stream)
        filters = self.mlp.filters(normed_TE)
        fed_TE = cast(Tensor, layer.mlp(convolve(normed_TE, filters[:, BEFORE], index_T)))
        added: Stream = layer.mlp_residual.add(convolve(fed_TE, filters[:, AFTER], index_T), stream)
        return added

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        yield from self.mixer.targets(f"{prefix}attention_conv.")
        yield from self.mlp.targets(f"{prefix}mlp_conv.")


def index_in_blocks(starts_N1: Tensor, num_rows: int) -> Tensor:
    """Return each row's index in its block, given where blocks begin."""
    row_T = torch.arange(num_rows, device=starts_N1.device)
    return row_T - starts_N1[torch.searchsorted(starts_N1[1:], row_T, right=True)]
