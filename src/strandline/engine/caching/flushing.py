"""Writes entries that are only in memory to files, before the process ends."""

from collections.abc import Callable
from typing import Final

from tqdm import tqdm

from strandline.cache import PrefixCache
from strandline.cache.tiers import Loads
from strandline.clock import SYSTEM_CLOCK
from strandline.device.executor import Executor
from strandline.engine.scheduling.load_queue import LoadQueue
from strandline.records.messages import FLUSH_S, FlushReport

WAIT_S: Final = 0.1
"""How often to look whether to stop."""


def flush(
    cache: PrefixCache,
    loads: Loads,
    executor: Executor,
    loading: LoadQueue,
    is_stopped: Callable[[], bool],
    *,
    limit_s: float = FLUSH_S,
) -> FlushReport | None:
    """Write what is worth keeping, most valuable first, until all is written, the time is over or it is stopped.

    No request runs any more. Loads under way end first: until then, what they bring is neither in host memory nor on
    the device. A progress bar is shown on a terminal.

    Returns:
        None: no files outlive the process.
    """
    start_s = SYSTEM_CLOCK()

    def is_over() -> bool:
        return is_stopped() or SYSTEM_CLOCK() >= start_s + limit_s

    while loads.spills and len(loads) and not is_over():
        executor.carry_out(cache.take_actions())
        loading.complete(executor.wait_for_transfers(WAIT_S))
    writing, files = loads.begin_flush(), executor.facts.lower.files
    if writing is None or files is None:
        return None
    lower, tier = loads.tiers[-1], files.tier.title
    before, text, num_sources = lower.num_blocks_written, f"writing to the {tier}", writing.num_left
    with tqdm(desc=text, total=num_sources, disable=None, unit="snapshot", leave=False, delay=1) as bar:
        while writing.num_left and not is_over():
            executor.carry_out(cache.take_actions())
            bar.update(num_sources - writing.num_left - bar.n)
            if writing.num_left:
                loading.complete(executor.wait_for_transfers(WAIT_S))
    num_bytes = (lower.num_blocks_written - before) * lower.block_bytes * executor.facts.num_ranks
    seconds = SYSTEM_CLOCK() - start_s
    return FlushReport(num_bytes, writing.num_left, seconds, writing.num_failed, writing.failure, tier)
