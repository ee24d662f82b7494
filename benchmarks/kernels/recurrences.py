"""Recurrences and convolutions at the shapes of published models: decode steps and prefills.

Every slot of a decode is read and written in place; several layers' states take turns. Prompts are equal. Their cuts,
which save states on the way, are 5 tokens past a chunk's end or, on the grid, at one, where they add no chunk. Inputs
are parts of the rows of one tensor, as projections leave them.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch
from case import Call, Launch, Work, bound, case, parse_launches, random, turns
from torch import Tensor

from strandline.kernels.batch import Slots
from strandline.kernels.chunk_table import CHUNK_TOKENS, ChunkTable, build_chunk_table
from strandline.kernels.operation import Operation
from strandline.kernels.recurrences import (
    delta_rule_triton,
    gdn_prefill_triton,
    head_decay_triton,
    mamba1_prefill_triton,
    rglru_triton,
)
from strandline.kernels.recurrences.conv1d import Convolution, causal_conv1d_prefill, causal_conv1d_update
from strandline.kernels.recurrences.decode_launches import DecodeLaunch
from strandline.kernels.recurrences.gdn import GatedDeltaInputs, gdn_decode, gdn_prefill
from strandline.kernels.recurrences.kda import KimiDeltaInputs, kda_decode, kda_prefill
from strandline.kernels.recurrences.lightning import LightningInputs, lightning_decode, lightning_prefill
from strandline.kernels.recurrences.mamba1 import Mamba1Inputs, mamba1_decode, mamba1_prefill
from strandline.kernels.recurrences.mamba2 import Mamba2Inputs, mamba2_decode, mamba2_prefill
from strandline.kernels.recurrences.rglru import GatedUnitInputs, rglru_decode, rglru_prefill
from strandline.kernels.recurrences.segments_triton import Division
from strandline.kernels.sizes import NUM_SMS

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPTS = {
    **{f"{tokens}x1": (tokens, 1, 0, 0) for tokens in (128, 512, 2048, 8192, 65536)},
    **{f"{tokens}x{n}": (tokens, n, 0, 0) for tokens, n in ((2048, 16), (8192, 2), (8192, 8), (16384, 4), (32768, 4))},
    "65536x8": (65536, 8, 0, 0),
    "8192x1-8-cuts": (8192, 1, 8, 5),
    "8192x1-8-cuts-on-grid": (8192, 1, 8, 0),
    "8192x8-8-cuts": (8192, 8, 1, 5),
    "8192x8-8-cuts-on-grid": (8192, 8, 1, 0),
}
"""Tokens of all sequences together, sequences, cuts of each, tokens of a cut past a chunk's end."""
MAX_CHECKED_TOKENS = 16384
"""Reference implementations of more take longer than all that is measured."""

Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Kind:
    """A recurrence at the shape of a model."""

    prefill: Operation[..., Any]
    decode: Operation[..., Any]
    record: Callable[..., Any]
    """Makes the operations' inputs of a token's inputs and the parameters."""
    tokens: tuple[tuple[int, ...], ...]
    """Shapes of a token's inputs."""
    parameters: Callable[[], Inputs]
    state: tuple[int, ...]
    chunk_flops: int = 0
    """Operations of the matrix products of a chunk."""
    decode_launches: Callable[[], Iterable[Launch]] = tuple
    prefill_launches: Callable[[], Iterable[Launch]] = tuple
    state_dtype: torch.dtype = torch.float32
    is_convolution: bool = False
    """Whether only the first input of a token takes part, before a weight and no bias."""

    @property
    def state_bytes(self) -> int:
        return prod(self.state) * self.state_dtype.itemsize

    @property
    def token_sizes(self) -> list[int]:
        return [prod(shape) for shape in self.tokens]

    def inputs(self, num_tokens: int) -> Any:
        """Return random inputs and parameters."""
        parts = random(num_tokens, sum(self.token_sizes)).split(self.token_sizes, dim=1)
        tokens = (x.unflatten(1, shape) for x, shape in zip(parts, self.tokens, strict=True))
        return self.record(*tokens, *self.parameters())

    def states(self, num_slots: int, num_layers: int) -> Tensor:
        """Return slots of several layers' random states, and the null slot before them."""
        return random(num_slots + 1, num_layers, *self.state, dtype=self.state_dtype)

    def call(self, function: Call) -> Call:
        """Return a function of inputs, states, slots and chunks."""
        return partial(_convolve, function) if self.is_convolution else function

    def bound(self, operation: Operation[..., Any], *, is_deterministic: bool = False) -> Call:
        return self.call(bound(operation, is_deterministic=is_deterministic))


