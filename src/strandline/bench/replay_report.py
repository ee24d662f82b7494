"""``strandline bench replay``: traces and workloads, under policies, at budgets; a table on stdout, or JSON."""

import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from strandline.bench.plot import check_plot_path, write_plot
from strandline.bench.policies import policy
from strandline.bench.replay import Replay, Result
from strandline.bench.replay_setup import ReplaySetup
from strandline.bench.replica import Machine
from strandline.bench.synthetic import SYNTHETIC
from strandline.bench.traces import Lane
from strandline.errors import ConfigError
from strandline.routing.names import make_router
from strandline.version import VERSION


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Traces, policies, budgets and limits of a replay.

    Raises:
        ConfigError: a number is out of range.
    """

    traces: Sequence[str]
    """Paths, names of workloads, or ``synthetic`` for all workloads."""
    memory: Sequence[str]
    policies: Sequence[str]
    setup: ReplaySetup
    plot: str | None = None
    """File to plot the results to."""
    num_replicas: int = 1
    routers: Sequence[str] = ("strandline",)
    """Where there are several replicas."""

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ConfigError(f"--replicas must be at least 1, got {self.num_replicas}")
        if self.plot is not None and self.num_replicas > 1:
            raise ConfigError("--plot draws replays of one replica")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    trace: str
    result: Result


def run_replay(options: ReplayOptions, *, as_json: bool) -> int:
    """Replay all combinations and print the results; return 0."""
    for name in options.policies:
        policy(name)
    routers = options.routers if options.num_replicas > 1 else [""]
    for name in filter(None, routers):
        make_router(name)
    if options.plot is not None:
        check_plot_path(options.plot)
    machines = [options.setup.machine(size) for size in options.memory]
    rows = []
    for name in _names(options.traces):
        lanes = options.setup.lanes(name)
        for machine in machines:
            for policy_name, router in product(options.policies, routers):
                result = _replay(lanes, machine, policy_name, router, options.num_replicas)
                rows.append(Row(Path(name).name, result))
                if not as_json:
                    print("\n".join(table(rows) if len(rows) == 1 else table(rows)[-1:]), flush=True)
    if options.plot is not None:
        write_plot(options.plot, [(row.trace, row.result) for row in rows])
    if as_json:
        print(json.dumps({"version": VERSION, "python": platform.python_version(), "rows": list(as_data(rows))}))
    return 0


def _names(traces: Sequence[str]) -> Iterable[str]:
    for name in traces:
        yield from SYNTHETIC if name == "synthetic" else (name,)


def _replay(lanes: list[Lane], machine: Machine, policy_name: str, router: str, num_replicas: int) -> Result:
    chosen = make_router(router) if router else None
    replay = Replay(machine, policy_name, num_replicas=num_replicas, router=chosen)
    replay.result.router = router
    with tqdm(desc=router or policy_name, disable=None, unit="request", leave=False, delay=2) as bar:
        return replay.run(lanes, bar.update)


COLUMNS = (
    f"{'trace':<28} {'memory':>9} {'policy':<14}{'requests':>9}{'hit %':>8}{'ideal %':>8}"
    f"{'computed':>10}{'recomputed':>11}{'TTFT p50':>10}{'p90 ms':>9}{'slots %':>8}{'preempted':>10}"
    "  misses, tokens per request"
)


FLEET_COLUMNS = (
    f"{'trace':<28} {'memory':>9} {'policy':<10}{'replicas':>9} {'router':<13}{'requests':>9}{'hit %':>8}{'ideal %':>8}"
    f"{'computed':>10}{'recomputed':>11}{'TTFT p50':>10}{'p90 ms':>9}{'imbalance':>10}{'hash':>6}{'route us':>9}"
)


def table(rows: Sequence[Row]) -> list[str]:
    """Return the table's lines. Computed and recomputed are prompt tokens per request.

    Of replays on several replicas, memory is that of each; imbalance is the busiest one's time in steps over the mean,
    and *hash* and *route* what the router took per request to hash a prompt, and for all else.
    """
    if rows[0].result.num_replicas > 1:
        return [FLEET_COLUMNS, *map(_fleet_line, rows)]
    return [COLUMNS, *map(_line, rows)]


def _fleet_line(row: Row) -> str:
    result = row.result
    num_requests = max(result.num_requests, 1)
    refused = f"  {result.num_refused} refused" if result.num_refused else ""
    return (
        f"{row.trace[:28]:<28} {result.memory_bytes / 2**30:>5.4g} GiB {result.policy:<10}{result.num_replicas:>9}"
        f" {result.router:<13}{result.num_requests:>9,}{result.hit_share:>8.1%}{result.ideal_share:>8.1%}"
        f"{result.computed_per_request:>10,.0f}{result.recomputed_per_request:>11,.0f}"
        f"{result.ttft_quantile_s(0.5) * 1e3:>10,.0f}{result.ttft_quantile_s(0.9) * 1e3:>9,.0f}"
        f"{result.imbalance:>10.2f}{result.hashing_s / num_requests * 1e6:>6.0f}"
        f"{result.routing_s / num_requests * 1e6:>9.0f}{refused}"
    )


def _line(row: Row) -> str:
    result = row.result
    held = max(result.slot_bytes + result.block_bytes, 1)
    misses = sorted(result.missed_tokens.items(), key=lambda item: -item[1])
    described = ", ".join(f"{reason} {count // max(result.num_requests, 1):,}" for reason, count in misses if count)
    refused = f"; {result.num_refused} refused" if result.num_refused else ""
    if result.host_bytes:
        refused += f"; host {result.host_bytes / 2**30:.4g} GiB"
    if result.host_bytes or result.disk_bytes:
        refused += f"; {result.num_loads:,} loads of "
        refused += f"{result.loaded_bytes / max(result.num_loads, 1) / 2**20:,.0f} MiB"
    if result.disk_bytes:
        refused += f"; disk {result.disk_bytes / 2**30:.4g} GiB, {result.num_spilled:,} snapshots stored, "
        refused += f"{result.num_disk_loads:,} of the loads"
    return (
        f"{row.trace[:28]:<28} {result.memory_bytes / 2**30:>5.4g} GiB {result.policy:<14}{result.num_requests:>9,}"
        f"{result.hit_share:>8.1%}{result.ideal_share:>8.1%}{result.computed_per_request:>10,.0f}"
        f"{result.recomputed_per_request:>11,.0f}{result.ttft_quantile_s(0.5) * 1e3:>10,.0f}"
        f"{result.ttft_quantile_s(0.9) * 1e3:>9,.0f}{result.slot_bytes / held:>8.0%}"
        f"{result.num_preemptions:>10,}  {described}{refused}"
    )


def as_data(rows: Iterable[Row]) -> Iterable[dict[str, Any]]:
    """Yield each row as plain data."""
    for row in rows:
        result = row.result
        left_out = ("ttft_s", "missed_tokens", "busy_s")
        data = {name: getattr(result, name) for name in Result.__slots__ if name not in left_out}
        yield {
            "trace": row.trace,
            **data,
            "missed_tokens": {reason.value: count for reason, count in result.missed_tokens.items()},
            "ttft_p50_s": result.ttft_quantile_s(0.5),
            "ttft_p90_s": result.ttft_quantile_s(0.9),
            "num_replicas": result.num_replicas,
            "imbalance": result.imbalance,
            "computed_per_request": result.computed_per_request,
            "recomputed_per_request": result.recomputed_per_request,
        }
