"""Blocks of layers instead of a residual stream: parts read mixes of finished blocks and of the one under way.

Shape suffixes: as in ``kernels/streams/block_mixes.py``.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from strandline.kernels.binding import Kernels
from strandline.kernels.operation import Operation
from strandline.kernels.streams.block_mixes import BlockMix, OpenBlock, mix_blocks
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, Target, whole


class BlockStream(NamedTuple):
    """Blocks within a step."""

    blocks_TBE: Tensor
    """Has room for all blocks of the model."""
    num_blocks: int
    """How many of them are finished."""
    block: OpenBlock
    """The one under way."""

    def finished(self, block_TE: Tensor) -> "BlockStream":
        """Finish a block; the next one has no output yet."""
        self.blocks_TBE[:, self.num_blocks].copy_(block_TE)
        return self._replace(num_blocks=self.num_blocks + 1, block=OpenBlock(None, None))


class BlockReader(nn.Module):
    """Mixes the inputs of a part, and normalises them.

    Args:
        num_inputs: how many inputs the part has.
        eps: epsilon of the norm of inputs.
        has_blocks: whether blocks may be finished; else the part reads the one under way.
    """

    operations = (mix_blocks,)

    def __init__(
        self, hidden_size: int, eps: float, site: Site, *, num_inputs: int = 1, has_blocks: bool = True
    ) -> None:
        super().__init__()
        self.eps = eps
        self.norm_QE = site.gain(num_inputs, hidden_size)
        self.query_QE = site.parameter(num_inputs, hidden_size, dtype=torch.float32) if has_blocks else None

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._mix_blocks = kernels[mix_blocks]

    def forward(self, stream: BlockStream, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the part's inputs ``[Q, T, E]``, and the block under way.

        Args:
            dtype: see ``mix_blocks``.
        """
        mix = BlockMix(self.query_QE, self.norm_QE, self.eps)
        inputs_QTE, block_TE = self._mix_blocks(*stream, mix, dtype)
        return inputs_QTE, block_TE

    @property
    def query(self) -> Target:
        """Target of the queries, published without their dimension if there is one."""
        assert self.query_QE is not None
        return whole(self.query_QE if len(self.query_QE) > 1 else self.query_QE[0])


class BlockEnds(nn.Module):
    """Normalises embeddings, and mixes the final hidden state.

    Args:
        num_blocks: how many blocks the layers make.
    """

    def __init__(self, hidden_size: int, eps: float, num_blocks: int, site: Site) -> None:
        super().__init__()
        self.num_blocks, self.dtype = num_blocks, site.dtype
        self.first = BlockReader(hidden_size, eps, site, has_blocks=False)
        self.last = BlockReader(hidden_size, eps, site)

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        return ()

    def connect(self, kernels: Kernels, part: None = None) -> None:
        """Look up nothing: readers look up their operations themselves."""
        del kernels, part

    def begin(self, embedded_TE: Tensor) -> BlockStream:
        """Return the blocks before the first layer: none but the one under way, the normalised embedding."""
        num_tokens, hidden_size = embedded_TE.shape
        blocks_TBE = embedded_TE.new_empty(num_tokens, self.num_blocks, hidden_size)
        embedding = BlockStream(blocks_TBE, 0, OpenBlock(embedded_TE, None))
        return embedding._replace(block=OpenBlock(self.first(embedding, self.dtype)[0][0], None))

    def leave(self, stream: BlockStream) -> Tensor:
        """Return the final, normalised hidden state."""
        hidden_TE: Tensor = self.last(stream, self.dtype)[0][0]
        return hidden_TE

    def targets(self, prefix: str) -> NamedTargets:
        """Yield nothing: the family names them."""
        del prefix
        yield from ()