def _convolve(function: Call, inputs: Inputs, window: Tensor, slots: Slots, *chunks: ChunkTable) -> Any:
    x, _, weight = inputs
    return function(x, Convolution(weight), window, slots, *chunks)


def decay_rates(num_heads: int, largest: float = 16) -> Tensor:
    return torch.empty(num_heads).uniform_(0.001, largest).log()


def per_head(*shape: int) -> Tensor:
    return torch.randn(shape)


def linear_flops(num_heads: int, num_groups: int, key_dim: int, value_dim: int) -> int:
    """Return the operations of a chunk: scores per group; per head, two with the state and one with the scores."""
    rows = CHUNK_TOKENS
    return 2 * rows * (num_groups * rows * key_dim + num_heads * (2 * key_dim + rows) * value_dim)


def constants(*names: str, values: Iterable[Any]) -> Iterator[Launch]:
    """Yield values of constants of ``kernels.recurrences`` that are one and the same."""
    for value in values:
        yield Launch(f"{names[0].partition('.')[2]} {value}", {f"recurrences.{name}": value for name in names})


DECODE_TILES = "8,1 16,1 16,2 32,1 32,2 32,4 64,2 64,4 64,8"


def decodes(module: str, tiles: str = DECODE_TILES) -> Iterator[Launch]:
    return constants(f"{module}.choose_decode", values=parse_launches(DecodeLaunch, tiles))


def head_decay_prefills(name: str) -> Iterator[Launch]:
    tiles = parse_launches(head_decay_triton.Launch, "64,4,1 64,4,2 64,4,3 64,8,2 64,8,3 128,8,2 128,8,3")
    yield from constants(f"head_decay_triton.{name}", values=tiles)
    yield from divisions("head_decay_triton", head_decay_triton.DIVISION, 2, 4, 8)


def kda_prefills() -> Iterator[Launch]:
    yield from constants("kda_triton.PREPARE_WARPS", values=(4, 8))
    yield from constants("kda_triton.SLICE", values=(32, 64))
    yield from constants("kda_triton.PREPARE_REGISTERS", values=(128, 168, None))


def divisions(module: str, division: Division, *per_sm: int) -> Iterator[Launch]:
    """Yield other divisions into segments, and none, that want so many programs per multiprocessor."""
    wanted = (division._replace(wanted_programs=count * NUM_SMS) for count in per_sm)
    yield from constants(f"{module}.DIVISION", values=(division._replace(max_segments=1), *wanted))


def rglru_prefills() -> Iterator[Launch]:
    tiles = parse_launches(rglru_triton.Launch, "32,1,8 64,1,8 64,2,8 64,2,16 64,2,32 128,2,4 128,2,8 128,4,16")
    yield from constants("rglru_triton.LAUNCH", values=tiles)
    yield from divisions("rglru_triton", rglru_triton.DIVISION, 6, 12, 24, 32)


def mamba1_prefills() -> Iterator[Launch]:
    tiles = parse_launches(mamba1_prefill_triton.Launch, "1,2 1,4 1,8 2,2 2,4 4,2 4,4")
    yield from constants("mamba1_prefill_triton.LAUNCH", values=tiles)
    yield from divisions("mamba1_prefill_triton", mamba1_prefill_triton.DIVISION, 4, 8, 12, 16, 24)
    yield from constants("mamba1_prefill_triton.WIDENED_TOKENS", values=(0, 1 << 30))


