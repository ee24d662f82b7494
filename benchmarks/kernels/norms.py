"""Norms and gates, at the shapes of Qwen3.5-4B and 35B-A3B and, for norms of gated groups, of Nemotron-3-Nano."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from case import Launch, Work, bound, case, random, turns
from torch import Tensor

from strandline.kernels.operation import Operation
from strandline.kernels.rowwise.activation import sigmoid_gate, swiglu
from strandline.kernels.rowwise.norm import (
    add_rms_norm_zero_centered,
    rms_norm_gated,
    rms_norm_of_gated,
    rms_norm_zero_centered,
)

TOKENS = (1, 2, 4, 8, 16, 64, 256, 8192)
EPS = 1e-6


def fused(tokens: int, size: int, *inner: int) -> Tensor:
    """Return columns of the rows of a fused projection."""
    part = random(tokens, size + 4096)[:, 2048 : 2048 + size]
    return part.unflatten(1, inner) if inner else part


def add_norm_inputs(tokens: int, size: int) -> tuple[Any, ...]:
    return random(tokens, size), random(tokens, size), random(size), EPS


def norm_inputs(tokens: int, size: int) -> tuple[Any, ...]:
    return random(tokens, size), random(size), EPS


def gated_inputs(tokens: int, num_heads: int, head_dim: int) -> tuple[Any, ...]:
    gate = fused(tokens, num_heads * head_dim, num_heads, head_dim)
    return random(tokens, num_heads, head_dim), gate, random(head_dim), EPS


def of_gated_inputs(tokens: int, size: int, num_groups: int) -> tuple[Any, ...]:
    return random(tokens, size), random(tokens, size), random(size), 1e-5, num_groups


def swiglu_inputs(tokens: int, size: int) -> tuple[Any, ...]:
    return (fused(tokens, 2 * size),)


def sigmoid_gate_inputs(tokens: int, size: int) -> tuple[Any, ...]:
    """Return values and open gates: gated in place again and again, values must not fade to zeros."""
    return random(tokens, size), fused(tokens, size).add_(8)


Entry = tuple[Operation[..., Any], Callable[..., tuple[Any, ...]], int, tuple[Any, ...], tuple[int, ...]]
"""Operation, its inputs given tokens and a shape, tensors that it moves, shapes of models, and a tiny one."""

OPERATIONS: dict[str, Entry] = {
    "add-rms-norm": (add_rms_norm_zero_centered, add_norm_inputs, 4, ((2048,), (2560,)), (128,)),
    "rms-norm": (rms_norm_zero_centered, norm_inputs, 2, ((2048,), (2560,)), (128,)),
    "rms-norm-gated": (rms_norm_gated, gated_inputs, 3, ((32, 128),), (2, 32)),
    "rms-norm-of-gated": (rms_norm_of_gated, of_gated_inputs, 3, ((4096, 8),), (128, 2)),
    "swiglu": (swiglu, swiglu_inputs, 3, ((512,), (9216,)), (128,)),
    "sigmoid-gate": (sigmoid_gate, sigmoid_gate_inputs, 3, ((4096,),), (128,)),
}
OVERWRITTEN = ("add-rms-norm", "sigmoid-gate")
"""Operations whose first input is overwritten."""


def work(name: str, tokens: int, size: tuple[int, ...]) -> Work:
    """Return the work of a norm or a gate."""
    operation, inputs, num_moved = OPERATIONS[name][:3]
    channels = size[0] * size[1] if name == "rms-norm-gated" else size[0]
    num_bytes = 2.0 * num_moved * tokens * channels
    return Work(
        {"strandline": bound(operation), "torch": operation.reference},
        [inputs(tokens, *size) for _ in range(turns(num_bytes, at_least=16))],
        num_bytes=num_bytes,
        reference=operation.reference,
        memory=(lambda x, *_: [x]) if name in OVERWRITTEN else (lambda *_: []),
        peers={"torch"},
        launches=launches,
    )


def launches() -> Iterator[Launch]:
    for rows, short, long, block in ((512, 2, 4, 512), (2048, 4, 8, 2048), (4096, 8, 16, 4096), (1024, 2, 16, 1024)):
        values = {"norm_triton.ROW_ELEMENTS": rows, "norm_triton.WARPS_SHORT": short, "norm_triton.WARPS_LONG": long}
        values |= {"activation_triton.BLOCK": block, "activation_triton.WARPS": max(4, block // 512)}
        in_modules = {f"rowwise.{name}": value for name, value in values.items()}
        yield Launch(f"row elements {rows}, warps {short} and {long}, block {block}", in_modules)


for _name, (*_, _sizes, _tiny) in OPERATIONS.items():
    case(f"norm/{_name}", size=_sizes, tokens=TOKENS, tiny={"size": _tiny, "tokens": 3})(partial(work, _name))
