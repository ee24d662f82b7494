"""Gates, of feed-forward layers and of attention's output, and what replaces a gate.

Shape suffixes: T tokens, F intermediate size, O features; the dimensions before F and O are free.
"""

import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.operation import operation, triton


@operation(triton("rowwise.activation_triton"))
def swiglu(gate_up: Tensor, limit: float | None = None, gate_factor: float = 1.0) -> Tensor:
    """Return ``silu(gate_factor gate) * up`` of ``[..., 2 F]``, the gate before the up projection.

    Args:
        limit: greater than 0: gates are clamped to at most that before, up projections to ``[-limit, limit]``; None:
            they are not.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if gate_factor != 1.0:
        gate = gate * gate_factor
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate).mul_(up)


@operation()
def biased_swiglu(gate_up: Tensor, limit: float, slope: float) -> Tensor:
    """Return ``gate * sigmoid(slope * gate) * (up + 1)`` of ``[..., 2 F]``, in float32 and rounded once.

    Args:
        limit: see ``swiglu``.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * (slope * gate).sigmoid() * (up + 1)).to(gate_up.dtype)


@operation()
def capped_swiglu(gate_up: Tensor, limit: float, up_limit: float) -> Tensor:
    """Return ``cap(gate) * sigmoid(gate) * cap(up)`` of ``[..., 2 F]``, in float32 and rounded once.

    Args:
        limit: limit that ``limit * tanh(gate / limit)`` approaches.
        up_limit: the same of the up projection.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    capped = (gate / limit).tanh().mul_(limit)
    return (capped * gate.sigmoid() * (up / up_limit).tanh().mul_(up_limit)).to(gate_up.dtype)


@operation(triton("rowwise.activation_triton"))
def sigmoid_gate(x_TO: Tensor, gate_TO: Tensor) -> Tensor:
    """Return ``x * sigmoid(gate)``, the sigmoid rounded to its input's dtype; ``x_TO`` is overwritten."""
    return x_TO.mul_(gate_TO.sigmoid())


@operation(triton("rowwise.activation_triton"))
def geglu(gate_up: Tensor, is_tanh: bool = False) -> Tensor:
    """Return ``gelu(gate) * up`` of ``[..., 2 F]``, the gate before the up projection.

    Args:
        is_tanh: whether gelu is approximated by a hyperbolic tangent.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh" if is_tanh else "none").mul_(up)


@operation(triton("rowwise.activation_triton"))
def silu_gate(x_TO: Tensor, gate_TO: Tensor, gate_factor: float = 1.0) -> Tensor:
    """Return ``x * silu(gate_factor gate)``; ``x_TO`` is overwritten."""
    return x_TO.mul_(F.silu(gate_TO if gate_factor == 1.0 else gate_TO * gate_factor))


@operation(triton("rowwise.activation_triton"))
def relu_squared(x: Tensor) -> Tensor:
    """Return ``relu(x) ** 2``; ``x`` is overwritten."""
    return F.relu_(x).square_()
