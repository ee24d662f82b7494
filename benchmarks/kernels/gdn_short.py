"""Time Gated DeltaNet of steps that verify drafts, at the sizes of Qwen3.5-35B-A3B on a GPU.

Run: ``PYTHONPATH=src:benchmarks/kernels python3 benchmarks/kernels/gdn_short.py [--sweep] [--against FILE]``. Every
sequence has two logged tokens and two drafts. One graph holds the calls of 30 layers; a time is the median of its
replays over the calls. The floor is the states, read and written once, over 4.3 TB/s. FILE is another version of
``gdn_short_triton.py``, whose function takes no table of replayed rows, for example one that ``git show``
printed; the launches that pick the step's own rows are in its time.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from timing import gpu_time_us as time_us
from torch import Tensor

from strandline.kernels.batch import ReplayBatch
from strandline.kernels.chunk_table import Chunks, ChunkTable
from strandline.kernels.recurrences import gdn
from strandline.kernels.recurrences.gdn_short_triton import Short, choose_launch, gdn_prefill_short
from strandline.kernels.recurrences.replay import insert_logged, of_step

KEY_HEADS, HEADS, DIM = 16, 32, 128
LAYERS, DRAFTS, ROWS = 30, 2, 5
NUM_SEQUENCES = (1, 4, 16, 64)
BYTES_PER_S = 4.3e12

LAUNCHES = [
    Short(*tile, skips_logged)
    for tile, skips_logged in product(
        [
            (16, 1, None),
            (16, 1, 128),
            (16, 1, 168),
            (8, 1, None),
            (32, 1, None),
            (32, 2, None),
            (32, 2, 168),
            (64, 4, None),
        ],
        [False, True],
    )
]


class Case(NamedTuple):
    """A step's work in several layers."""

    inputs: tuple[tuple[Tensor, ...], ...]
    states: Tensor
    src_N: Tensor
    dst_N: Tensor
    chunks: ChunkTable
    replay: ReplayBatch

    def call(self, layer: int, function: Callable[..., Tensor], **options: Any) -> Tensor:
        """Run a layer; it writes the states that it reads, as a verification does."""
        return function(*self.inputs[layer], self.states[layer], self.src_N, self.dst_N, self.chunks, 1, **options)

    def call_other(self, layer: int, function: Callable[..., Tensor]) -> Tensor:
        """Run a layer with a function that returns the outputs of all rows, and pick the step's own."""
        return of_step(self.replay, self.call(layer, function))


def make_case(num_sequences: int) -> Case:
    """Return random work; the last of the rows belongs to no token, as in a padded step."""
    normal = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    num_rows = num_sequences * ROWS + 1
    sequence_N1 = torch.arange(num_sequences, device="cuda")[:, None]
    own_D, draft_D = torch.arange(1 + DRAFTS, device="cuda"), torch.arange(DRAFTS, device="cuda")
    columns = (
        sequence_N1 * ROWS + DRAFTS + own_D,
        sequence_N1 * ROWS + draft_D,
        (sequence_N1 + 1) * DRAFTS + draft_D,
        sequence_N1 * (1 + DRAFTS) + 1 + draft_D,
        (sequence_N1 + 1) * DRAFTS + draft_D,
    )
    flat = map(torch.flatten, columns)
    replay = ReplayBatch(num_rows, *flat, insert_logged=insert_logged.reference, is_padded=True)
    starts = [i * ROWS + part for i in range(num_sequences) for part in (0, 1 + DRAFTS)]
    cuts = [slot for i in range(num_sequences) for slot in (i + 1, 0)]
    lengths = (1 + DRAFTS, DRAFTS) * num_sequences
    host = Chunks(tuple(range(0, 2 * num_sequences + 1, 2)), tuple(starts), lengths, tuple(cuts), is_short=True)
    inputs = []
    for _ in range(LAYERS):
        q_TX, k_TX, v_TX = normal(num_rows, (2 * KEY_HEADS + HEADS) * DIM).split(
            [KEY_HEADS * DIM, KEY_HEADS * DIM, HEADS * DIM], dim=1
        )
        heads = [x.unflatten(1, (-1, DIM)) for x in (q_TX, k_TX, v_TX)]
        gates = (normal(num_rows, HEADS), normal(num_rows, HEADS))
        parameters = (torch.rand(HEADS, device="cuda").log(), torch.randn(HEADS, device="cuda"))
        inputs.append((*heads, *gates, *parameters))
    slots = torch.arange(1, num_sequences + 1, device="cuda")
    return Case(
        tuple(inputs),
        torch.randn(LAYERS, num_sequences + 1, HEADS, DIM, DIM, device="cuda"),
        slots,
        torch.zeros_like(slots),
        host.with_tensors([torch.tensor(column, device="cuda") for column in host.columns]),
        replay,
    )


def error_of(case: Case, launch: Short) -> float:
    """Return the larger error ratio of outputs and states, against torch in float32 on the CPU."""
    states = case.states[0].clone()
    exact = [x.float().cpu() for x in case.inputs[0]]
    expected_states = states.cpu().clone()
    out = case.call(0, gdn_prefill_short, replay=case.replay, launch=launch).cpu().float()
    found_states = case.states[0].cpu().clone()
    case.states[0].copy_(states)
    slots = (case.src_N.cpu(), case.dst_N.cpu(), case.chunks)
    reference: Callable[..., Tensor] = gdn.gdn_prefill.reference
    expected = reference(*exact, expected_states, *slots)
    expected = expected[case.replay.step_rows_T.cpu()]
    pairs = ((out, expected), (found_states[1:], expected_states[1:]))
    return max(float((x - y).norm() / y.norm()) for x, y in pairs)


def measure(num_sequences: int, launches: list[Short], other: Callable[..., Tensor] | None) -> None:
    """Check and time steps of one size."""
    case = make_case(num_sequences)
    floor = 1e6 * 2 * num_sequences * HEADS * DIM * DIM * 4 / BYTES_PER_S
    for launch in launches:
        options = {"replay": case.replay, "launch": launch}
        try:
            error = error_of(case, launch)
            us = time_us([partial(case.call, i, gdn_prefill_short, **options) for i in range(LAYERS)])
        except Exception as failure:  # noqa: BLE001 - a variant that does not compile must not end the sweep
            print(f"sequences={num_sequences} {launch}: {type(failure).__name__}: {str(failure)[:100]!r}", flush=True)
            continue
        verdict = "ok" if error < 1.5e-2 else "WRONG"
        print(
            f"sequences={num_sequences} {tuple(launch)}: {us:.2f} us, floor {floor:.1f}, error {error:.1e} {verdict}",
            flush=True,
        )
    if other is not None:
        us = time_us([partial(case.call_other, i, other) for i in range(LAYERS)])
        alone = time_us([partial(case.call, i, other) for i in range(LAYERS)])
        print(f"sequences={num_sequences} other version: {us:.2f} us, its kernel {alone:.2f}", flush=True)


def load_version(path: str) -> Callable[..., Tensor]:
    """Return the function of another version of the module."""
    spec = importlib.util.spec_from_file_location("other_version", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function: Callable[..., Tensor] = module.gdn_prefill_short
    return function


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="try the launch variants")
    parser.add_argument("--against", metavar="FILE", help="another version of the module")
    parser.add_argument("--sequences", type=int, nargs="*", default=NUM_SEQUENCES)
    arguments = parser.parse_args()
    other = load_version(arguments.against) if arguments.against else None
    for num_sequences in arguments.sequences:
        measure(num_sequences, LAUNCHES if arguments.sweep else [choose_launch(num_sequences)], other)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    main()
