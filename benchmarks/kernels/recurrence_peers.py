"""Time prefills of recurrences beside public kernels on a GPU, and compare errors; peers that are missing are left out.

    pip install --no-deps --target peers fla-core einops   # and the folder mamba_ssm of a release of mamba-ssm
    PYTHONPATH=src:peers python3 benchmarks/kernels/recurrence_peers.py [--kinds mamba2]

Inputs are those of ``recurrences.py``; every sequence starts from a state, and its final state is kept. Errors are of
outputs, relative, against the reference implementation in float32. Of mamba-ssm only Triton kernels are imported: its
package would need compiled ones.
"""

import argparse
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from recurrences import KINDS, Kind, prefill_us, table_of
from torch import Tensor
from triton.testing import do_bench

from strandline.kernels.kda import kda_prefill
from strandline.kernels.lightning import lightning_prefill
from strandline.kernels.mamba2 import mamba2_prefill

CASES = ((8192, 1), (8192, 8), (65536, 8))
"""Tokens of all sequences together, sequences."""

ERROR_TOKENS = 2048

Peer = Callable[[tuple[Any, ...], Tensor], tuple[Tensor, Tensor]]
"""Returns outputs and final states of sequences as rows of a batch, given a kind's inputs and ``state_NHKV``."""


def batched(inputs: tuple[Any, ...], num_tokens: int, num_sequences: int) -> tuple[Any, ...]:
    """Return inputs with the sequences as another first dimension, parameters as they are."""
    return tuple(
        x.unflatten(0, (num_sequences, -1)) if isinstance(x, Tensor) and len(x) == num_tokens else x for x in inputs
    )


def load_kda() -> Peer:
    from fla.ops.kda import chunk_kda

    def run(inputs: tuple[Any, ...], state_NHKV: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, f, b, rate, bias = inputs
        out, state = chunk_kda(
            q, k, v, f, b, initial_state=state_NHKV, output_final_state=True, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, A_log=rate, dt_bias=bias.flatten(),
        )  # fmt: skip
        return out, state

    return run


def load_lightning() -> Peer:
    from fla.ops.simple_gla import chunk_simple_gla

    def run(inputs: tuple[Any, ...], state_NHKV: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, log_decay = inputs
        out, state = chunk_simple_gla(
            q, k, v, g_gamma=log_decay, scale=1.0, initial_state=state_NHKV, output_final_state=True
        )
        return out, state

    return run


def load_mamba2() -> Peer:
    spec = find_spec("mamba_ssm")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("mamba_ssm is not installed")
    package = ModuleType("mamba_ssm")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["mamba_ssm"] = package
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    def run(inputs: tuple[Any, ...], state_NHKV: Tensor) -> tuple[Tensor, Tensor]:
        x, key, query, dt, rate, skip, bias, limit = inputs
        out, state = mamba_chunk_scan_combined(
            x, dt, -rate.exp(), key, query, chunk_size=256, D=skip, dt_bias=bias, dt_softplus=True, dt_limit=limit,
            initial_states=state_NHKV.mT.contiguous(), return_final_states=True,
        )  # fmt: skip
        return out, state.mT

    return run


PEERS: dict[str, tuple[str, Callable[[], Peer], Callable[..., Tensor]]] = {
    "mamba2": ("mamba-ssm", load_mamba2, mamba2_prefill.reference),
    "kda": ("flash-linear-attention", load_kda, kda_prefill.reference),
    "lightning": ("flash-linear-attention", load_lightning, lightning_prefill.reference),
}


def errors(kind: Kind, reference: Callable[..., Tensor], peer: Peer) -> tuple[float, float]:
    """Return the relative errors of our outputs and of the peer's."""
    inputs = kind.inputs(ERROR_TOKENS)
    state = torch.randn(3, *kind.state, device="cuda")
    state[2] = state[1]
    slots, table = torch.tensor([1], device="cuda"), table_of(ERROR_TOKENS, 1, 0)
    exact = tuple(x.float() if isinstance(x, Tensor) else x for x in inputs)
    expected = reference(*exact, state.clone(), slots, slots, table)
    ours = kind.prefill(*inputs, state.clone(), slots, slots, table)
    theirs, _ = peer(batched(inputs, ERROR_TOKENS, 1), state[2:])
    our_error, their_error = (float((x.float() - expected).norm() / expected.norm()) for x in (ours, theirs[0]))
    return our_error, their_error


def peer_us(kind: Kind, peer: Peer, num_tokens: int, num_sequences: int) -> float:
    inputs = batched(kind.inputs(num_tokens), num_tokens, num_sequences)
    state = torch.randn(num_sequences, *kind.state, device="cuda")
    return 1000 * float(do_bench(lambda: peer(inputs, state), warmup=10, rep=40, return_mode="median"))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(PEERS))
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()} · torch {torch.__version__}")
    for name in options.kinds.split(","):
        kind, (package, load, reference) = KINDS[name], PEERS[name]
        try:
            peer = load()
            ours, theirs = errors(kind, reference, peer)
        except Exception as error:  # noqa: BLE001 - a peer that is missing, or does not run here, is a result, too
            print(f"{name}: {package} does not run: {type(error).__name__} {error}")
            continue
        print(f"{name} error of {ERROR_TOKENS} tokens: {ours:.2e}, {package} {theirs:.2e}", flush=True)
        for num_tokens, num_sequences in CASES:
            us, of_peer = prefill_us(kind, num_tokens, num_sequences, 0), peer_us(kind, peer, num_tokens, num_sequences)
            print(f"{name} prefill of {num_tokens} in {num_sequences}: {us:8.1f} us, {package} {of_peer:8.1f}")


if __name__ == "__main__":
    main()
