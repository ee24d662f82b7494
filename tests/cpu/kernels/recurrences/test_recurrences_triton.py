"""Triton versions of recurrences without logs against torch's: outputs, and every slot that is written or is not.

A further recurrence joins by one row of ``KINDS``; Gated DeltaNet has files of its own. The ``check_`` functions run on
any device: tests/gpu runs them at the shapes of published models.

Shape suffixes: N sequences, S slots, X the dimensions of one state; T tokens of whatever follows.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from strandline.kernels.batch import Slots
from strandline.kernels.chunk_table import Chunks, build_chunk_table, plan_chunks
from strandline.kernels.operation import Launches, Operation
from tests.cpu.kernels.recurrences import test_chunkwise
from tests.cpu.kernels.recurrences.test_chunkwise import Kind, Prompt, decay_rates
from tests.poison import poisoned_memory

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

FLOAT32_ERROR = 2e-5
"""``|out - ref| / |ref|``: both sum float32 in their own order, and a GPU multiplies with 21 bits."""

BFLOAT16_ERROR = 1.5e-2
"""Operands of every product are rounded to 8 bits (the interpreter cuts them off), sums are float32."""

NUM_SLOTS = 24

KINDS = {
    "mamba2": replace(
        test_chunkwise.KINDS["mamba2"],
        tokens=((4, 12), (2, 16), (2, 16), (4,)),
        parameters=lambda: (decay_rates(4), torch.randn(4), torch.randn(4), (0.01, torch.inf)),
        state=(4, 16, 12),
    ),
    "mamba2-odd": replace(
        test_chunkwise.KINDS["mamba2"],
        tokens=((3, 7), (1, 5), (1, 5), (3,)),
        parameters=lambda: (decay_rates(3), torch.randn(3), torch.randn(3), (0.0, 0.7), 1.7),
        state=(3, 5, 7),
    ),
    "mamba2-wide": replace(
        test_chunkwise.KINDS["mamba2"],
        tokens=((1, 80), (1, 24), (1, 24), (1,)),
        parameters=lambda: (decay_rates(1), torch.randn(1), torch.randn(1), (0.01, torch.inf)),
        state=(1, 24, 80),
    ),
    "kda": replace(
        test_chunkwise.KINDS["kda"],
        tokens=((2, 16), (2, 16), (2, 24), (2, 16), (2,)),
        parameters=lambda: (decay_rates(2), torch.randn(2, 16), -5.0),
        state=(2, 16, 24),
    ),
    "kda-odd": replace(
        test_chunkwise.KINDS["kda"],
        tokens=((1, 5), (1, 5), (1, 7), (1, 5), (1,)),
        parameters=lambda: (decay_rates(1), torch.randn(1, 5), None),
        state=(1, 5, 7),
    ),
    "lightning": replace(
        test_chunkwise.KINDS["lightning"],
        tokens=((2, 16), (2, 16), (2, 20)),
        parameters=lambda: (-torch.empty(2).uniform_(0.1, 2),),
        state=(2, 16, 20),
    ),
    "rglru": test_chunkwise.KINDS["rglru"],
    "mamba1": test_chunkwise.KINDS["mamba1"],
}

DTYPES = [
    pytest.param(torch.float32, FLOAT32_ERROR, id="float32"),
    pytest.param(torch.bfloat16, BFLOAT16_ERROR, id="bfloat16", marks=pytest.mark.long),
]

GATES = [-200.0, 20.0, 3e4, torch.inf]

LOG2_DECAYS = [0.01, 1.0, 4.0, 20.0]
"""Per token, in Kimi Delta Attention. Products are of all pairs; for the third, of blocks; for the last, of halves."""


@pytest.fixture(autouse=True)
def _few_rows_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load few tokens ahead of a walk: the interpreter takes long for those past a chunk's end."""
    for name in ("mamba1_prefill", "rglru"):
        module = import_module(f"strandline.kernels.recurrences.{name}_triton")
        monkeypatch.setattr(module, "LAUNCH", module.LAUNCH._replace(rows=3))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def version(operation: Operation[..., Tensor], launches: Launches = Launches.MEASURED) -> Any:
    """Return the Triton function of an operation, with these launches where it takes any."""
    (backend,) = (x for x in operation.backends if x.name == "Triton")
    function = getattr(import_module(f"strandline.kernels.{backend.module}"), operation.name)
    return partial(function, launches=launches) if backend.takes_launches else function


