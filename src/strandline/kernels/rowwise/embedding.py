"""Embeddings of tokens and of pictures' tokens, by a rank that has those of a part of the vocabulary.

Shape suffixes: T tokens, Z rows of the rank's embedding, X encoded tokens of pictures, E hidden size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.ids import FIRST_VIRTUAL_ID
from strandline.kernels.operation import operation, triton


@operation(triton("rowwise.embedding_triton"))
def embed_held(
    token_ids_T: Tensor, embed_ZE: Tensor, first_token: int, num_held: int, encoded_XE: Tensor | None = None
) -> Tensor:
    """Return the embeddings ``[T, E]`` of tokens that the rank has, and zeros for others.

    Args:
        first_token: the first one that it has; the rows of ``embed_ZE`` begin with it.
        num_held: tokens that it has; further rows stand for none.
        encoded_XE: embeddings of the ids from ``FIRST_VIRTUAL_ID`` on; None: there are none of these, or another rank
            has them.
    """
    row_T = token_ids_T - first_token
    is_elsewhere_T = (row_T < 0) | (row_T >= num_held)
    embedded_TE = F.embedding(row_T.masked_fill(is_elsewhere_T, 0), embed_ZE)
    embedded_TE.masked_fill_(is_elsewhere_T.unsqueeze(-1), 0.0)
    if encoded_XE is None:
        return embedded_TE
    picture_row_T = token_ids_T - FIRST_VIRTUAL_ID
    picture_TE = F.embedding(picture_row_T.clamp_min(0), encoded_XE)
    return torch.where((picture_row_T >= 0).unsqueeze(-1), picture_TE, embedded_TE)
