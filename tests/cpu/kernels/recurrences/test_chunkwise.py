"""Chunkwise recurrences against themselves token by token: outputs, final states and the state at every cut.

A further recurrence joins by one row of ``KINDS``.

Shape suffixes: N sequences, S slots, X the dimensions of one state; T tokens of whatever follows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strandline.kernels.batch import Slots
from strandline.kernels.chunk_table import build_chunk_table
from strandline.kernels.operation import Operation
from strandline.kernels.recurrences.gdn import GatedDeltaInputs, gdn_decode, gdn_prefill, gdn_recurrent_reference
from strandline.kernels.recurrences.kda import KimiDeltaInputs, kda_decode, kda_prefill, kda_recurrent_reference
from strandline.kernels.recurrences.lightning import (
    LightningInputs,
    lightning_decode,
    lightning_prefill,
    lightning_recurrent_reference,
)
from strandline.kernels.recurrences.mamba1 import (
    Mamba1Inputs,
    mamba1_decode,
    mamba1_prefill,
    mamba1_recurrent_reference,
)
from strandline.kernels.recurrences.mamba2 import (
    Mamba2Inputs,
    mamba2_decode,
    mamba2_prefill,
    mamba2_recurrent_reference,
)
from strandline.kernels.recurrences.rglru import GatedUnitInputs, rglru_decode, rglru_prefill, rglru_recurrent_reference
from tests.bound import bound

pytestmark = pytest.mark.usefixtures("each_version")

FLOAT32 = {"rtol": 1e-4, "atol": 4e-5}
"""The chunkwise form adds the same float32 numbers in another order: some 64 roundings of terms up to 10, which may
cancel."""

NUM_SLOTS = 24


@dataclass(frozen=True)
class Kind:
    """A recurrence: operations, the shapes of a token's inputs, and how its parameters are drawn."""

    prefill: Operation[..., Tensor]
    decode: Operation[..., Tensor]
    reference: Callable[..., tuple[Tensor, Tensor]]
    tokens: tuple[tuple[int, ...], ...]
    parameters: Callable[[], tuple[Any, ...]]
    state: tuple[int, ...]
    inputs: Callable[..., Any]
    """Makes the operations' inputs of a token's inputs and the parameters."""


def decay_rates(num_heads: int) -> Tensor:
    """Return logarithms of rates; some heads decay fast, some hardly."""
    return torch.empty(num_heads).uniform_(0.001, 4).log()


