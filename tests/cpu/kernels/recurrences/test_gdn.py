"""Gated DeltaNet against the per-token recurrence: outputs, final states and the state at every cut.

Shape suffixes as in ``kernels/recurrences/gdn.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from strandline.kernels.batch import Slots
from strandline.kernels.chunk_table import build_chunk_table
from strandline.kernels.recurrences import gdn
from strandline.kernels.recurrences.gdn import GatedDeltaInputs, gdn_recurrent_reference
from tests.bound import bound
from tests.cpu.kernels.recurrences.test_chunkwise import Prompt

gdn_decode = bound(gdn.gdn_decode)
gdn_prefill = bound(gdn.gdn_prefill)

pytestmark = pytest.mark.usefixtures("each_version")

FLOAT32 = {"rtol": 1e-4, "atol": 1e-5}
"""The chunkwise form adds the same float32 numbers in another order: some 64 roundings of values near 1."""

BFLOAT16_RELATIVE_NORM = 4e-3
"""All sums are float32; only the output is rounded to bfloat16, by at most 2 ** -8 of each element."""

NUM_SLOTS = 24
POISON = float("nan")


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer."""

    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 24


class Layer(GatedDeltaInputs):
    """Parameters of one layer and the inputs of T tokens."""

    def rows(self, start: int, end: int) -> "Layer":
        """Return the layer with the inputs of rows ``[start, end)``."""
        tokens: list[Any] = [x[start:end] for x in self[:5]]
        return Layer(*tokens, *self[5:])

    def exact(self) -> "Layer":
        """Return it in float32 on the CPU."""
        tensors: list[Any] = [x.float().cpu() for x in self[:7]]
        return Layer(*tensors, self.max_beta)


def make_layer(num_tokens: int, shape: Shape = Shape(), dtype: torch.dtype = torch.float32) -> Layer:
    """Return random parameters and inputs; some heads decay fast, some hardly."""
    return Layer(
        q_TGK=torch.randn(num_tokens, shape.key_heads, shape.key_dim).to(dtype),
        k_TGK=torch.randn(num_tokens, shape.key_heads, shape.key_dim).to(dtype),
        v_THV=torch.randn(num_tokens, shape.value_heads, shape.value_dim).to(dtype),
        a_TH=torch.randn(num_tokens, shape.value_heads).to(dtype),
        b_TH=torch.randn(num_tokens, shape.value_heads).to(dtype),
        A_log_H=torch.empty(shape.value_heads).uniform_(0.001, 4).log(),
        dt_bias_H=torch.randn(shape.value_heads),
    )


def make_arena(filled_slots: Sequence[int] = (), shape: Shape = Shape()) -> Tensor:
    """Return the strided view of one layer's states: NaN everywhere but in the filled slots."""
    state_shape = (shape.value_heads, shape.key_dim, shape.value_dim)
    size = shape.value_heads * shape.key_dim * shape.value_dim
    arena_SX = torch.full((NUM_SLOTS, size + 7 * 64), POISON)
    state_SHKV = arena_SX[:, 64 : 64 + size].unflatten(1, state_shape)
    for slot in filled_slots:
        state_SHKV[slot] = torch.randn(state_shape)
    return state_SHKV


def initial_state(state_SHKV: Tensor, slot: int) -> Tensor:
    return state_SHKV[slot].clone() if slot else torch.zeros_like(state_SHKV[0])


def prefill(layer: Layer, state_SHKV: Tensor, prompts: Sequence[Prompt]) -> Tensor:
    """Run the kernel over prompts whose tokens are the layer's rows, prompt after prompt."""
    chunks = build_chunk_table([(p.start, p.end) for p in prompts], [p.cuts for p in prompts])
    slots = Slots(torch.tensor([p.src for p in prompts]), torch.tensor([p.dst for p in prompts]))
    return gdn_prefill(layer, state_SHKV, slots, chunks)


def check_prefill(layer: Layer, state_SHKV: Tensor, prompts: Sequence[Prompt]) -> None:
    """Assert outputs, final states, cut states, and that no other slot has changed."""
    before_SHKV = state_SHKV.clone()
    out_THV = prefill(layer, state_SHKV, prompts)
    expected_SHKV = before_SHKV.clone()
    row = 0
    for prompt in prompts:
        state_HKV, position = initial_state(before_SHKV, prompt.src), prompt.start
        for stop, slot in (*prompt.cuts, (prompt.end, prompt.dst)):
            if stop > position:
                part = layer.rows(row, row + stop - position)
                expected_THV, state_HKV = gdn_recurrent_reference(part, state_HKV)
                torch.testing.assert_close(out_THV[row : row + stop - position], expected_THV, **FLOAT32)
                row, position = row + stop - position, stop
            if slot:
                expected_SHKV[slot] = state_HKV
    torch.testing.assert_close(state_SHKV, expected_SHKV, **FLOAT32, equal_nan=True)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 63, 64, 65, 127, 128, 129, 1000])
