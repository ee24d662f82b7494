"""Hyper-connections: mixes of several residual streams around a part of a layer, nearly doubly stochastic.

Of every token, the normalised streams give three mixes: shares of the streams in the input of a part, shares of its
output in each stream, and shares of the streams in those after the part. The last ones are made doubly stochastic by
some iterations of Sinkhorn's algorithm.

The reference implementation computes mixes in float64: torch rounds a float32 ``exp`` differently at a tensor's end,
where it does not fill a vector, so that the bits of one token would depend on the batch around it.

Source: Xie et al., "mHC: Manifold-Constrained Hyper-Connections".

Shape suffixes: T tokens of the step, S streams, E hidden size, I all streams side by side, O the mixes of a token side
by side.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.expert_choices import Summand, added_up
from strandline.kernels.operation import operation, triton
from strandline.kernels.rowwise.norm import rms_norm


class HyperMixes(NamedTuple):
    """What the streams after a part consist of, in float32."""

    output_TS: Tensor
    """Share of the part's output in each stream."""
    stream_TSS: Tensor
    """Share of stream ``i`` before the part in stream ``j`` after it, at ``[t, i, j]``."""


class HyperWeights(NamedTuple):
    """How the mixes around a part are computed, and the norm before it. The first three tensors are float32."""

    mix_OI: Tensor
    """Rows: mixes of the input (S), of the output (S), and of the streams (S²)."""
    bias_O: Tensor
    scale_3: Tensor
    """Scales the logits of each of the three mixes."""
    norm_E: Tensor
    num_iterations: int
    """Iterations of Sinkhorn's algorithm."""
    eps: float
    """Epsilon of norms."""
    mix_eps: float
    """Added to mixes, and to the sums that they are divided by."""


@operation(triton("streams.hyper_connections_triton", takes_launches=True))
def connect_part(
    stream_TSE: Tensor, mixes: HyperMixes | None, output: Summand | None, weights: HyperWeights
) -> tuple[Tensor, Tensor, HyperMixes]:
    """Return a part's normalised input, the streams with the output of the part before it, and the part's mixes.

    Args:
        stream_TSE: the streams before the last part; any strides but of the channels, which are dense.
        mixes: mixes of the last part; None: it is the first part, and the streams are returned as they are.
        output: output of the last part.
    """
    stream_TSE = _mixed_with_output(stream_TSE, mixes, output)
    input_TS, mixes = _mixes(stream_TSE, weights)
    input_TE = (input_TS.unsqueeze(-1) * stream_TSE).sum(dim=1).to(stream_TSE.dtype)
    return rms_norm.reference(input_TE, weights.norm_E, weights.eps), stream_TSE, mixes


@operation(triton("streams.hyper_connections_triton"))
def average_streams(
    stream_TSE: Tensor, mixes: HyperMixes | None, output: Summand | None, norm_E: Tensor, eps: float
) -> Tensor:
    """Return the normalised mean of the streams with the output of the last part; arguments as of ``connect_part``."""
    return rms_norm.reference(_mixed_with_output(stream_TSE, mixes, output).mean(dim=1), norm_E, eps)


def _mixed_with_output(stream_TSE: Tensor, mixes: HyperMixes | None, output: Summand | None) -> Tensor:
    if mixes is None or output is None:
        return stream_TSE
    output_TS, stream_TSS = (mix.to(stream_TSE.dtype) for mix in mixes)
    return stream_TSS.mT @ stream_TSE + added_up(output).unsqueeze(1) * output_TS.unsqueeze(-1)


def _mixes(stream_TSE: Tensor, weights: HyperWeights) -> tuple[Tensor, HyperMixes]:
    """Return the mix of the input, and those of output and streams, in float32."""
    num_streams, eps = stream_TSE.shape[1], weights.mix_eps
    flat_TI = stream_TSE.flatten(1).float()
    normed_TI = flat_TI * torch.rsqrt(flat_TI.square().mean(-1, keepdim=True) + weights.eps)
    sizes = [num_streams, num_streams, num_streams**2]
    parts = (x.split(sizes, dim=-1) for x in (F.linear(normed_TI, weights.mix_OI).double(), weights.bias_O))
    logits = (x * scale + bias for x, bias, scale in zip(*parts, weights.scale_3, strict=True))
    input_TO, output_TO, stream_TO = logits
    mix_TSS = stream_TO.unflatten(-1, (num_streams, num_streams)).softmax(-1) + eps
    mix_TSS = mix_TSS / (mix_TSS.sum(-2, keepdim=True) + eps)
    for _ in range(weights.num_iterations - 1):
        mix_TSS = mix_TSS / (mix_TSS.sum(-1, keepdim=True) + eps)
        mix_TSS = mix_TSS / (mix_TSS.sum(-2, keepdim=True) + eps)
    return (input_TO.sigmoid() + eps).float(), HyperMixes((2 * output_TO.sigmoid()).float(), mix_TSS.float())
