"""The server's metrics, and that the dashboard uses no others."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from strandline import LLM, SamplingParams
from strandline.records.account import Reason
from strandline.records.events import CoreStats, HandOverStats, KernelFallback, SpeculationStats
from strandline.records.outputs import RequestTimes
from strandline.server.engines.metrics import ITL_BUCKETS_S, LABELS, RECOMPUTED, Metrics
from tests.cpu.server.process import TIMEOUT_S, ServerProcess, running_server

DASHBOARD = json.loads((Path(__file__).parents[3] / "docs" / "grafana-dashboard.json").read_text())
HISTOGRAM_PARTS = ("_bucket", "_count", "_sum")


@pytest.fixture(scope="module")
def used(bytes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of its own, that has answered a few requests, and audits all hits."""
    with running_server(bytes_dir, tmp_path_factory.mktemp("metrics") / "log", "--audit-rate", "1") as server:
        for prompt in ("a prompt of some length", "a prompt of some length", "another"):
            assert server.post("/v1/completions", prompt=prompt, max_tokens=3, temperature=0).status_code == 200
        yield server


def samples(server: ServerProcess) -> dict[str, float]:
    """Return all samples by name, summed over labels."""
    return samples_of(server.metrics())


def samples_of(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in re.findall(r"^strandline:(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def exposed(**fields: Any) -> str:
    """Return the metrics of an engine that has done nothing but what the fields say."""
    memory = dict.fromkeys(("slots_in_use", "blocks_in_use", "free"), 0)
    return Metrics("model").expose([CoreStats(0, 0, 0, 0, 0, {}, {}, {}, 0, 0, 0, memory, **fields)]).decode()


HANDING_OVER = exposed(
    hand_over=HandOverStats(
        pulls={"done": 3, "stalled": 1},
        gives={"done": 2},
        fetched_bytes=300,
        fetched_s=0.5,
        given_bytes=200,
        given_s=0.25,
        num_leases=4,
        leases_ended={"fetched": 2, "expired": 5},
    )
)
SPECULATING = exposed(
    speculation=SpeculationStats(10, 20, (9, 4)),
    speculation_by_method={"mtp": SpeculationStats(6, 12, (6, 2)), "suffix": SpeculationStats(4, 8, (3, 2))},
)


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    variables = [variable["definition"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
    return [target["expr"] for panel in panels() for target in panel["targets"]] + variables


def test_every_metric_of_the_dashboard_is_there(used: ServerProcess) -> None:
    there = samples_of(SPECULATING) | samples_of(HANDING_OVER) | samples(used)
    asked = {name for query in queries() for name in re.findall(r"strandline:(\w+)", query)}
    assert asked - set(there) == set()
    base = {re.sub("|".join(f"{part}$" for part in HISTOGRAM_PARTS), "", name) for name in there}
    shown = {re.sub(r"_bucket$", "", name) for name in asked}
    assert {name for name in base if not name.endswith("_created")} == shown, "what is counted is also shown"


def test_labels_of_the_dashboard_are_those_of_the_metrics(used: ServerProcess) -> None:
    text = SPECULATING + HANDING_OVER + used.metrics()
    for query in queries():
        for label, name in re.findall(r"sum by \((\w+)\) \(\w*\(?strandline:(\w+)", query):
            assert re.search(rf'^strandline:{name}\{{[^}}]*\b{label}="', text, re.MULTILINE), (name, label)
    for panel in panels():
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert f"by ({label})" in target["expr"]


def test_the_dashboard_is_whole() -> None:
    """As Grafana wants it: ids are unique, panels do not overlap and stay on the grid of 24, brackets close."""
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        own = {(grid["x"] + x, grid["y"] + y) for x in range(grid["w"]) for y in range(grid["h"])}
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < 24
        cells |= own
    for query in queries():
        assert all(query.count(left) == query.count(right) for left, right in ("()", "[]", "{}")), query
    for panel in panels():
        assert panel["title"]
        assert panel["description"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references))


def test_hits_misses_and_memory_add_up(used: ServerProcess) -> None:
    found = samples(used)
    queried = found["prefix_cache_queries_total"]
    assert queried == found["prefix_cache_hits_total"] + found["prefix_cache_misses_total"] == 2 * 23 + 7
    assert found["prefix_cache_hits_total"] >= 23
    assert found["cache_memory_bytes"] == pytest.approx(16 * 2**20, rel=0.1)
    assert found["kv_cache_usage_perc"] < 1


def test_lengths_and_times_are_counted_for_each_request(used: ServerProcess) -> None:
    found = samples(used)
    assert (found["request_prompt_tokens_sum"], found["request_generation_tokens_sum"]) == (2 * 23 + 7, 3 * 3)
    for name in ("time_to_first_token_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds"):
        assert found[f"{name}_count"] == 3
        assert found[f"{name}_sum"] > 0
    assert found["inter_token_latency_seconds_count"] == 6


def test_hits_are_replayed_and_compared(used: ServerProcess) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while (found := samples(used))["audited_requests_total"] < 1 and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert (found["audited_requests_total"], found["audited_tokens_total"]) == (1, 3)
    assert 0 <= found["audit_largest_difference"] < 1e-3


def test_kernel_fallbacks_are_exposed_with_their_reasons() -> None:
    text = exposed(kernel_fallbacks=[KernelFallback("paged_attention", "Numba", "STRANDLINE_NUMBA is 0")])
    labels = 'backend="Numba",engine="0",model_name="model",operation="paged_attention",reason="STRANDLINE_NUMBA is 0"'
    assert f"strandline:kernel_fallback_info{{{labels}}} 1.0" in text


def test_drafts_are_counted_in_all_by_position_and_by_method() -> None:
    label = 'engine="0",model_name="model"'
    for name, value in (("drafts", 10), ("draft_tokens", 20), ("accepted_tokens", 13)):
        assert f"strandline:spec_decode_num_{name}_total{{{label}}} {value}.0" in SPECULATING
    for position, value in enumerate((9, 4)):
        labels = f'{label},position="{position}"'
        assert f"strandline:spec_decode_num_accepted_tokens_per_pos_total{{{labels}}} {value}.0" in SPECULATING
    for method, drafted, accepted in (("mtp", 12, 8), ("suffix", 8, 5)):
        labels = f'engine="0",method="{method}",model_name="model"'
        assert f"strandline:spec_decode_draft_tokens_by_method_total{{{labels}}} {drafted}.0" in SPECULATING
        assert f"strandline:spec_decode_accepted_tokens_by_method_total{{{labels}}} {accepted}.0" in SPECULATING
    assert not any(name.startswith("spec_decode") for name in samples_of(exposed()))


def test_hand_over_is_counted_by_outcome_and_direction() -> None:
    label = 'engine="0",model_name="model"'
    for sample in (
        f'pulls_total{{{label},outcome="done"}} 3.0',
        f'pulls_total{{{label},outcome="stalled"}} 1.0',
        f'gives_total{{{label},outcome="done"}} 2.0',
        f'bytes_total{{direction="fetched",{label}}} 300.0',
        f'seconds_total{{direction="given",{label}}} 0.25',
        f"leases{{{label}}} 4.0",
        f'leases_ended_total{{end="expired",{label}}} 5.0',
    ):
        assert f"strandline:kv_transfer_{sample}" in HANDING_OVER
    assert not any(name.startswith("kv_transfer") for name in samples_of(exposed()))


def test_recomputed_are_those_reasons_that_say_so() -> None:
    new = {Reason.FIRST_SEEN, Reason.DIVERGED, Reason.OTHER_SALT, Reason.NOT_ASKED}
    assert {reason.value for reason in Reason} == RECOMPUTED | {reason.value for reason in new}


def test_snapshots_resident_are_those_that_were_taken_and_not_evicted(bytes_dir: Path) -> None:
    llm = LLM(str(bytes_dir), memory="16MiB", device="cpu")
    stats = llm.engine.core.stats
    assert stats().num_snapshots == 0
    llm.generate(["one prompt", "another prompt"], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
    after = stats()
    assert 0 < after.num_snapshots <= sum(after.snapshots_taken.values()) - after.num_snapshots_evicted
    assert after.bytes_by_use["slots_evictable"] == after.num_snapshots * llm.engine.core.spec.slab_bytes


def test_times_between_tokens_are_exposed_as_prometheus_client_does() -> None:
    gaps_s = (0.0, ITL_BUCKETS_S[3], 0.0101, 0.3, 7.0)
    metrics, registry = Metrics("model", num_engines=2), CollectorRegistry()
    stream, now_s = _Stream(), 100.0
    metrics.observe(stream, now_s, 1)  # type: ignore[arg-type]
    wanted = Histogram(
        "strandline:inter_token_latency_seconds", "Token to token.", LABELS, buckets=ITL_BUCKETS_S, registry=registry
    )
    wanted.labels("model", "0")
    for gap_s in gaps_s:
        before_s, now_s = now_s, now_s + gap_s
        metrics.observe(stream, now_s, 1)  # type: ignore[arg-type]
        wanted.labels("model", "1").observe(now_s - before_s)

    def lines(exposition: bytes) -> set[str]:
        found = (line for line in exposition.decode().splitlines() if "inter_token_latency" in line)
        return {line for line in found if "_created{" not in line}

    assert lines(metrics.expose([None, None])) == lines(generate_latest(registry))


class _Stream:
    """A request that gets tokens."""

    request_id = "a"
    is_finished = False
    times = RequestTimes(0.0)