@pytest.mark.parametrize("start", [0, 37])
def test_prefill_equals_the_recurrence_at_any_length(num_tokens: int, start: int) -> None:
    prompt = Prompt(start, start + num_tokens, src=2 if start else 0, dst=1, cuts=((start + num_tokens // 2 + 1, 3),))
    prompt = prompt if num_tokens > 1 else replace(prompt, cuts=())
    check_prefill(make_layer(num_tokens), make_arena([2]), [prompt])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_prefill_rounds_states_only_where_it_stores_them(dtype: torch.dtype) -> None:
    layer, prompt = make_layer(141), Prompt(37, 178, src=2, dst=1, cuts=((100, 3),))
    state_SHKV = make_arena([2]).to(dtype)
    exact_SHKV = state_SHKV.float()
    out_THV, expected_THV = (prefill(layer, states, [prompt]) for states in (state_SHKV, exact_SHKV))
    torch.testing.assert_close(out_THV, expected_THV, **FLOAT32)
    error = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(state_SHKV[[1, 3]].float(), exact_SHKV[[1, 3]], rtol=error, atol=1e-5)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 1),
        Shape(3, 3, 8, 32),
        Shape(2, 4, 32, 8),
        Shape(3, 6),
        Shape(1, 4),
        Shape(2, 8, 24, 24),
        Shape(1, 3, 5, 7),
        Shape(1, 2, 72, 72),
    ],
    ids=str,
)
def test_prefill_and_decode_accept_any_head_ratio_and_size(shape: Shape) -> None:
    layer, state_SHKV = make_layer(71, shape), make_arena([2, 3], shape)
    check_prefill(layer, state_SHKV, [Prompt(3, 70, 2, 1, ((40, 4),)), Prompt(8, 12, 3, 5)])
    check_decode(make_layer(3, shape), make_arena([1, 2], shape), [1, 2, 0], [1, 3, 4])


def test_prefill_of_a_mixed_batch_treats_each_sequence_alone() -> None:
    prompts = [
        Prompt(37, 38, src=1, dst=1),
        Prompt(0, 130, src=0, dst=2, cuts=((1, 3), (64, 4), (65, 5), (130, 6))),
        Prompt(64, 67, src=7, dst=8, cuts=((66, 9),)),
        Prompt(63, 200, src=7, dst=10),
        Prompt(5, 69, src=7, dst=11, cuts=((64, 12), (68, 13))),
        Prompt(0, 1, src=0, dst=14, cuts=((1, 15),)),
    ]
    layer = make_layer(sum(p.end - p.start for p in prompts))
    check_prefill(layer, make_arena([1, 7]), prompts)


def test_source_that_another_sequence_overwrites_is_read_as_it_was() -> None:
    layer = make_layer(140)
    prompts = [Prompt(0, 70, src=1, dst=2, cuts=((64, 3),)), Prompt(0, 35, src=2, dst=1), Prompt(0, 35, src=3, dst=4)]
    check_prefill(layer, make_arena([1, 2, 3]), prompts)


def test_decode_reads_an_overwritten_source_first_or_refuses(each_version: str) -> None:
    arguments = (make_layer(40), make_arena(range(1, 22)), [*range(1, 21)] * 2, [*range(2, 22), *[0] * 19, 1])
    if each_version == "torch":
        check_decode(*arguments)
    else:
        with pytest.raises(ValueError, match="writes where another one reads"):
            check_decode(*arguments)


def test_null_destination_drops_the_state() -> None:
    check_prefill(make_layer(100), make_arena([1]), [Prompt(0, 70, 1, 0), Prompt(0, 30, 0, 0, ((7, 2),))])
    check_decode(make_layer(2), make_arena([1]), [1, 0], [0, 0])


def test_nan_in_the_tokens_of_one_sequence_stays_there() -> None:
    layer = make_layer(40)
    for tokens in layer[:5]:
        tokens[10:25] = POISON
    out_THV = prefill(layer, make_arena(), [Prompt(0, 10, 0, 1), Prompt(0, 15, 0, 2), Prompt(0, 15, 0, 3)])
    assert out_THV[:10].isfinite().all()
    assert out_THV[10:25].isnan().all()
    assert out_THV[25:].isfinite().all()