@dataclass(frozen=True)
class Layer:
    """The inputs of some tokens, and the parameters."""

    kind: Kind
    tokens: tuple[Tensor, ...]
    parameters: tuple[Any, ...]

    @property
    def inputs(self) -> Any:
        """Return what operations take first."""
        return self.kind.inputs(*self.tokens, *self.parameters)

    def rows(self, start: int, end: int) -> "Layer":
        return replace(self, tokens=tuple(x[start:end] for x in self.tokens))

    def exact(self) -> "Layer":
        """Return it in float32 on the CPU."""
        parameters = (x.cpu() if isinstance(x, Tensor) else x for x in self.parameters)
        return replace(self, tokens=tuple(x.float().cpu() for x in self.tokens), parameters=tuple(parameters))


def make_layer(kind: Kind, num_tokens: int, dtype: torch.dtype, device: str) -> Layer:
    """Return random inputs as views of one wide tensor's rows, with NaN around them."""
    sizes = [torch.Size(shape).numel() for shape in kind.tokens]
    fused_TX = torch.full((num_tokens + 1, 16 + sum(sizes) + 16), torch.nan, device=device)
    fused_TX[:num_tokens, 16 : 16 + sum(sizes)] = torch.randn(num_tokens, sum(sizes))
    parts = fused_TX.to(dtype)[:num_tokens, 16 : 16 + sum(sizes)].split(sizes, dim=1)
    tokens = (x.unflatten(1, shape) for x, shape in zip(parts, kind.tokens, strict=True))
    parameters = (x.to(device) if isinstance(x, Tensor) else x for x in kind.parameters())
    return Layer(kind, tuple(tokens), tuple(parameters))


def make_slots(
    kind: Kind, filled: Sequence[int], device: str, dtype: torch.dtype = torch.float32, num_slots: int = NUM_SLOTS
) -> Tensor:
    """Return the strided view of one layer's states: NaN everywhere but in the filled slots."""
    size = torch.Size(kind.state).numel()
    arena_SX = torch.full((num_slots, size + 7 * 64), torch.nan, device=device, dtype=dtype)
    state_SX: Tensor = arena_SX[:, 64 : 64 + size].unflatten(1, kind.state)
    for slot in filled:
        state_SX[slot] = torch.randn(kind.state)
    return state_SX


def error(found: Tensor, expected: Tensor) -> float:
    """Return ``|found - expected| / |expected|``, NaN where either has one."""
    difference = found.cpu().double() - expected.cpu().double()
    return float(difference.norm() / expected.double().norm().clamp_min(1e-30))


def check_slots(found_SX: Tensor, expected_SX: Tensor, before_SX: Tensor, limit: float) -> None:
    """Assert the slots that were written, and that no other has changed a bit."""
    for slot, (found_X, expected_X, before_X) in enumerate(zip(found_SX, expected_SX, before_SX, strict=True)):
        if torch.equal(expected_X.nan_to_num(99.0), before_X.nan_to_num(99.0)):
            assert torch.equal(found_X.nan_to_num(99.0), before_X.nan_to_num(99.0)), slot
        else:
            assert error(found_X, expected_X) <= limit, slot


def slots_of(prompts: Sequence[Prompt], device: str) -> Slots:
    return Slots(*(torch.tensor([getattr(p, name) for p in prompts], device=device) for name in ("src", "dst")))


def check_prefill(layer: Layer, state_SX: Tensor, prompts: Sequence[Prompt], limit: float) -> None:
    """Assert outputs and slots of a step of prompts."""
    device, exact = state_SX.device.type, layer.exact()
    before_SX = state_SX.cpu().clone()
    expected_SX = before_SX.to(torch.float32, copy=True)
    table = ([(p.start, p.end) for p in prompts], [p.cuts for p in prompts])
    host = (slots_of(prompts, "cpu"), build_chunk_table(*table))
    expected_T = layer.kind.prefill.reference(exact.inputs, expected_SX, *host)
    slots = slots_of(prompts, device)
    with poisoned_memory():
        prefill = version(layer.kind.prefill)
        out_T = prefill(layer.inputs, state_SX, slots, build_chunk_table(*table, device))
    assert out_T.dtype == layer.tokens[0].dtype
    assert error(out_T, expected_T) <= limit
    check_slots(state_SX.cpu(), expected_SX.to(state_SX.dtype), before_SX, limit)