def gdn_prefills() -> Iterator[Launch]:
    """Yield registers of the first kernel; columns, stages and segments of the second, and stages without outputs."""
    yield from constants("gdn_prefill_triton.PREPARE_REGISTERS", values=(None, 168, 128))
    launches = product((64, 128), (2, 3), (1, 2, 3, 4, 5, 6, 8), (2, 3))
    for columns, stages, segments, partial_stages in launches:
        launch = delta_rule_triton.Advance(columns, columns // 16, stages, segments)
        values = {"gdn_prefill_triton.choose_launch": launch, "delta_rule_triton.PARTIAL_STAGES": partial_stages}
        named = {f"recurrences.{name}": value for name, value in values.items()}
        yield Launch(f"{tuple(launch)}, {partial_stages} without outputs", named)


def conv_prefills() -> Iterator[Launch]:
    names = ("BLOCK_T", "BLOCK_C", "NUM_WARPS")
    for tokens, channels, warps in ((t, c, w) for t in (4, 8, 16, 32) for c in (4, 8, 16) for w in (1, 2, 4)):
        if tokens * channels <= 256:
            values = dict(zip(names, (tokens, channels * 32 * warps, warps), strict=True))
            yield Launch(str(tuple(values.values())), {f"recurrences.conv1d_triton.{n}": v for n, v in values.items()})


def conv_updates() -> Iterator[Launch]:
    for n, c, warps in ((n, c, w) for n in (1, 2, 4, 8) for c in (64, 128, 256, 512, 1024, 2048) for w in (1, 2, 4, 8)):
        if 128 <= n * c // warps * 4 <= 8192:
            values = {"UPDATE_LAUNCHES": (), "UPDATE_LARGEST": (n, c, warps)}
            yield Launch(f"{n, c, warps}", {f"recurrences.conv1d_triton.{name}": v for name, v in values.items()})


def gdn(num_heads: int, head_dim: int = 128, state_dtype: torch.dtype = torch.float32) -> Kind:
    """Return Qwen3.5's recurrence, whose value heads are twice as many as its key heads."""
    keys, rows = num_heads // 2, CHUNK_TOKENS
    flops_of_head = 2 * rows * (3 * head_dim**2 + 2 * rows * head_dim + rows**2)
    return Kind(
        gdn_prefill,
        gdn_decode,
        GatedDeltaInputs,
        ((keys, head_dim), (keys, head_dim), (num_heads, head_dim), (num_heads,), (num_heads,)),
        lambda: (decay_rates(num_heads, 4), per_head(num_heads)),
        (num_heads, head_dim, head_dim),
        num_heads * flops_of_head + keys * 4 * rows * rows * head_dim,
        partial(decodes, "gdn_decode_triton", f"{DECODE_TILES} 64,1 128,2 128,4 128,8"),
        gdn_prefills,
        state_dtype,
    )


def mamba2(num_heads: int, head_dim: int, num_groups: int, state_dim: int) -> Kind:
    group = (num_groups, state_dim)
    return Kind(
        mamba2_prefill,
        mamba2_decode,
        Mamba2Inputs,
        ((num_heads, head_dim), group, group, (num_heads,)),
        lambda: (decay_rates(num_heads), per_head(num_heads), per_head(num_heads), (0.0, torch.inf)),
        (num_heads, state_dim, head_dim),
        linear_flops(num_heads, num_groups, state_dim, head_dim),
        partial(decodes, "head_decay_triton"),
        partial(head_decay_prefills, "NARROW"),
    )


def kda(num_heads: int, head_dim: int = 128) -> Kind:
    heads, rows = (num_heads, head_dim), CHUNK_TOKENS
    return Kind(
        kda_prefill,
        kda_decode,
        KimiDeltaInputs,
        (heads, heads, heads, heads, (num_heads,)),
        lambda: (decay_rates(num_heads), per_head(*heads) - 4.0, None),  # decays as moderate as published models' are
        (num_heads, head_dim, head_dim),
        num_heads * 2 * rows * (3 * head_dim**2 + 4 * rows * head_dim + rows**2),
        partial(decodes, "kda_triton"),
        kda_prefills,
    )


def lightning(num_heads: int, head_dim: int = 128) -> Kind:
    return Kind(
        lightning_prefill,
        lightning_decode,
        LightningInputs,
        ((num_heads, head_dim),) * 3,
        lambda: (-torch.rand(num_heads),),
        (num_heads, head_dim, head_dim),
        linear_flops(num_heads, num_heads, head_dim, head_dim),
        prefill_launches=partial(head_decay_prefills, "WIDE"),
    )


def rglru(width: int) -> Kind:
    tokens, parameters = ((width,), (width,), (width,), (1,)), lambda: (per_head(width),)
    operations = (rglru_prefill, rglru_decode, GatedUnitInputs)
    return Kind(*operations, tokens, parameters, (width,), prefill_launches=rglru_prefills)


def mamba1(width: int, state_dim: int = 16) -> Kind:
    return Kind(
        mamba1_prefill,
        mamba1_decode,
        Mamba1Inputs,
        ((width,), (width,), (state_dim,), (state_dim,), (width,)),
        lambda: (per_head(width), per_head(width), per_head(width, state_dim)),
        (width, state_dim),
        0,
        partial(decodes, "mamba1_triton", f"{DECODE_TILES} 128,4 128,8"),
        mamba1_prefills,
    )


def convolution(channels: int, num_others: int) -> Kind:
    """Return a short convolution, between other columns of the fused projection."""
    return Kind(
        causal_conv1d_prefill,
        causal_conv1d_update,
        lambda *inputs: inputs,
        ((channels,), (num_others,)),
        lambda: (random(channels, 4),),
        (3, channels),
        0,
        conv_updates,
        conv_prefills,
        torch.bfloat16,
        is_convolution=True,
    )


KINDS = {
    "gdn": gdn(32),  # Qwen3.5-35B-A3B
    "gdn-of-2-ranks": gdn(16),
    "gdn-bfloat16-states": gdn(32, state_dtype=torch.bfloat16),
    "mamba2": mamba2(64, 64, 8, 128),  # Nemotron-3-Nano-30B-A3B
    "mamba2-of-256": mamba2(24, 128, 1, 256),  # Falcon-H1-7B
    "kda": kda(32),  # Kimi-Linear-48B-A3B
    "lightning": lightning(64),  # MiniMax-Text-01
    "rglru": rglru(4096),  # RecurrentGemma-9B
    "mamba1": mamba1(8192),  # Falcon-Mamba-7B
    "convolution": convolution(8192, 4160),  # Qwen3.5-35B-A3B
}
TINY_KINDS = {
    "gdn": gdn(2, 16),
    "gdn-of-2-ranks": gdn(2, 16),
    "gdn-bfloat16-states": gdn(2, 16, torch.bfloat16),
    "mamba2": mamba2(2, 16, 1, 16),
    "mamba2-of-256": mamba2(2, 16, 1, 32),
    "kda": kda(1, 16),
    "lightning": lightning(1, 16),
    "rglru": rglru(32),
    "mamba1": mamba1(32),
    "convolution": convolution(32, 16),
}


def decode(kind: Kind, batch: int) -> Work:
    """Return the decode steps of several layers."""
    num_layers = turns(batch * kind.state_bytes, at_least=4, at_most=30)
    state_SLX, slots = kind.states(batch, num_layers), torch.randperm(batch) + 1
    return Work(
        _variants(kind, kind.decode),
        [(kind.inputs(batch), state_SLX[:, layer], Slots(slots, slots)) for layer in range(num_layers)],
        num_bytes=2.0 * batch * (kind.state_bytes + (2 * 8192 if kind.is_convolution else 0)),
        reference=kind.call(kind.decode.reference),
        limit=2e-2,
        memory=lambda *arguments: [arguments[1][1:]],
        launches=kind.decode_launches,
    )


def _variants(kind: Kind, operation: Operation[..., Any]) -> dict[str, Call]:
    ordinary, deterministic = bound(operation), bound(operation, is_deterministic=True)
    found = {"strandline": kind.call(ordinary)}
    return found if deterministic is ordinary else {**found, "deterministic": kind.call(deterministic)}


def table_of(num_tokens: int, num_sequences: int, num_cuts: int = 0, past_grid: int = 0) -> ChunkTable:
    """Return equal prompts, each with cuts so many tokens past a chunk's end."""
    length = num_tokens // num_sequences
    positions = [length * (i + 1) // (num_cuts + 1) // CHUNK_TOKENS * CHUNK_TOKENS + past_grid for i in range(num_cuts)]
    first_slot = 2 * num_sequences + 1
    cuts = [[(p, first_slot + n * num_cuts + i) for i, p in enumerate(positions)] for n in range(num_sequences)]
    return build_chunk_table([(0, length)] * num_sequences, cuts, torch.get_default_device())


def prefill(kind: Kind, prompt: tuple[int, int, int, int]) -> Work:
    """Return the prefills of several layers, each sequence from one slot to another."""
    num_tokens, num_sequences, num_cuts, _ = prompt
    table = table_of(*prompt)
    num_slots = (2 + num_cuts) * num_sequences
    # A convolution reads and writes its own channels only.
    features = [2 * kind.token_sizes[0]] if kind.is_convolution else [*kind.token_sizes, max(kind.token_sizes)]
    num_bytes = 2.0 * num_tokens * sum(features) + num_slots * kind.state_bytes
    num_layers = turns(num_bytes, at_most=16)
    state_SLX, slots = kind.states(num_slots, num_layers), Slots(*torch.arange(1, 2 * num_sequences + 1).chunk(2))
    return Work(
        _variants(kind, kind.prefill),
        [(kind.inputs(num_tokens), state_SLX[:, layer], slots, table) for layer in range(num_layers)],
        num_bytes=num_bytes,
        num_flops=float(len(table.starts) * kind.chunk_flops),
        reference=kind.call(kind.prefill.reference) if num_tokens <= MAX_CHECKED_TOKENS else None,
        limit=2e-2,
        memory=lambda *arguments: [arguments[1][1:]],
        launches=kind.prefill_launches,
    )


for _name, _kind in KINDS.items():
    _tiny = TINY_KINDS[_name]
    case(f"{_name}/decode", batch=BATCHES, tiny={"kind": _tiny, "batch": 2})(partial(decode, kind=_kind))
    case(f"{_name}/prefill", prompt=PROMPTS, tiny={"kind": _tiny, "prompt": (80, 1, 1, 5)})(
        partial(prefill, kind=_kind)
    )


@case("gdn-parts/prefill", prompt=PROMPTS, tiny={"prompt": (80, 1, 0, 0), "kind": gdn(4, 16)})
def gdn_parts(prompt: tuple[int, int, int, int], kind: Kind = KINDS["gdn"]) -> Work:
    """Return the two kernels of Gated DeltaNet's prefill, each alone."""
    work = prefill(kind, prompt)

    def prepare(inputs: GatedDeltaInputs, *memory: Any) -> Any:
        return gdn_prefill_triton.prepare(inputs, memory[-1])

    prepared = prepare(*work.arguments[0])

    def advance(inputs: GatedDeltaInputs, state: Tensor, slots: Slots, chunks: ChunkTable) -> Any:
        launch = delta_rule_triton.choose_launch(chunks, *inputs.v_THV.shape[1:])
        return delta_rule_triton.advance(inputs[:3], prepared, state, slots, chunks, launch)

    return Work({"prepare": prepare, "advance": advance}, work.arguments, partial=("prepare", "advance"))


CPU_SHAPES = {"granite-4.0-h-tiny": mamba2(48, 64, 1, 128), "nemotron-3-nano-30b-a3b": mamba2(64, 64, 8, 128)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@case(
    "mamba2-cpu/prefill",
    device="cpu",
    kind=CPU_SHAPES,
    tokens=(16, 512, 2048),
    dtype=DTYPES,
    tiny={"kind": TINY_KINDS["mamba2"], "tokens": 16, "dtype": torch.float32},
)
def prefill_on_cpu(kind: Kind, tokens: int, dtype: torch.dtype) -> Work:
    """Return one layer's prefill of a sequence that resumes from a state."""
    work = prefill(kind, (tokens, 1, 0, 0))
    [(inputs, *others)] = work.arguments
    count = len(kind.tokens)
    typed = kind.record(*(x.to(dtype) for x in inputs[:count]), *inputs[count:])
    return replace(
        work,
        variants={"strandline": bound(mamba2_prefill), "torch": mamba2_prefill.reference},
        arguments=[(typed, *others)],
        num_bytes=0.0,
        num_flops=0.0,
        peers={"torch"},
        launches=tuple,
    )
