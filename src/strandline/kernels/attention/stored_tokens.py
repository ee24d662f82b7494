"""What layers keep of each token besides keys and values, stored in the blocks, in plain torch.

The reference implementation, which also runs on CPUs.

Shape suffixes: T tokens, C channels, B blocks, P tokens in a block.
"""

from torch import Tensor

from strandline.ids import NULL_BLOCK
from strandline.kernels.batch import AttentionBatch
from strandline.kernels.operation import operation, triton


@operation(triton("attention.stored_tokens_triton"))
def store_tokens(row_TC: Tensor, memory_BPC: Tensor, batch: AttentionBatch) -> None:
    """Store what is kept of each of the step's tokens, such as its index key, in their blocks."""
    blocks, offsets = batch.write_blocks_T, batch.write_offsets_T
    if not batch.is_all_written:
        rows = (blocks != NULL_BLOCK).nonzero().squeeze(-1)
        blocks, offsets, row_TC = blocks[rows], offsets[rows], row_TC[rows]
    memory_BPC[blocks, offsets] = row_TC