def test_resume_from_any_token_equals_one_pass() -> None:
    layer = make_layer(150)
    whole_SHKV = make_arena()
    out_THV = prefill(layer, whole_SHKV, [Prompt(0, 150, 0, 1)])
    for position in (1, 2, 37, 63, 64, 65, 100, 128, 149):
        state_SHKV = make_arena()
        prefill(layer.rows(0, position), state_SHKV, [Prompt(0, position, 0, 2)])
        resumed_THV = prefill(layer.rows(position, 150), state_SHKV, [Prompt(position, 150, 2, 3)])
        torch.testing.assert_close(resumed_THV, out_THV[position:], **FLOAT32)
        torch.testing.assert_close(state_SHKV[3], whole_SHKV[1], **FLOAT32)


def test_prefill_of_sequence_does_not_depend_on_its_batch() -> None:
    layer = make_layer(201)
    batch_SHKV = make_arena([1, 2, 3])
    alone_SHKV = batch_SHKV.clone()
    prompts = [Prompt(5, 30, 1, 4), Prompt(37, 136, 2, 5, ((70, 8),)), Prompt(0, 77, 3, 6)]
    out_THV = prefill(layer, batch_SHKV, prompts)
    row = 0
    for prompt in prompts:
        end = row + prompt.end - prompt.start
        assert torch.equal(prefill(layer.rows(row, end), alone_SHKV, [prompt]), out_THV[row:end])
        row = end
    assert torch.equal(alone_SHKV[1:9].nan_to_num(), batch_SHKV[1:9].nan_to_num())


def test_the_number_of_threads_changes_no_bit_of_a_prefill(each_version: str) -> None:
    if each_version == "torch":
        pytest.skip("BLAS shares out the tokens of a sum")
    shape = Shape(1, 2, 24, 150)
    layer, before_SHKV = make_layer(141, shape, torch.bfloat16), make_arena([1, 2], shape)
    prompts = [Prompt(5, 16, 1, 2), Prompt(37, 165, 2, 5, ((70, 8),)), Prompt(0, 2, 0, 6)]
    threads, results = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 7, 30):
            torch.set_num_threads(num_threads)
            state_SHKV = before_SHKV.clone()
            results.append((prefill(layer, state_SHKV, prompts), state_SHKV.nan_to_num(99.0)))
    finally:
        torch.set_num_threads(threads)
    for out_THV, state_SHKV in results[1:]:
        assert torch.equal(out_THV, results[0][0])
        assert torch.equal(state_SHKV, results[0][1])


@pytest.mark.parametrize("num_tokens", [*range(1, 20), 31, 33, 47, 62])
def test_prefill_of_few_tokens_equals_start_of_longer_one(num_tokens: int) -> None:
    layer, state_SHKV = make_layer(64, Shape(1, 2, 40, 40)), make_arena([1], Shape(1, 2, 40, 40))
    long_THV = prefill(layer, state_SHKV, [Prompt(0, 64, 1, 2)])
    short_THV = prefill(layer.rows(0, num_tokens), state_SHKV, [Prompt(0, num_tokens, 1, 3)])
    torch.testing.assert_close(short_THV, long_THV[:num_tokens], **FLOAT32)


def test_cuts_on_the_grid_change_no_bit() -> None:
    layer = make_layer(150)
    plain_SHKV, cut_SHKV, resumed_SHKV = make_arena(), make_arena(), make_arena()
    out_THV = prefill(layer, plain_SHKV, [Prompt(0, 150, 0, 1)])
    cut_THV = prefill(layer, cut_SHKV, [Prompt(0, 150, 0, 1, ((64, 2), (128, 3)))])
    resumed_SHKV[2] = cut_SHKV[2]
    resumed_THV = prefill(layer.rows(64, 150), resumed_SHKV, [Prompt(64, 150, 2, 1)])
    assert torch.equal(cut_THV, out_THV)
    assert torch.equal(resumed_THV, out_THV[64:])
    assert torch.equal(cut_SHKV[1], plain_SHKV[1])
    assert torch.equal(resumed_SHKV[1], plain_SHKV[1])


