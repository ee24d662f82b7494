"""Time recurrences beside public kernels on a GPU, and compare results; peers that are missing are left out.

    pip install --no-deps --target peers fla-core einops   # and the folder mamba_ssm of a release of mamba-ssm
    PYTHONPATH=src:peers python3 benchmarks/kernels/recurrence_peers.py [--kinds mamba2]

Prints one table. Inputs are those of ``recurrences.py``: parts of the rows of one tensor, as projections leave them.
Peers get them so (*strided*: a peer may copy them first) and each part by itself (*contiguous*). Every sequence starts
from a state, and its final state is kept; peers get states in the layout that they compute in. All times are those of
CUDA graphs, without what launches cost the host: the median of replays, over the layers of a graph, whose inputs and
states together are larger than the cache.

Errors are relative, the larger one of outputs and of final states, against the reference implementation in float32.
The command fails if one of ours is above ``LIMIT``.

Peers tune their kernels when they are called first. Processes, one for each kind and phase, compile what they try
beforehand and at the same time; nothing of what they measure is kept. Of mamba-ssm only Triton kernels are imported:
its package would need compiled ones.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from recurrences import KINDS, TOUCHED_BYTES, Kind, decay_rates, per_head, replayed_us, table_of
from torch import Tensor

from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.recurrences import conv1d_triton, gdn_decode_triton, gdn_prefill_triton
from strandline.kernels.recurrences.conv1d import causal_conv1d_prefill, causal_conv1d_update
from strandline.kernels.recurrences.gdn import gdn_decode, gdn_prefill
from strandline.kernels.recurrences.kda import kda_decode, kda_prefill
from strandline.kernels.recurrences.lightning import lightning_decode, lightning_prefill
from strandline.kernels.recurrences.mamba1 import mamba1_decode
from strandline.kernels.recurrences.mamba2 import mamba2_decode, mamba2_prefill

LIMIT = 2e-2
"""Of errors: bfloat16 rounds by at most 4e-3, and intermediate results are rounded, too."""

HEADER = (
    "kind",
    "step",
    "tokens",
    "sequences",
    "ours, µs",
    "peer",
    "strided, µs",
    "contiguous, µs",
    "error",
    "its error",
)

Inputs = tuple[Any, ...]
Run = Callable[[], tuple[Tensor, Tensor]]
"""Returns outputs and final states of sequences as rows of a batch."""
Peer = Callable[[Inputs, Tensor], Run]
"""Prepares a call, given a kind's inputs, with sequences as another first dimension, and ``state_NX``."""


@dataclass(frozen=True)
class Work:
    """Equal sequences of one step."""

    num_tokens: int
    num_sequences: int

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == self.num_sequences


WORK = {
    "prefill": (Work(8192, 1), Work(8192, 8)),
    "decode": tuple(Work(count, count) for count in (1, 16, 64, 256)),
}
CHECKED = {"prefill": Work(2048, 2), "decode": Work(16, 16)}
"""What errors are measured with."""


def convolution(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a convolution that is called as recurrences are, given the other columns of its inputs' rows, too."""

    def run(x: Tensor, rest: Tensor, weight: Tensor, *memory: Any) -> Tensor:
        del rest
        return operation(x, weight, None, *memory, "silu")

    return run


FURTHER_KINDS = {
    "gdn": Kind(  # Qwen3.5-35B-A3B; states are read and written in every step
        gdn_prefill_triton.gdn_prefill,
        gdn_decode_triton.gdn_decode,
        ((16, 128), (16, 128), (32, 128), (32,), (32,)),
        lambda: (decay_rates(32), per_head(32)),
        (32, 128, 128),
        0,
    ),
    "convolution": Kind(  # Qwen3.5-35B-A3B, beside the other columns of the fused projection
        convolution(conv1d_triton.causal_conv1d_prefill),
        convolution(conv1d_triton.causal_conv1d_update),
        ((8192,), (4160,)),
        lambda: (per_head(8192, 4).bfloat16(),),
        (3, 8192),
        0,
        state_dtype=torch.bfloat16,
    ),
}


def fla(prefill: Callable[..., Any], decode: Callable[..., Any], phase: str) -> Callable[..., Any]:
    """Return one of flash-linear-attention's functions, which keeps the final state."""
    return partial(prefill if phase == "prefill" else decode, output_final_state=True)


def load_kda(phase: str) -> Peer:
    from fla.ops.kda import chunk_kda, fused_recurrent_kda

    operation = fla(chunk_kda, fused_recurrent_kda, phase)
    flags = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}

    def prepare(inputs: Inputs, state_NHKV: Tensor) -> Run:
        *tokens, rate, bias, _ = inputs
        return partial(operation, *tokens, initial_state=state_NHKV, A_log=rate, dt_bias=bias.flatten(), **flags)

    return prepare


