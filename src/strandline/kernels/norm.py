"""RMS and l2 normalisation over the last dimension, with the rounding of the published models.

Statistics are taken in float32 whatever the input. Where the result is rounded to the input's dtype differs
between families and is part of each function's contract: a model must use the one that it was trained with.

Source: ``transformers`` (``LlamaRMSNorm``, ``Qwen3NextRMSNorm``, ``Qwen3NextRMSNormGated``) for the rounding.

Shape suffixes: D channels; the dimensions before it are free.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.platform import has_triton_twin


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise, round to x's dtype, then multiply by the weight (Llama, Qwen3, and most others)."""
    return F.rms_norm(x, x.shape[-1:], None, eps) * weight_D


@has_triton_twin("norm_triton")
def rms_norm_zero_centered(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise and multiply by ``1 + weight`` in float32, then round to x's dtype (Qwen3-Next, Gemma)."""
    return F.rms_norm(x.float(), x.shape[-1:], weight_D.float() + 1.0, eps).to(x.dtype)


@has_triton_twin("norm_triton")
def add_rms_norm_zero_centered(x: Tensor, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add the residual stream, round the sum; return it normalised as above, and itself. ``x`` is overwritten."""
    total = x.add_(residual)
    return rms_norm_zero_centered(total, weight_D, eps), total


@has_triton_twin("norm_triton")
def rms_norm_gated(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise, round, multiply by the weight, then by ``silu(gate)`` in float32; return x's dtype."""
    normed = F.rms_norm(x, x.shape[-1:], None, eps) * weight_D
    return (normed * F.silu(gate.float())).to(x.dtype)


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """Divide by ``sqrt(sum(x ** 2) + eps)`` in float32; return float32."""
    x = x.float()
    return x * torch.rsqrt(torch.linalg.vecdot(x, x).unsqueeze(-1) + eps)
