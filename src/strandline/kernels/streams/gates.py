"""Gates between several residual streams and a part of a layer, and features that a layer adds to its streams.

Of every token a gate per channel weighs the normalised streams, whose mean is a part's input; a gate per stream weighs
the part's output, which is added to it.

Shape suffixes: T tokens of the step, S streams, E hidden size, O all streams side by side, R rank of the gates.
"""

import math
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.expert_choices import Summand, added_up
from strandline.kernels.operation import operation, triton
from strandline.kernels.rowwise.norm import rms_norm_heads_zero_centered


@operation(triton("streams.gates_triton"))
def add_gated(stream_TSE: Tensor, gate_TS: Tensor | None, output: Summand | None) -> Tensor:
    """Return the streams with a part's output.

    Args:
        stream_TSE: any strides but of the channels, which are dense.
        gate_TS: S times the gates of the output, before their sigmoid; None: there is no output.
    """
    if gate_TS is None or output is None:
        return stream_TSE
    weight_TS = (gate_TS / stream_TSE.shape[1]).sigmoid_().mul_(2)
    return stream_TSE + added_up(output).unsqueeze(1) * weight_TS.unsqueeze(-1)


@operation(triton("streams.gates_triton"))
def add_gated_norm(
    stream_TSE: Tensor, gate_TS: Tensor | None, output: Summand | None, norm_SE: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add a part's output as above; return the streams normalised, with weights around zero, and as they are."""
    stream_TSE = add_gated.reference(stream_TSE, gate_TS, output)
    return rms_norm_heads_zero_centered(stream_TSE, norm_SE, eps), stream_TSE


@operation(triton("streams.gates_triton"))
def silu_of_share(low_TR: Tensor, num_streams: int) -> Tensor:
    """Return ``silu(low / num_streams)``."""
    return F.silu(low_TR / num_streams)


@operation(triton("streams.gates_triton"))
def mix_gated(gate_TO: Tensor, normed_TSE: Tensor) -> Tensor:
    """Return the mean of the normalised streams times ``sigmoid(gate)``; the gate may be overwritten."""
    return gate_TO.sigmoid_().view_as(normed_TSE).mul_(normed_TSE).mean(dim=1)


class FeatureNorms(NamedTuple):
    """Weights around zero of norms of each stream."""

    key_SE: Tensor
    stream_SE: Tensor
    gated_SE: Tensor


@operation(triton("streams.gates_triton"))
def gate_features(
    key_TO: Tensor, value_TE: Tensor, stream_TSE: Tensor, norms: FeatureNorms, eps: float
) -> tuple[Tensor, Tensor]:
    """Return a token's value times a gate for each stream, and that normalised.

    The gate is made of the product of the normalised key and stream: the sigmoid of its root, with its sign.
    """
    key_TSE = rms_norm_heads_zero_centered(key_TO.view(stream_TSE.shape), norms.key_SE, eps)
    normed_TSE = rms_norm_heads_zero_centered(stream_TSE, norms.stream_SE, eps)
    score_TS1 = (key_TSE * normed_TSE).sum(-1, keepdim=True) / math.sqrt(stream_TSE.shape[-1])
    gate_TS1 = (score_TS1.abs().clamp_min(1e-6).sqrt() * score_TS1.sign()).sigmoid_()
    gated_TSE = gate_TS1 * value_TE.unsqueeze(1)
    return gated_TSE, rms_norm_heads_zero_centered(gated_TSE, norms.gated_SE, eps)