def load_gdn(phase: str) -> Peer:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    operation = fla(chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, phase)
    flags = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}

    def prepare(inputs: Inputs, state_NHKV: Tensor) -> Run:
        q, k, v, a, b, rate, bias = inputs
        return partial(operation, q, k, v, g=a, beta=b, initial_state=state_NHKV, A_log=rate, dt_bias=bias, **flags)

    return prepare


def load_lightning(phase: str) -> Peer:
    from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

    operation = fla(chunk_simple_gla, fused_recurrent_simple_gla, phase)

    def prepare(inputs: Inputs, state_NHKV: Tensor) -> Run:
        *tokens, log_decay = inputs
        return partial(operation, *tokens, g_gamma=log_decay, scale=1.0, initial_state=state_NHKV)

    return prepare


def load_convolution(phase: str) -> Peer:
    from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update

    def prepare(inputs: Inputs, window_NPC: Tensor) -> Run:
        x_NTC, _, weight = inputs
        window_NCW = F.pad(window_NPC.mT, (1, 0)).contiguous()

        def run() -> tuple[Tensor, Tensor]:
            if phase == "prefill":
                out, final_NCW = causal_conv1d(
                    x_NTC, weight, initial_state=window_NCW, output_final_state=True, activation="silu"
                )
            else:
                out, final_NCW = causal_conv1d_update(x_NTC, window_NCW, weight=weight, activation="silu")
            return out, final_NCW[..., 1:].mT

        return run

    return prepare


def find_mamba_ssm() -> None:
    """Make the package's Triton kernels importable without the package's own module."""
    spec = find_spec("mamba_ssm")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("mamba_ssm is not installed")
    package = ModuleType("mamba_ssm")
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    sys.modules["mamba_ssm"] = package


def load_mamba2(phase: str) -> Peer:
    find_mamba_ssm()
    if phase == "decode":
        return load_mamba2_decode()
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    def prepare(inputs: Inputs, state_NHKV: Tensor) -> Run:
        x, key, query, dt, rate, skip, bias, limit = inputs
        decay, state_NHVK = -rate.exp(), state_NHKV.mT.contiguous()

        def run() -> tuple[Tensor, Tensor]:
            out, final_NHVK = mamba_chunk_scan_combined(
                x, dt, decay, key, query, chunk_size=256, D=skip, dt_bias=bias, dt_softplus=True, dt_limit=limit,
                initial_states=state_NHVK, return_final_states=True,
            )  # fmt: skip
            return out, final_NHVK.mT

        return run

    return prepare


def load_mamba2_decode() -> Peer:
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    def prepare(inputs: Inputs, state_NHKV: Tensor) -> Run:
        x, key, query, dt, rate, skip, bias, _ = inputs  # there is no limit of time steps; ours is none
        state_NHVK = state_NHKV.mT.contiguous()
        x, key, query = (part[:, 0] for part in (x, key, query))
        shape = state_NHVK.shape[1:]
        per_channel = [part.unsqueeze(-1).expand(shape[:2]) for part in (skip, bias)]
        dt = dt[:, 0].unsqueeze(-1).expand(-1, *shape[:2])
        decay = (-rate.exp())[:, None, None].expand(shape)

        def run() -> tuple[Tensor, Tensor]:
            out = selective_state_update(
                state_NHVK, x, dt, decay, key, query, D=per_channel[0], dt_bias=per_channel[1], dt_softplus=True
            )
            return out.unsqueeze(1), state_NHVK.mT

        return run

    return prepare


