"""A cost model of steps, with which a replay runs without a device.

A step reads the weights once, computes its prefill tokens at a fixed rate plus attention over what lies before them,
and pays for every decoding sequence its state and its keys and values. Rough on purpose: a replay compares policies,
and what they differ in is the number of tokens to prefill.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Final

from strandline.ids import BLOCK_TOKENS
from strandline.specs import ModelSpec


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of one model on one device, in seconds."""

    step_s: float
    """Fixed cost of a step: launches, and reading the weights."""
    prefill_token_s: float
    attention_pair_s: float
    """Cost of one prefill token attending to one earlier token, in all layers together."""
    decode_sequence_s: float
    """Cost of one more decoding sequence: its state read and written, its share of the experts."""
    decode_kv_token_s: float
    """Cost of one token of keys and values that a decode reads."""

    def sped_up(self, times: float) -> "CostModel":
        """Return the costs of a machine that is ``times`` times as fast."""
        return CostModel(*(cost / times for cost in astuple(self)))

    def prefill_s(self, start: int, end: int) -> float:
        """Return what computing tokens ``[start, end)`` of a sequence adds to a step."""
        num_tokens = end - start
        return num_tokens * (self.prefill_token_s + self.attention_pair_s * (start + end) / 2)

    def decode_s(self, position: int) -> float:
        """Return what decoding one token at ``position`` adds to a step."""
        return self.decode_sequence_s + self.decode_kv_token_s * position


H200: Final[Mapping[str, CostModel]] = {
    # 67,500 tokens/s at 8 × 8,192, attention being a small part; 292 TFLOP/s in 10 layers of 16 heads of 256; decode
    # 4.2 ms at batch 1 and 31 ms at 256; 20 KiB of keys and values per token at 4.27 TB/s.
    "Qwen3.5-35B-A3B": CostModel(0.0042, 1 / 70_000, 5.6e-10, 1.0e-4, 4.8e-9),
    "Qwen3.5-9B": CostModel(0.0060, 1 / 36_000, 4.5e-10, 4.5e-5, 7.7e-9),
    "Qwen3.5-4B": CostModel(0.0036, 1 / 71_000, 4.5e-10, 4.4e-5, 7.7e-9),
}
"""One H200, from measured steps of each model (the 9B's are scaled from the 4B's by its weights)."""

COPY_BYTES_PER_S: Final = 4.27e12
PREFILL_FLOP_PER_S: Final = 4.5e14
ATTENTION_FLOP_PER_S: Final = 2.92e14
MEASURED_OVER_ROOFLINE: Final = 2.0
"""Ratio of measured step times to the time of the memory traffic alone."""


def estimated(spec: ModelSpec, num_active_weights: int, num_query_heads: int) -> CostModel:
    """Return what a model in bfloat16 costs on one H200, from its sizes and the rates of those that were measured."""
    # A query head multiplies with one vector of each stream: a key, a value.
    pair_flop = sum(2 * num_query_heads * stream.shape[-1] for layer in spec.layers for stream in layer.streams)
    kv_token_bytes = spec.block_bytes / BLOCK_TOKENS
    return CostModel(
        step_s=MEASURED_OVER_ROOFLINE * 2 * num_active_weights / COPY_BYTES_PER_S,
        prefill_token_s=2 * num_active_weights / PREFILL_FLOP_PER_S,
        attention_pair_s=pair_flop / ATTENTION_FLOP_PER_S,
        decode_sequence_s=MEASURED_OVER_ROOFLINE * 2 * spec.raw_slot_bytes / COPY_BYTES_PER_S,
        decode_kv_token_s=kv_token_bytes / COPY_BYTES_PER_S,
    )