KINDS = {
    "gdn": Kind(
        gdn_prefill,
        gdn_decode,
        gdn_recurrent_reference,
        ((2, 16), (2, 16), (4, 24), (4,), (4,)),
        lambda: (decay_rates(4), torch.randn(4)),
        (4, 16, 24),
        GatedDeltaInputs,
    ),
    "kda": Kind(
        kda_prefill,
        kda_decode,
        kda_recurrent_reference,
        ((4, 16), (4, 16), (4, 24), (4, 16), (4,)),
        lambda: (decay_rates(4), torch.randn(4, 16), None),
        (4, 16, 24),
        KimiDeltaInputs,
    ),
    "lightning": Kind(
        lightning_prefill,
        lightning_decode,
        lightning_recurrent_reference,
        ((4, 16), (4, 16), (4, 20)),
        lambda: (-torch.empty(4).uniform_(0.1, 2),),
        (4, 16, 20),
        LightningInputs,
    ),
    "rglru": Kind(
        rglru_prefill,
        rglru_decode,
        rglru_recurrent_reference,
        ((20,), (20,), (20,), (1,)),
        lambda: (torch.randn(20),),
        (20,),
        GatedUnitInputs,
    ),
    "mamba1": Kind(
        mamba1_prefill,
        mamba1_decode,
        mamba1_recurrent_reference,
        ((20,), (20,), (5,), (5,), (20,)),
        lambda: (torch.randn(20), torch.randn(20), torch.empty(20, 5).uniform_(0.001, 4).log()),
        (20, 5),
        Mamba1Inputs,
    ),
    "mamba2": Kind(
        mamba2_prefill,
        mamba2_decode,
        mamba2_recurrent_reference,
        ((6, 12), (2, 16), (2, 16), (6,)),
        lambda: (decay_rates(6), torch.randn(6), torch.randn(6), (0.01, torch.inf)),
        (6, 16, 12),
        Mamba2Inputs,
    ),
    "mamba2-one-group": Kind(
        mamba2_prefill,
        mamba2_decode,
        mamba2_recurrent_reference,
        ((3, 20), (1, 8), (1, 8), (3,)),
        lambda: (decay_rates(3), torch.randn(3), torch.randn(3), (0.0, 0.7), 1.7),
        (3, 8, 20),
        Mamba2Inputs,
    ),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@dataclass(frozen=True)
class Layer:
    """The inputs of some tokens, and the parameters."""

    kind: Kind
    tokens: tuple[Tensor, ...]
    parameters: tuple[Any, ...]

    def rows(self, start: int, end: int) -> "Layer":
        return Layer(self.kind, tuple(x[start:end] for x in self.tokens), self.parameters)

    def in_dtype(self, dtype: torch.dtype) -> "Layer":
        return Layer(self.kind, tuple(x.to(dtype) for x in self.tokens), self.parameters)

    @property
    def inputs(self) -> Any:
        return self.kind.inputs(*self.tokens, *self.parameters)

    def token_by_token(self, state_X: Tensor) -> tuple[Tensor, Tensor]:
        return self.kind.reference(self.inputs, state_X)

    def prefill(self, state_SX: Tensor, prompts: Sequence["Prompt"]) -> Tensor:
        """Run over prompts whose tokens are these rows, prompt after prompt."""
        chunks = build_chunk_table([(p.start, p.end) for p in prompts], [p.cuts for p in prompts])
        slots = Slots(torch.tensor([p.src for p in prompts]), torch.tensor([p.dst for p in prompts]))
        return bound(self.kind.prefill)(self.inputs, state_SX, slots, chunks)

    def decode(self, state_SX: Tensor, src: Sequence[int], dst: Sequence[int]) -> Tensor:
        return bound(self.kind.decode)(self.inputs, state_SX, Slots(torch.tensor(src), torch.tensor(dst)))


@dataclass(frozen=True)
class Prompt:
    """One sequence of a step: its token range, where its state comes from and goes to, and its cuts."""

    start: int
    end: int
    src: int
    dst: int
    cuts: tuple[tuple[int, int], ...] = ()


def make_layer(kind: Kind, num_tokens: int) -> Layer:
    return Layer(kind, tuple(torch.randn(num_tokens, *shape) for shape in kind.tokens), kind.parameters())


def make_slots(kind: Kind, filled: Sequence[int] = ()) -> Tensor:
    """Return the strided view of one layer's states: NaN everywhere but in the filled slots."""
    size = torch.Size(kind.state).numel()
    state_SX = torch.full((NUM_SLOTS, size + 7 * 64), torch.nan)[:, 64 : 64 + size].unflatten(1, kind.state)
    for slot in filled:
        state_SX[slot] = torch.randn(kind.state)
    return state_SX


def initial_state(state_SX: Tensor, slot: int) -> Tensor:
    return state_SX[slot].clone() if slot else torch.zeros_like(state_SX[0])


def check_prefill(layer: Layer, state_SX: Tensor, prompts: Sequence[Prompt]) -> None:
    """Assert outputs, final states, cut states, and that no other slot has changed."""
    before_SX = state_SX.clone()
    out_T = layer.prefill(state_SX, prompts)
    expected_SX = before_SX.clone()
    row = 0
    for prompt in prompts:
        state_X, position = initial_state(before_SX, prompt.src), prompt.start
        for stop, slot in (*prompt.cuts, (prompt.end, prompt.dst)):
            if stop > position:
                end = row + stop - position
                expected_T, state_X = layer.rows(row, end).token_by_token(state_X)
                torch.testing.assert_close(out_T[row:end], expected_T, **FLOAT32)
                row, position = end, stop
            if slot:
                expected_SX[slot] = state_X
    torch.testing.assert_close(state_SX, expected_SX, **FLOAT32, equal_nan=True)


def check_decode(layer: Layer, state_SX: Tensor, src: Sequence[int], dst: Sequence[int]) -> None:
    """Assert outputs and states of one token per sequence, and that no other slot has changed."""
    expected_SX = state_SX.clone()
    expected = []
    for i, (source, target) in enumerate(zip(src, dst, strict=True)):
        out_T, after_X = layer.rows(i, i + 1).token_by_token(initial_state(state_SX, source))
        expected.append(out_T)
        if target:
            expected_SX[target] = after_X
    torch.testing.assert_close(layer.decode(state_SX, src, dst), torch.cat(expected), **FLOAT32)
    torch.testing.assert_close(state_SX, expected_SX, **FLOAT32, equal_nan=True)


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 128, 1000])
@pytest.mark.parametrize("start", [0, 37])
def test_prefill_equals_the_recurrence_at_any_length(kind: Kind, num_tokens: int, start: int) -> None:
    cuts = ((start + num_tokens // 2 + 1, 3),) if num_tokens > 1 else ()
    prompt = Prompt(start, start + num_tokens, src=2 if start else 0, dst=1, cuts=cuts)
    check_prefill(make_layer(kind, num_tokens), make_slots(kind, [2]), [prompt])


def test_prefill_of_a_mixed_batch_treats_each_sequence_alone(kind: Kind) -> None:
    prompts = [
        Prompt(37, 38, src=1, dst=1),
        Prompt(0, 130, src=0, dst=2, cuts=((1, 3), (64, 4), (65, 5), (130, 6))),
        Prompt(64, 67, src=7, dst=8, cuts=((66, 9),)),
        Prompt(63, 200, src=7, dst=10),
        Prompt(5, 69, src=7, dst=0, cuts=((64, 12), (68, 13))),
        Prompt(0, 1, src=0, dst=14, cuts=((1, 15),)),
    ]
    check_prefill(make_layer(kind, sum(p.end - p.start for p in prompts)), make_slots(kind, [1, 7]), prompts)


def test_source_that_another_sequence_overwrites_is_read_as_it_was(kind: Kind) -> None:
    prompts = [Prompt(0, 70, src=1, dst=2, cuts=((64, 3),)), Prompt(0, 35, src=2, dst=1), Prompt(0, 35, src=3, dst=4)]
    check_prefill(make_layer(kind, 140), make_slots(kind, [1, 2, 3]), prompts)


def test_decode_equals_the_recurrence(kind: Kind) -> None:
    check_decode(make_layer(kind, 20), make_slots(kind, range(1, 21)), range(1, 21), range(1, 21))
    check_decode(make_layer(kind, 4), make_slots(kind, [22]), [22, 0, 22, 0], [1, 2, 0, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_states_are_rounded_only_where_they_are_stored(kind: Kind, dtype: torch.dtype) -> None:
    layer, prompt = make_layer(kind, 141), Prompt(37, 178, src=2, dst=1, cuts=((100, 3),))
    state_SX = make_slots(kind, [2]).to(dtype)
    exact_SX = state_SX.float()
    out_T, expected_T = (layer.prefill(states, [prompt]) for states in (state_SX, exact_SX))
    torch.testing.assert_close(out_T, expected_T, **FLOAT32)
    error = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(state_SX[[1, 3]].float(), exact_SX[[1, 3]], rtol=error, atol=1e-5)


def test_bfloat16_inputs_cost_one_rounding_of_the_output(kind: Kind) -> None:
    layer, state_SX = make_layer(kind, 200).in_dtype(torch.bfloat16), make_slots(kind, [1])
    exact_T, exact_X = layer.in_dtype(torch.float32).token_by_token(initial_state(state_SX, 1))
    for out_T in (
        layer.prefill(state_SX, [Prompt(9, 209, 1, 2)]),
        torch.cat([layer.rows(i, i + 1).decode(state_SX, [3 if i else 1], [3]) for i in range(200)]),
    ):
        assert out_T.dtype == torch.bfloat16
        assert (out_T.float() - exact_T).norm() < 4e-3 * exact_T.norm()
    for slot in (2, 3):
        torch.testing.assert_close(state_SX[slot], exact_X, **FLOAT32)


def test_a_sequence_does_not_depend_on_its_batch(kind: Kind) -> None:
    layer, batch_SX = make_layer(kind, 201), make_slots(kind, range(1, 21))
    alone_SX = batch_SX.clone()
    prompts = [Prompt(5, 30, 1, 4), Prompt(37, 136, 2, 5, ((70, 8),)), Prompt(0, 77, 3, 6)]
    out_T = layer.prefill(batch_SX, prompts)
    row = 0
    for prompt in prompts:
        end = row + prompt.end - prompt.start
        assert torch.equal(layer.rows(row, end).prefill(alone_SX, [prompt]), out_T[row:end])
        row = end
    decoded_T = layer.rows(0, 20).decode(batch_SX, range(1, 21), range(1, 21))
    for i in range(20):
        assert torch.equal(layer.rows(i, i + 1).decode(alone_SX, [i + 1], [i + 1])[0], decoded_T[i])
    assert torch.equal(alone_SX[1:21], batch_SX[1:21])


def test_cuts_on_the_grid_change_no_bit(kind: Kind) -> None:
    layer = make_layer(kind, 150)
    plain_SX, cut_SX, resumed_SX = make_slots(kind), make_slots(kind), make_slots(kind)
    out_T = layer.prefill(plain_SX, [Prompt(0, 150, 0, 1)])
    cut_T = layer.prefill(cut_SX, [Prompt(0, 150, 0, 1, ((64, 2), (128, 3)))])
    resumed_SX[2] = cut_SX[2]
    resumed_T = layer.rows(64, 150).prefill(resumed_SX, [Prompt(64, 150, 2, 1)])
    assert torch.equal(cut_T, out_T)
    assert torch.equal(resumed_T, out_T[64:])
    assert torch.equal(cut_SX[1], plain_SX[1])
    assert torch.equal(resumed_SX[1], plain_SX[1])


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
@settings(max_examples=settings().max_examples // 5)
def test_partition_into_steps_and_cuts_changes_no_state_or_output(name: str, data: st.DataObject) -> None:
    kind = KINDS[name]
    num_tokens = data.draw(st.integers(1, 200), "num_tokens")
    bounds = sorted(data.draw(st.sets(st.integers(1, num_tokens), max_size=4), "steps") | {num_tokens})
    cuts = sorted(data.draw(st.sets(st.integers(1, num_tokens), max_size=6), "cuts"))
    torch.manual_seed(num_tokens)
    layer, state_SX, start = make_layer(kind, num_tokens), make_slots(kind), 0
    slot_of_cut = {position: 10 + i for i, position in enumerate(cuts)}
    outs = []
    for i, end in enumerate(bounds):
        step_cuts = tuple((p, slot) for p, slot in slot_of_cut.items() if start < p <= end)
        outs.append(layer.rows(start, end).prefill(state_SX, [Prompt(start, end, i, i + 1, step_cuts)]))
        start = end
    state_X, position = torch.zeros_like(state_SX[0]), 0
    for stop in sorted({*cuts, *bounds}):
        _, state_X = layer.rows(position, stop).token_by_token(state_X)
        for slot in {slot_of_cut.get(stop, 0), bounds.index(stop) + 1 if stop in bounds else 0} - {0}:
            torch.testing.assert_close(state_SX[slot], state_X, **FLOAT32)
        position = stop
    expected_T, _ = layer.token_by_token(torch.zeros_like(state_X))
    torch.testing.assert_close(torch.cat(outs), expected_T, **FLOAT32)


def test_nan_in_the_tokens_of_one_sequence_stays_there(kind: Kind) -> None:
    layer = make_layer(kind, 40)
    for tokens in layer.tokens:
        tokens[10:25] = torch.nan
    out_T = layer.prefill(make_slots(kind), [Prompt(0, 10, 0, 1), Prompt(0, 15, 0, 2), Prompt(0, 15, 0, 3)])
    assert out_T[:10].isfinite().all()
    assert out_T[10:25].isnan().all()
    assert out_T[25:].isfinite().all()