def load_mamba1(phase: str) -> Peer:
    del phase  # its prefill is compiled
    find_mamba_ssm()
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    def prepare(inputs: Inputs, state_NVK: Tensor) -> Run:
        x, gate, key, query, dt = (part[:, 0] for part in inputs[:5])
        skip, bias, rate = inputs[5:]
        decay = -rate.exp()

        def run() -> tuple[Tensor, Tensor]:
            out = selective_state_update(
                state_NVK, x, dt, decay, key, query, D=skip, z=gate, dt_bias=bias, dt_softplus=True
            )
            return out.unsqueeze(1), state_NVK

        return run

    return prepare


@dataclass(frozen=True)
class Comparison:
    """A kind's peer, and its reference implementations by phase."""

    package: str
    load: Callable[[str], Peer]
    references: dict[str, Callable[..., Tensor]]


FLA, MAMBA_SSM = "flash-linear-attention", "mamba-ssm"
COMPARISONS = {
    "gdn": Comparison(FLA, load_gdn, {"prefill": gdn_prefill.reference, "decode": gdn_decode.reference}),
    "kda": Comparison(FLA, load_kda, {"prefill": kda_prefill.reference, "decode": kda_decode.reference}),
    "lightning": Comparison(
        FLA, load_lightning, {"prefill": lightning_prefill.reference, "decode": lightning_decode.reference}
    ),
    "mamba2": Comparison(
        MAMBA_SSM, load_mamba2, {"prefill": mamba2_prefill.reference, "decode": mamba2_decode.reference}
    ),
    "mamba1": Comparison(MAMBA_SSM, load_mamba1, {"decode": mamba1_decode.reference}),
    "convolution": Comparison(
        FLA,
        load_convolution,
        {
            "prefill": convolution(causal_conv1d_prefill.reference),
            "decode": convolution(causal_conv1d_update.reference),
        },
    ),
}
ALL_KINDS = {**KINDS, **FURTHER_KINDS}


def batched(kind: Kind, inputs: Inputs, work: Work) -> Inputs:
    """Return inputs with the sequences as another first dimension, parameters as they are."""
    count = len(kind.tokens)
    return (*(x.unflatten(0, (work.num_sequences, -1)) for x in inputs[:count]), *inputs[count:])


def separate(kind: Kind, inputs: Inputs) -> Inputs:
    """Return inputs, each part of tokens' rows copied to a tensor of its own."""
    count = len(kind.tokens)
    return (*(x.contiguous() for x in inputs[:count]), *inputs[count:])


def call_of(kind: Kind, work: Work, functions: dict[str, Callable[..., Tensor]], inputs: Inputs, state: Tensor) -> Any:
    """Return a call that starts from slots ``1..N``, and the slots where it leaves states: in place in a decode."""
    src = torch.arange(1, work.num_sequences + 1, device="cuda")
    if work.is_decode:
        return partial(functions["decode"], *inputs, state, src, src), src
    dst = src + work.num_sequences
    table: ChunkTable = table_of(work.num_tokens, work.num_sequences, 0)
    return partial(functions["prefill"], *inputs, state, src, dst, table), dst


def random_states(kind: Kind, work: Work, *layers: int) -> Tensor:
    """Return slots for initial and final states, and the null slot."""
    num_slots = work.num_sequences * (1 if work.is_decode else 2) + 1
    return torch.randn(num_slots, *layers, *kind.state, device="cuda").to(kind.state_dtype)


def functions_of(kind: Kind) -> dict[str, Callable[..., Tensor]]:
    return {"prefill": kind.prefill, "decode": kind.decode}


def errors(kind: Kind, comparison: Comparison, peer: Peer, work: Work) -> tuple[float, float]:
    """Return the relative errors of ours and of the peer's: the larger one of outputs and final states."""
    inputs, state = kind.inputs(work.num_tokens), random_states(kind, work)
    exact = tuple(x.float() if isinstance(x, Tensor) else x for x in inputs)
    exact_state, our_state = state.to(torch.float32, copy=True), state.clone()
    reference, slots = call_of(kind, work, comparison.references, exact, exact_state)
    expected = (reference(), exact_state[slots])
    ours, _ = call_of(kind, work, functions_of(kind), inputs, our_state)
    out, theirs = ours(), peer(batched(kind, inputs, work), state[1 : work.num_sequences + 1].clone())()
    return (
        largest_error((out, our_state[slots]), expected),
        largest_error((theirs[0].flatten(0, 1), theirs[1]), expected),
    )


