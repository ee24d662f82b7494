"""Recurrences beside public kernels, on inputs that peers get as they are and copied; missing peers are skipped.

    pip install --no-deps --target peers fla-core einops   # and the folder mamba_ssm of a release of mamba-ssm
    PYTHONPATH=src:peers python benchmarks/kernels --case 'peers/*'

Peers get parts of the rows of one tensor, as projections leave them (*strided*: a peer may copy them first), and each
part by itself (*contiguous*). Every sequence starts from a state, and its final state is stored; peers get states in
the layout that they compute in. Errors are those of outputs and of final states, against the reference implementation
in float32.

Peers tune their kernels when they are called first. Processes compile what they try beforehand and at the same time if
each runs the command with ``--untimed --part I/N``, ``FLA_CACHE_RESULTS=0`` and ``TRITON_CACHE_AUTOTUNING=0``. Of
mamba-ssm only Triton kernels are imported: its package would need compiled ones.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from case import Call, Skipped, Work, case, turns
from recurrences import KINDS, TINY_KINDS, Inputs, Kind, table_of
from torch import Tensor

from strandline.kernels.batch import Slots

LIMIT = 2e-2
"""Of errors: bfloat16 rounds by at most 4e-3, and intermediate results are rounded, too."""

Run = Callable[[], tuple[Tensor, Tensor]]
"""Returns outputs and final states of sequences as rows of a batch."""
Peer = Callable[[Inputs, Tensor], Run]
"""Prepares a call, given a kind's inputs, with sequences as another first dimension, and ``state_NX``."""


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
        q, k, v, a, b, rate, bias, _ = inputs
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
    del phase
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


FLA, MAMBA_SSM = "flash-linear-attention", "mamba-ssm"
PEERS: dict[str, tuple[str, Callable[[str], Peer]]] = {
    "gdn": (FLA, load_gdn),
    "kda": (FLA, load_kda),
    "lightning": (FLA, load_lightning),
    "mamba2": (MAMBA_SSM, load_mamba2),
    "mamba1": (MAMBA_SSM, load_mamba1),
    "convolution": (FLA, load_convolution),
}
"""Package and loader of a kind's peer; that of mamba1 has only decodes."""
PHASES = {"prefill": ((8192, 1), (8192, 8)), "decode": tuple((count, count) for count in (1, 16, 64, 256))}
"""Tokens and sequences."""


def compare(name: str, phase: str, work: tuple[int, int], kind: Kind | None = None) -> Work:
    """Return our calls and a peer's of the same work."""
    kind, (package, load), (num_tokens, num_sequences) = kind or KINDS[name], PEERS[name], work
    try:
        peer = load(phase)
    except ImportError as error:
        raise Skipped(f"not compared with {package}: {error}") from None
    operation = getattr(kind, phase)
    num_bytes = 2 * num_tokens * sum(kind.token_sizes) + num_sequences * kind.state_bytes
    num_layers = turns(num_bytes, at_least=2, at_most=30)
    state_SLX = kind.states(num_sequences * (1 if phase == "decode" else 2), num_layers)
    function = partial(finished, kind.bound(operation), num_sequences)
    arguments = []
    for layer in range(num_layers):
        inputs, state_SX = kind.inputs(num_tokens), state_SLX[:, layer]
        runs = [
            peer(batched(kind, arrange(inputs), num_sequences), state_SX[1 : num_sequences + 1].clone())
            for arrange in (tuple, partial(separate, kind))
        ]
        arguments.append(((inputs, state_SX, *slots_of(phase, num_tokens, num_sequences)), *runs))
    variants: dict[str, Call] = {
        "strandline": lambda ours, *_: function(ours),
        f"{package}, strided": lambda _, strided, __: in_rows(strided()),
        f"{package}, contiguous": lambda _, __, contiguous: in_rows(contiguous()),
    }
    return Work(
        variants,
        arguments,
        reference=partial(exact, kind, kind.call(operation.reference), num_sequences),
        limit=LIMIT,
        peers=tuple(variants)[1:],
    )


def slots_of(phase: str, num_tokens: int, num_sequences: int) -> tuple[Any, ...]:
    """Return the slots that are read and written, the same ones in a decode, and a prefill's chunks."""
    src_N = torch.arange(1, num_sequences + 1)
    if phase == "decode":
        return (Slots(src_N, src_N),)
    return Slots(src_N, src_N + num_sequences), table_of(num_tokens, num_sequences)


def finished(function: Call, num_sequences: int, arguments: Inputs) -> tuple[Tensor, Tensor]:
    """Return what one of our functions returns, and the final states: those of the last slots."""
    return function(*arguments), arguments[1][-num_sequences:]


def exact(kind: Kind, function: Call, num_sequences: int, arguments: Inputs, *_: object) -> tuple[Tensor, Tensor]:
    """Return the same in float32, of copies."""
    inputs, state_SX, *others = arguments
    floats = kind.record(*(x.to(torch.float32, copy=True) if is_float(x) else x for x in inputs))
    return finished(function, num_sequences, (floats, state_SX.to(torch.float32, copy=True), *others))


def is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def in_rows(found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return found[0].flatten(0, 1), found[1]


def batched(kind: Kind, inputs: Inputs, num_sequences: int) -> Inputs:
    """Return inputs with the sequences as another first dimension, parameters as they are."""
    count = len(kind.tokens)
    return (*(x.unflatten(0, (num_sequences, -1)) for x in inputs[:count]), *inputs[count:])


def separate(kind: Kind, inputs: Inputs) -> Inputs:
    """Return inputs, each part of tokens' rows copied to a tensor of its own."""
    count = len(kind.tokens)
    return (*(x.contiguous() for x in inputs[:count]), *inputs[count:])


for _name in PEERS:
    for _phase, _works in PHASES.items():
        if (_name, _phase) != ("mamba1", "prefill"):  # its peer is compiled
            _tiny = {"kind": TINY_KINDS[_name], "work": _works[0] if _phase == "decode" else (64, 1)}
            case(f"peers/{_name}/{_phase}", work=_works, tiny=_tiny)(partial(compare, _name, _phase))
