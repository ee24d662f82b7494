"""What a step costs between the engine and its worker processes, where these compute nothing.

    python benchmarks/worker_plans.py --ranks 2

For steps in which that many sequences decode with that much context: bytes that are sent to one rank; microseconds
from the call of ``launch`` until the first rank begins the step, and until ``result`` returns; microseconds of a
processor in the engine's process, all threads together. Of ``--steps`` steps, the time that a tenth of them take at
most: what else runs on the machine slows the others. Sequences get a further block at different steps.

``--engine`` measures whole steps of the engine's core, which plans each step while the one before it runs, with an
executor in its own process and with workers.
"""

import argparse
import os
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from stub_worker import BEGUN, load_stub

from strandline.config import EngineConfig
from strandline.engine.core import EngineCore
from strandline.engine.mp_executor import MpExecutor
from strandline.engine.workers import worker_link
from strandline.engine.workers.workers import Workers
from strandline.ids import BLOCK_TOKENS, NULL_LOG, PendingToken, RequestId, SlotId
from strandline.records.events import Submission
from strandline.records.plan import NewRequest, SequencePlan, StepPlan
from strandline.records.sampling_params import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1_000, 32_000, 128_000])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--engine", action="store_true")
    options = parser.parse_args()
    worker_link.WORKER_MODULE = "stub_worker"  # type: ignore[misc]
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    config = EngineConfig(model="none", device="cpu", tensor_parallel_size=options.ranks)
    executor = MpExecutor(config, Workers(options.ranks))
    try:
        if options.engine:
            print("| sequences | step in one process, us | with workers, us | processor, us | with workers, us |")
            print("| --- | --- | --- | --- | --- |")
            for num_sequences in options.sequences:
                print(measure_engine(executor, num_sequences, options.steps), flush=True)
            return
        print("| sequences | context | bytes | begun, us | result, us | processor, us |")
        print("| --- | --- | --- | --- | --- | --- |")
        for num_sequences in options.sequences:
            for context in options.contexts:
                print(measure(executor, num_sequences, context, options.steps), flush=True)
    finally:
        executor.close()


def measure(executor: MpExecutor, num_sequences: int, context: int, num_steps: int) -> str:
    """Return a row of the table."""
    executor.forget_requests()
    num_bytes, begun, done, used = list[int](), list[float](), list[float](), list[float]()
    counter = count_bytes(executor)
    for plan in plans(num_sequences, context, num_steps):
        counter[0] = 0
        start_s, used_s = time.perf_counter(), time.process_time()
        result = executor.launch(plan).result()
        done.append(time.perf_counter() - start_s)
        used.append(time.process_time() - used_s)
        begun.append(float(result.failures[BEGUN]) - start_s)
        num_bytes.append(counter[0])
    times = (f"{sorted(each[1:])[num_steps // 10] * 1e6:,.0f}" for each in (begun, done, used))
    return f"| {num_sequences} | {context:,} | {median(num_bytes[1:]):,.0f} | {' | '.join(times)} |"


def measure_engine(executor: MpExecutor, num_sequences: int, num_steps: int) -> str:
    """Return a row of the table of whole steps."""
    times, used = list[float](), list[float]()
    for each in (load_stub(), executor):
        each.forget_requests()
        core = EngineCore(each, EngineConfig(model="none", device="cpu", async_scheduling=True))
        for index in range(num_sequences):
            params = SamplingParams(max_tokens=10**5)
            new = NewRequest(RequestId(f"cmpl-{index:032x}"), (index,) * 100, params, 0, frozenset({5}), ())
            core.add(Submission(new=new, max_total=10**5, salt="", marks=()))
        steps = [timed(core.step) for _ in range(num_steps)][num_steps // 4 :]
        times.append(sorted(seconds for seconds, _ in steps)[len(steps) // 10])
        used.append(sorted(seconds for _, seconds in steps)[len(steps) // 10])
    return f"| {num_sequences} | " + " | ".join(f"{seconds * 1e6:,.0f}" for seconds in times + used) + " |"


def timed(step: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that a call takes, and those of a processor."""
    start_s, used_s = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - start_s, time.process_time() - used_s


class CountingSocket:
    """Counts what is sent through a socket."""

    def __init__(self, connection: Any, count: list[int]) -> None:
        self._connection, self._count = connection, count

    def sendall(self, data: bytes) -> None:
        self._count[0] += len(data)
        self._connection.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def count_bytes(executor: MpExecutor) -> list[int]:
    """Return the number of bytes that have been sent to the first rank, as it grows."""
    link: Any = executor._workers._links[0]
    if not isinstance(link._socket, CountingSocket):
        link._socket = CountingSocket(link._socket, [0])
    count: list[int] = link._socket._count
    return count


def plans(num_sequences: int, context: int, num_steps: int) -> Iterator[StepPlan]:
    """Yield steps in which sequences decode; the first one introduces them."""
    names = [RequestId(f"cmpl-{index:032x}") for index in range(num_sequences)]
    starts = [context + index * 7 % BLOCK_TOKENS for index in range(num_sequences)]
    num_blocks = (context + num_steps) // BLOCK_TOKENS + 3
    blocks = [array("i", range(1 + index * num_blocks, 1 + (index + 1) * num_blocks)) for index in range(num_sequences)]
    params = SamplingParams(max_tokens=num_steps)
    new = tuple(NewRequest(name, (1, 2, 3), params, 0, frozenset({5}), ()) for name in names)
    for step in range(num_steps):
        sequences = tuple(
            SequencePlan(
                names[index],
                start + step,
                start + step + 1,
                (0,),
                blocks[index][: -(-(start + step + 1) // BLOCK_TOKENS)].tobytes(),
                0,
                SlotId(index + 1),
                SlotId(index + 1),
                (),
                is_sampled=True,
                pending=PendingToken.MAY_STOP,
                is_prefill=False,
                log=NULL_LOG,
                num_logged=0,
                num_folded=1,
            )
            for index, start in enumerate(starts)
        )
        yield StepPlan(sequences, (), new if step == 0 else (), ())


if __name__ == "__main__":
    main()