def check_lengths(kind: Kind, device: str, dtype: torch.dtype, limit: float) -> None:
    for num_tokens in (1, 63, 65, 130):
        prompts = [Prompt(37, 37 + num_tokens, 2, 1, ((37 + (num_tokens + 1) // 2, 3),))]
        check_prefill(make_layer(kind, num_tokens, dtype, device), make_slots(kind, [2], device), prompts, limit)


def check_mixed_batch(kind: Kind, device: str, dtype: torch.dtype, limit: float) -> None:
    prompts = [
        Prompt(37, 38, src=1, dst=1),
        Prompt(0, 130, src=0, dst=2, cuts=((1, 3), (64, 4), (65, 5), (130, 6))),
        Prompt(64, 67, src=7, dst=8, cuts=((66, 9),)),
        Prompt(63, 90, src=7, dst=0),
        Prompt(5, 69, src=7, dst=11, cuts=((64, 12), (68, 13))),
        Prompt(0, 1, src=0, dst=14, cuts=((1, 15),)),
    ]
    layer = make_layer(kind, sum(p.end - p.start for p in prompts), dtype, device)
    check_prefill(layer, make_slots(kind, [1, 7], device), prompts, limit)


def check_steps_on_the_grid(kind: Kind, device: str, dtype: torch.dtype) -> None:
    """Assert that a prompt in two steps, or beside another one, has the same bits as at once."""
    layer, state_SX = make_layer(kind, 230, dtype, device), make_slots(kind, [], device)
    prefill = version(kind.prefill, Launches.FIXED)

    def run(layer: Layer, *prompts: Prompt) -> Tensor:
        table = build_chunk_table([(p.start, p.end) for p in prompts], [p.cuts for p in prompts], device)
        out_T: Tensor = prefill(layer.inputs, state_SX, slots_of(prompts, device), table)
        return out_T

    whole_T = run(layer.rows(0, 150), Prompt(0, 150, 0, 1, ((64, 2),)))
    assert torch.equal(run(layer.rows(64, 150), Prompt(64, 150, 2, 3)), whole_T[64:])
    assert torch.equal(state_SX[3], state_SX[1])
    assert torch.equal(run(layer, Prompt(0, 150, 0, 4), Prompt(0, 80, 0, 5))[:150], whole_T)
    assert torch.equal(state_SX[4], state_SX[1])


@contextmanager
def short_segments() -> Iterator[None]:
    """Divide sequences into segments of one chunk, where they are divided at all."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("head_decay", "mamba1_prefill", "rglru"):
            module = import_module(f"strandline.kernels.recurrences.{name}_triton")
            patch.setattr(module, "DIVISION", module.DIVISION._replace(min_chunks=1))
        delta_rule = import_module("strandline.kernels.recurrences.delta_rule_triton")
        patch.setattr(delta_rule, "DIVISION", delta_rule.DIVISION._replace(wanted_programs=10**6, min_chunks=1))
        yield


def check_segments(kind: Kind, device: str, dtype: torch.dtype, limit: float) -> None:
    """Assert a prompt in place, in as many segments as it has chunks, and several sequences in two each."""
    with short_segments():
        prompt = Prompt(37, 300, src=2, dst=2, cuts=((200, 3), (256, 4)))
        check_prefill(make_layer(kind, 263, dtype, device), make_slots(kind, [2], device), [prompt], limit)
        check_mixed_batch(kind, device, dtype, limit)


def check_empty_chunks(kind: Kind, device: str, dtype: torch.dtype) -> None:
    """Assert that an empty chunk at the end of sequences changes no bit, whatever lies in scratch memory."""
    prompts = [Prompt(3, 10, 1, 1), Prompt(0, 70, 0, 2, ((64, 3),)), Prompt(64, 65, 7, 4)]
    layer, ends = make_layer(kind, 78, dtype, device), (7, 77, 78)
    plain = plan_chunks([(p.start, p.end) for p in prompts], [p.cuts for p in prompts])
    columns = [list[int](), list[int](), list[int]()]
    for first, last, end in zip(plain.first_chunks, plain.first_chunks[1:], ends, strict=False):
        for column, values, empty in zip(columns, plain.columns[1:], (end, 0, 0), strict=True):
            column += [*values[first:last], empty]
    starts, lengths, cuts = map(tuple, columns)
    padded = Chunks(tuple(first + n for n, first in enumerate(plain.first_chunks)), starts, lengths, cuts)
    state_SX = make_slots(kind, [1, 7], device)
    results = []
    for chunks in (plain, padded):
        own_SX = make_slots(kind, [], device)
        own_SX.copy_(state_SX)
        table = chunks.with_tensors([torch.tensor(column, device=device) for column in chunks.columns])
        with poisoned_memory():
            prefill = version(kind.prefill, Launches.FIXED)
            out_T = prefill(layer.inputs, own_SX, slots_of(prompts, device), table)
        results.append((out_T, own_SX.nan_to_num(99.0)))
    (out_T, found_SX), (padded_T, padded_SX) = results
    assert torch.equal(padded_T, out_T)
    assert torch.equal(padded_SX, found_SX)


def check_nan_stays(kind: Kind, device: str) -> None:
    layer, state_SX = make_layer(kind, 40, torch.float32, device), make_slots(kind, [4, 5], device)
    for tokens in layer.tokens:
        tokens[10:25] = torch.nan
    prompts = [Prompt(0, 10, 4, 1), Prompt(0, 15, 0, 2), Prompt(0, 15, 5, 3)]
    table = build_chunk_table([(p.start, p.end) for p in prompts], [()] * 3, device)
    slots = slots_of(prompts, device)
    out_T = version(kind.prefill)(layer.inputs, state_SX, slots, table)
    assert out_T[[*range(10), *range(25, 40)]].isfinite().all()
    assert out_T[10:25].isnan().all()
    assert state_SX[[1, 3]].isfinite().all()
    layer = layer.rows(9, 11)
    out_N = version(kind.decode)(layer.inputs, state_SX, Slots(*(x[[0, 2]] for x in slots)))
    assert out_N[0].isfinite().all()
    assert out_N[1].isnan().all()


def check_gate(kind: Kind, gate: float, device: str) -> None:
    """Assert that the tokens after a strong decay keep their weak ones; the fourth input makes the decays."""
    layer, state_SX = make_layer(kind, 150, torch.float32, device), make_slots(kind, [1], device)
    layer.tokens[3][::7] = gate
    check_prefill(layer, state_SX, [Prompt(5, 155, 1, 2, ((70, 3),))], FLOAT32_ERROR)
    layer = layer.rows(6, 8)
    slots = Slots(torch.tensor([1, 1], device=device), torch.tensor([4, 5], device=device))
    out_N = version(kind.decode)(layer.inputs, state_SX, slots)
    assert out_N.isfinite().all()
    assert state_SX[4:6].isfinite().all()


def check_steady_decay(kind: Kind, log2_decay: float, device: str, dtype: torch.dtype, limit: float) -> None:
    """Assert a prefill of Kimi Delta Attention in which every token decays about as much: some terms cancel."""
    layer = make_layer(kind, 150, dtype, device)
    A_log_H, dt_bias_HK, _ = layer.parameters
    A_log_H.zero_()
    dt_bias_HK.zero_()
    layer.tokens[3].mul_(0.01).add_(math.log(math.expm1(log2_decay * math.log(2))))
    prompts = [Prompt(5, 155, 1, 2, ((70, 3),))]
    check_prefill(layer, make_slots(kind, [1], device), prompts, 2 * limit)


def check_decode(
    kind: Kind,
    src: Sequence[int],
    dst: Sequence[int],
    device: str,
    dtype: torch.dtype,
    state_dtype: torch.dtype = torch.float32,
) -> None:
    """Assert outputs and slots of one token per sequence: but for roundings at the end, everything is float32."""
    layer = make_layer(kind, len(src), dtype, device)
    state_SX = make_slots(kind, sorted({*src} - {0}), device, state_dtype, max(*src, *dst) + 2)
    before_SX, exact = state_SX.cpu().clone(), layer.exact()
    expected_SX = before_SX.to(torch.float32, copy=True)
    slots = Slots(torch.tensor(src), torch.tensor(dst))
    expected_N = kind.decode.reference(exact.inputs, expected_SX, slots)
    with poisoned_memory():
        out_N = version(kind.decode)(layer.inputs, state_SX, Slots(*(x.to(device) for x in slots)))
    assert out_N.dtype == dtype
    assert error(out_N, expected_N) <= (FLOAT32_ERROR if dtype == torch.float32 else 8e-3)
    limit = FLOAT32_ERROR if state_dtype == torch.float32 else 8e-3
    check_slots(state_SX.cpu(), expected_SX.to(state_dtype), before_SX, limit)


def check_batch_changes_no_bit(kind: Kind, device: str, num_sequences: int) -> None:
    layer = make_layer(kind, num_sequences, torch.float32, device)
    slots_N = torch.arange(1, num_sequences + 1, device=device)
    batch_SX = make_slots(kind, slots_N.tolist(), device, num_slots=num_sequences + 1)
    alone_SX, decode = batch_SX.clone(), version(kind.decode, Launches.FIXED)
    out_N = decode(layer.inputs, batch_SX, Slots(slots_N, slots_N))
    for i in {0, num_sequences // 2, num_sequences - 1}:
        alone_N = decode(layer.rows(i, i + 1).inputs, alone_SX, Slots(*[slots_N[i : i + 1]] * 2))
        assert torch.equal(alone_N[0], out_N[i])
        assert torch.equal(alone_SX[i + 1], batch_SX[i + 1])


def test_prefill_equals_torchs_at_any_length(kind: Kind) -> None:
    check_lengths(kind, "cpu", torch.float32, FLOAT32_ERROR)


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
def test_a_mixed_batch_treats_each_sequence_alone(kind: Kind, dtype: torch.dtype, limit: float) -> None:
    check_mixed_batch(kind, "cpu", dtype, limit)


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_states_of_smaller_dtypes_are_rounded_where_stored(kind: Kind, state_dtype: torch.dtype) -> None:
    layer, state_SX = make_layer(kind, 81, torch.float32, "cpu"), make_slots(kind, [2], "cpu", state_dtype)
    check_prefill(layer, state_SX, [Prompt(37, 118, 2, 1, ((100, 3),))], torch.finfo(state_dtype).eps)


def test_prompt_in_steps_on_the_grid_is_bitwise_equal(kind: Kind) -> None:
    with short_segments():
        check_steps_on_the_grid(kind, "cpu", torch.float32)


def test_an_empty_chunk_at_the_end_changes_no_bit(kind: Kind) -> None:
    check_empty_chunks(kind, "cpu", torch.float32)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_nan_in_the_tokens_of_one_sequence_stays_there(kind: Kind) -> None:
    check_nan_stays(kind, "cpu")


def test_sequences_in_segments_equal_torchs(kind: Kind) -> None:
    check_segments(kind, "cpu", torch.float32, FLOAT32_ERROR)


def test_a_deterministic_prefill_chooses_no_launch_by_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        pytest.fail("a launch was chosen")

    monkeypatch.setattr("strandline.kernels.recurrences.kda_triton.choose_launch", fail)
    check_steps_on_the_grid(KINDS["kda"], "cpu", torch.float32)


@pytest.mark.parametrize(
    ("num_programs", "num_sequences", "num_chunks", "expected"),
    [(64, 1, 128, 8), (64, 1, 31, 3), (128, 2, 128, 4), (512, 8, 1024, 1), (4, 1, 10_000, 16), (1, 0, 0, 1)],
)
def test_few_long_sequences_are_divided(num_programs: int, num_sequences: int, num_chunks: int, expected: int) -> None:
    division = import_module("strandline.kernels.recurrences.head_decay_triton").DIVISION
    divide = import_module("strandline.kernels.recurrences.segments_triton").divide
    assert divide(division, num_programs, num_sequences, num_chunks) == expected
    assert divide(division, num_programs, num_sequences, num_chunks, Launches.FIXED) == 1


@pytest.mark.parametrize("log2_decay", LOG2_DECAYS)
@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
def test_prefill_where_decays_are_steady(log2_decay: float, dtype: torch.dtype, limit: float) -> None:
    check_steady_decay(KINDS["kda-odd"], log2_decay, "cpu", dtype, limit)


# NumPy, which the interpreter runs on, says so where a GPU is silent; the results are what the test is about.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("name", ["mamba2-odd", "kda-odd"])
def test_extreme_gates_neither_overflow_nor_lose_weak_ones(name: str, gate: float) -> None:
    check_gate(KINDS[name], gate, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decode_in_place_from_shared_slots_and_padded(kind: Kind, dtype: torch.dtype) -> None:
    check_decode(kind, [1, 2, 3], [1, 2, 3], "cpu", dtype)
    check_decode(kind, [1, 0, 1, 2, 0], [3, 4, 5, 0, 0], "cpu", dtype)
    check_decode(kind, range(1, 10), range(1, 10), "cpu", dtype)


def test_decoded_states_of_bfloat16_are_rounded_once(kind: Kind) -> None:
    check_decode(kind, [1, 2, 0], [1, 3, 4], "cpu", torch.bfloat16, torch.bfloat16)


def test_deterministic_decode_does_not_depend_on_batch(kind: Kind) -> None:
    check_batch_changes_no_bit(kind, "cpu", 10)