@given(data=st.data())
@settings(max_examples=2 * settings().max_examples // 5)
def test_partition_into_steps_and_cuts_changes_no_state_or_output(data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, 200), "num_tokens")
    bounds = sorted(data.draw(st.sets(st.integers(1, num_tokens), max_size=4), "steps") | {num_tokens})
    cuts = sorted(data.draw(st.sets(st.integers(1, num_tokens), max_size=6), "cuts"))
    torch.manual_seed(num_tokens)
    shape = Shape(1, 2, 8, 8)
    layer, state_SHKV, start = make_layer(num_tokens, shape), make_arena(shape=shape), 0
    slot_of_cut = {position: 10 + i for i, position in enumerate(cuts)}
    outs = []
    for i, end in enumerate(bounds):
        step_cuts = tuple((p, slot) for p, slot in slot_of_cut.items() if start < p <= end)
        outs.append(prefill(layer.rows(start, end), state_SHKV, [Prompt(start, end, i, i + 1, step_cuts)]))
        start = end
    state_HKV, position = torch.zeros_like(state_SHKV[0]), 0
    for stop in sorted({*cuts, *bounds}):
        _, state_HKV = gdn_recurrent_reference(layer.rows(position, stop), state_HKV)
        for slot in {slot_of_cut.get(stop, 0), bounds.index(stop) + 1 if stop in bounds else 0} - {0}:
            torch.testing.assert_close(state_SHKV[slot], state_HKV, **FLOAT32)
        position = stop
    expected_THV, _ = gdn_recurrent_reference(layer, torch.zeros_like(state_HKV))
    torch.testing.assert_close(torch.cat(outs), expected_THV, **FLOAT32)


@pytest.mark.parametrize("gate", ["no decay", "strong", "total", "one in ten", "infinite"])
def test_extreme_gates_neither_overflow_nor_lose_the_weak_ones(gate: str) -> None:
    layer = make_layer(150)
    a_TH = torch.full_like(layer.a_TH, {"no decay": -200.0, "strong": 20.0}.get(gate, 3e4))
    if gate == "one in ten":
        a_TH = layer.a_TH - 6.0
        a_TH[::10] = 3e4
    if gate == "infinite":
        a_TH = layer.a_TH.clone()
        a_TH[::7] = torch.inf
    layer = layer._replace(a_TH=a_TH, A_log_H=torch.tensor([2.7, 0.0, -3.0, 4.0]))
    check_prefill(layer, make_arena([1]), [Prompt(5, 155, 1, 2, ((70, 3),))])
    check_decode(layer.rows(0, 14), make_arena([1]), [1] * 14, list(range(2, 16)))


def test_repeated_keys_written_at_full_strength_stay_accurate() -> None:
    layer = make_layer(130)
    k_TGK = layer.k_TGK[:1] + 1e-3 * layer.k_TGK
    layer = layer._replace(k_TGK=k_TGK, b_TH=torch.full_like(layer.b_TH, 20.0), a_TH=layer.a_TH - 30.0)
    check_prefill(layer, make_arena([1]), [Prompt(0, 130, 1, 2)])


def test_negative_eigenvalues_in_prefill_and_decode_equal_the_recurrence() -> None:
    layer = make_layer(141)._replace(max_beta=2)
    check_prefill(layer, make_arena([2]), [Prompt(37, 178, src=2, dst=1, cuts=((100, 3),))])
    check_decode(layer.rows(0, 3), make_arena([1, 2]), [1, 2, 0], [1, 3, 4])


def test_zero_queries_and_keys_give_zeros() -> None:
    layer = make_layer(70)
    layer = layer._replace(q_TGK=torch.zeros_like(layer.q_TGK), k_TGK=torch.zeros_like(layer.k_TGK))
    check_prefill(layer, make_arena([1]), [Prompt(0, 70, 1, 2)])


def transformers_inputs(layer: Layer) -> tuple[Tensor, ...]:
    ratio = layer.v_THV.shape[1] // layer.k_TGK.shape[1]
    g_TH = -layer.A_log_H.exp() * torch.nn.functional.softplus(layer.a_TH.float() + layer.dt_bias_H)
    q_THK, k_THK = (x.repeat_interleave(ratio, 1) for x in (layer.q_TGK, layer.k_TGK))
    return tuple(x.unsqueeze(0) for x in (q_THK, k_THK, layer.v_THV, g_TH, layer.max_beta * layer.b_TH.sigmoid()))