def largest_error(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
    return max(float((x.float() - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True))


def num_layers_of(kind: Kind, work: Work) -> int:
    """Return how many calls a graph holds."""
    token_bytes = 2 * sum(torch.Size(shape).numel() for shape in kind.tokens)
    num_bytes = work.num_tokens * token_bytes + work.num_sequences * kind.state_bytes
    return min(30, max(2, TOUCHED_BYTES // num_bytes))


def our_us(kind: Kind, work: Work) -> float:
    num_layers = num_layers_of(kind, work)
    arena = random_states(kind, work, num_layers)
    functions = functions_of(kind)
    return replayed_us(
        [call_of(kind, work, functions, kind.inputs(work.num_tokens), arena[:, i])[0] for i in range(num_layers)]
    )


def peer_us(kind: Kind, peer: Peer, work: Work, arrange: Callable[[Inputs], Inputs]) -> float:
    calls = []
    for _ in range(num_layers_of(kind, work)):
        state = torch.randn(work.num_sequences, *kind.state, device="cuda").to(kind.state_dtype)
        calls.append(peer(batched(kind, arrange(kind.inputs(work.num_tokens)), work), state))
    return replayed_us(calls)


def compare(name: str, phase: str) -> bool:
    """Print a phase's rows; return whether our results are right."""
    kind, comparison = ALL_KINDS[name], COMPARISONS[name]
    try:
        peer = comparison.load(phase)
        ours, theirs = errors(kind, comparison, peer, CHECKED[phase])
        rows = []
        for work in WORK[phase]:
            strided = peer_us(kind, peer, work, lambda inputs: inputs)
            contiguous = peer_us(kind, peer, work, partial(separate, kind))
            rows.append((work, our_us(kind, work), strided, contiguous))
    except Exception as error:  # noqa: BLE001 - a peer that is missing, or does not run here, is a result, too
        print(f"{name} {phase}: not compared with {comparison.package}: {type(error).__name__} {error}", flush=True)
        return True
    for work, us, strided, contiguous in rows:
        cells = (name, phase, work.num_tokens, work.num_sequences, f"{us:.1f}", comparison.package, f"{strided:.1f}")
        print_row(*cells, f"{contiguous:.1f}", f"{ours:.1e}", f"{theirs:.1e}{'' if theirs < LIMIT else ' (large)'}")
    if ours > LIMIT:
        print(f"{name} {phase}: WRONG, our error is above {LIMIT}", flush=True)
    return ours <= LIMIT


def print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def compile_peers(phases: list[tuple[str, str]]) -> None:
    """Call every peer once, each in a process of its own, so that its kernels are in Triton's cache."""
    command = [sys.executable, __file__, "--only-compile"]
    environment = {**os.environ, "FLA_CACHE_RESULTS": "0", "TRITON_CACHE_AUTOTUNING": "0"}
    processes = [
        subprocess.Popen([*command, name, phase], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for name, phase in phases
    ]
    for process in processes:
        process.wait()


def compile_one(name: str, phase: str) -> None:
    kind, comparison = ALL_KINDS[name], COMPARISONS[name]
    errors(kind, comparison, comparison.load(phase), CHECKED[phase])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(COMPARISONS))
    parser.add_argument("--only-compile", nargs=2, metavar=("KIND", "PHASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.only_compile:
        return compile_one(*options.only_compile)
    phases = [(name, phase) for name in options.kinds.split(",") for phase in COMPARISONS[name].references]
    begun_s = time.monotonic()
    compile_peers(phases)
    print(
        f"{torch.cuda.get_device_name()} · torch {torch.__version__} · compiled in {time.monotonic() - begun_s:.0f} s"
    )
    print_row(*HEADER)
    print_row(*["---"] * len(HEADER))
    are_right = [compare(*phase) for phase in phases]
    print(f"in {time.monotonic() - begun_s:.0f} s")
    if not all(are_right):
        sys.exit(1)


if __name__ == "__main__":
    main()
