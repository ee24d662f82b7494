"""Times that a step cannot fall below: those of its bytes at a GPU's bandwidth, or of its products at its speed.

The floor of a decode is to read the weights once, of experts those that some token chooses if all are equally likely,
keys and values up to each sequence's context, and to read states and write them; where sequences keep logs, they are
written once a log. The floor of a prefill is the multiplications with weights alone, without attention, recurrences
and the output head.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from strandline.device.uni_executor import UniExecutor
from strandline.kernels.gemm.weights import HalfWeight, PackedWeight, StackedWeight
from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.feed_forward.experts import Experts
from strandline.models.layers.parts.projection import Projection
from strandline.specs import LayerSpec


@dataclass(frozen=True, slots=True)
class Peak:
    """What a GPU achieves: of its bandwidth in a copy, and of its tensor cores in a large product of bfloat16."""

    bytes_per_s: float
    flops: float


PEAKS: Final = {"H100": Peak(3.0e12, 700e12), "H200": Peak(4.3e12, 700e12)}
"""By a part of the device's name."""


def peak_of(device_name: str) -> Peak | None:
    """Return what a GPU achieves; None: it has not been measured."""
    return next((peak for name, peak in PEAKS.items() if name in device_name), None)


def decode_share(executor: Any, num_sequences: int, context_tokens: int, ms_per_token: float) -> str:
    """Return which share of a step without drafts its bytes take, for a report; "" where that is unknown."""
    model, peak = _model_of(executor), _own_peak()
    if model is None or peak is None:
        return ""
    num_bytes = decode_bytes(model, num_sequences, context_tokens, executor.facts.log_tokens)
    floor_ms = num_bytes / peak.bytes_per_s * 1000
    return f", floor {floor_ms:.2f} ({floor_ms / ms_per_token:.2f} of it)"


def prefill_share(executor: Any, tokens_per_s: float) -> str:
    """Return which share of a prefill its products take, for a report; "" where that is unknown."""
    model, peak = _model_of(executor), _own_peak()
    if model is None or peak is None:
        return ""
    return f", {tokens_per_s * prefill_flops(model) / peak.flops:.2f} of the floor's"


def _model_of(executor: Any) -> CausalLM | None:
    """Return the model that an executor computes in this process; None: others compute it."""
    model: object = executor.runner.model if isinstance(executor, UniExecutor) else None
    return model if isinstance(model, CausalLM) else None


def _own_peak() -> Peak | None:
    return peak_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def decode_bytes(model: CausalLM, num_sequences: int, context_tokens: int, log_tokens: int = 0) -> float:
    """Return the bytes that one step of decodes moves at least.

    Args:
        log_tokens: how many tokens a sequence's log holds; 0: no logs are kept.
    """
    writes = 1 / log_tokens if log_tokens else 1.0
    per_sequence = sum(
        _stream_bytes(layer, context_tokens) + (1 + writes) * layer.slot_bytes for layer in model.spec.layers
    )
    return _weight_bytes(model, num_sequences) + num_sequences * per_sequence


def prefill_flops(model: CausalLM) -> float:
    """Return the floating-point operations of one prompt token's products with weights."""
    head, num_products = model.decoder.embedding.head, 0.0
    for module in model.decoder.modules():
        if isinstance(module, Experts):
            num_products += module.config.routing.top_k * sum(
                prod(weight.shape[1:]) for weight in (module.parts[0].up, module.parts[0].down)
            )
        elif isinstance(module, Projection) and module is not head:
            weight = module.weight
            parts = weight.parts if isinstance(weight, StackedWeight) else (weight,)
            num_products += sum(prod(part.shape) for part in parts if not isinstance(part, PackedWeight | HalfWeight))
    return 2 * num_products


def _weight_bytes(model: CausalLM, num_tokens: int) -> float:
    """Return the bytes of all weights that a step of these tokens reads."""
    decoder, total = model.decoder, 0.0
    for module in decoder.modules():
        if isinstance(module, Experts):
            share = 1 - (1 - module.share) ** num_tokens
            total += share * sum(_num_bytes(part.up) + _num_bytes(part.down) for part in module.parts)
        elif isinstance(module, Projection):
            total += _num_bytes(module.weight) + _num_bytes(module.bias_O)
        elif module is not decoder.embedding:
            total += sum(map(_num_bytes, module.parameters(recurse=False)))
    return total + (_num_bytes(decoder.embedding.embed_ZE) if decoder.embedding.head is None else 0)


def _stream_bytes(layer: LayerSpec, num_tokens: int) -> int:
    return min(num_tokens, layer.window_tokens or num_tokens) * sum(stream.num_bytes for stream in layer.streams)


def _num_bytes(weight: Any) -> int:
    return sum(
        prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride) * tensor.element_size()
        for tensor in _tensors(weight)
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _tensors(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