@pytest.mark.parametrize("max_beta", [1, 2])
@pytest.mark.parametrize("peer", [torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule])
def test_prefill_equals_transformers(peer, max_beta: int) -> None:  # type: ignore[no-untyped-def]
    layer, state_SHKV = make_layer(150)._replace(max_beta=max_beta), make_arena([1])
    q, k, v, g, beta = transformers_inputs(layer)
    expected_THV, expected_HKV = peer(
        q, k, v, g=g, beta=beta, initial_state=state_SHKV[1:2], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    out_THV = prefill(layer, state_SHKV, [Prompt(0, 150, 1, 2)])
    torch.testing.assert_close(out_THV, expected_THV[0], **FLOAT32)
    torch.testing.assert_close(state_SHKV[2], expected_HKV[0], **FLOAT32)


def test_bfloat16_inputs_cost_one_rounding_of_the_output() -> None:
    layer, state_SHKV = make_layer(300, dtype=torch.bfloat16), make_arena([1])
    exact_THV, exact_HKV = gdn_recurrent_reference(layer.exact(), initial_state(state_SHKV, 1))
    out_THV = prefill(layer, state_SHKV, [Prompt(9, 309, 1, 2)])
    assert out_THV.dtype == torch.bfloat16
    assert (out_THV.float() - exact_THV).norm() < BFLOAT16_RELATIVE_NORM * exact_THV.norm()
    torch.testing.assert_close(state_SHKV[2], exact_HKV, **FLOAT32)


def test_prefill_reads_strided_inputs() -> None:
    layer = make_layer(80)
    wide = {name: torch.cat((x, x), dim=-1).chunk(2, dim=-1)[1] for name, x in layer._asdict().items() if "T" in name}
    check_prefill(layer._replace(**wide), make_arena([1]), [Prompt(0, 80, 1, 2)])


def decode(layer: Layer, state_SHKV: Tensor, src: Sequence[int], dst: Sequence[int]) -> Tensor:
    return gdn_decode(layer, state_SHKV, Slots(torch.tensor(src), torch.tensor(dst)))


def check_decode(layer: Layer, state_SHKV: Tensor, src: Sequence[int], dst: Sequence[int]) -> None:
    """Assert outputs and states of one token per sequence, and that no other slot has changed."""
    expected_SHKV = state_SHKV.clone()
    expected_NHV = torch.empty_like(layer.v_THV)
    for i, (src_slot, dst_slot) in enumerate(zip(src, dst, strict=True)):
        before_HKV = initial_state(state_SHKV, src_slot)
        expected_NHV[i], after_HKV = gdn_recurrent_reference(layer.rows(i, i + 1), before_HKV)
        if dst_slot:
            expected_SHKV[dst_slot] = after_HKV
    torch.testing.assert_close(decode(layer, state_SHKV, src, dst), expected_NHV, **FLOAT32)
    torch.testing.assert_close(state_SHKV, expected_SHKV, **FLOAT32, equal_nan=True)


@pytest.mark.parametrize("num_sequences", [1, 2, 20])
def test_decode_equals_the_recurrence(num_sequences: int) -> None:
    slots = list(range(1, num_sequences + 1))
    check_decode(make_layer(num_sequences), make_arena(slots), slots, slots)
    check_decode(
        make_layer(num_sequences), make_arena([22]), [22, 0] * (num_sequences // 2) + [0] * (num_sequences % 2), slots
    )


def test_decoding_token_by_token_equals_prefill() -> None:
    layer, state_SHKV = make_layer(40), make_arena([1])
    prefilled_THV = prefill(layer, state_SHKV, [Prompt(0, 40, 1, 2)])
    decoded = [decode(layer.rows(i, i + 1), state_SHKV, [3 if i else 1], [3]) for i in range(40)]
    torch.testing.assert_close(torch.cat(decoded), prefilled_THV, **FLOAT32)
    torch.testing.assert_close(state_SHKV[3], state_SHKV[2], **FLOAT32)


def test_decode_of_sequence_does_not_depend_on_its_batch() -> None:
    layer, slots = make_layer(20), list(range(1, 21))
    batch_SHKV = make_arena(slots)
    alone_SHKV = batch_SHKV.clone()
    out_NHV = decode(layer, batch_SHKV, slots, slots)
    for i, slot in enumerate(slots):
        assert torch.equal(decode(layer.rows(i, i + 1), alone_SHKV, [slot], [slot])[0], out_NHV[i])
    assert torch.equal(alone_SHKV[1:21], batch_SHKV[1:21])


def test_decode_in_bfloat16_costs_one_rounding_of_the_output() -> None:
    layer, state_SHKV = make_layer(1, dtype=torch.bfloat16), make_arena([1])
    exact_NHV, exact_HKV = gdn_recurrent_reference(layer.exact(), initial_state(state_SHKV, 1))
    out_NHV = decode(layer, state_SHKV, [1], [1])
    assert out_NHV.dtype == torch.bfloat16
    assert (out_NHV.float() - exact_NHV).norm() < BFLOAT16_RELATIVE_NORM * exact_NHV.norm()
    torch.testing.assert_close(state_SHKV[1], exact_HKV, **FLOAT32)
