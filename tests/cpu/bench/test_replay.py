"""Replays: what is read from each format, what the figures mean, and that they come out the same again."""

import json
from dataclasses import asdict, astuple, replace
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.bench.cost import H200
from strandline.bench.ideal import SeenPrefixes
from strandline.bench.known_models import GEOMETRIES, cost_model, geometry
from strandline.bench.replay import Replay, Result
from strandline.bench.replica import Machine
from strandline.bench.synthetic import SYNTHETIC, Conversations, synthetic_lanes
from strandline.bench.traces import Lane, random_tokens, read_trace
from strandline.cache.inspection.invariants import check
from strandline.cli import main
from strandline.errors import ConfigError
from strandline.records.tokens import encode
from strandline.routing.names import ROUTERS, make_router

MODEL = "Qwen3.5-35B-A3B"
CONFIGS = Path(__file__).parents[3] / "benchmarks" / "configs"
ATTENTION_ONLY = str(CONFIGS / "qwen3-8b")


def replay(lanes: list[Lane], *, gib: float = 40, name: str = "auto", model: str = MODEL) -> Result:
    machine = Machine(geometry(model), cost_model(model), int(gib * 2**30))
    replay = Replay(machine, name)
    result = replay.run(lanes)
    check(replay.cache)
    return result


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def session(name: str, t0: float = 0.0) -> dict[str, object]:
    """A session of three turns: the second extends the first, the third rewinds a block; and a sub-agent."""
    requests: list[dict[str, object]] = [
        {"t": t0, "in": 330, "out": 20, "think_time": 0.0, "lcp": 0, "new": [[1, 5]]},
        {"t": t0 + 5, "in": 650, "out": 9, "think_time": 2.0, "lcp": 5, "new": [[6, 5]]},
        {"t": t0 + 6, "type": "subagent", "tool_tokens": 64, "system_tokens": 6, "requests": [
            {"t": 0.0, "in": 140, "out": 5, "lcp": 0, "new": [[100, 2]]}]},
        {"t": t0 + 9, "in": 700, "out": 9, "think_time": 2.0, "lcp": 9, "new": [[50, 1]]},
    ]  # fmt: skip
    return {"id": name, "block_size": 64, "tool_tokens": 100, "system_tokens": 29, "requests": requests}


def test_a_recurrent_models_slot_is_as_large_as_fifty_blocks() -> None:
    spec = geometry(MODEL)
    assert spec.blocks_per_slab == 50
    assert round(spec.raw_slot_bytes / 2**20) == 61


def test_sessions_extend_rewind_and_share_their_heads(tmp_path: Path) -> None:
    lanes = read_trace(write(tmp_path / "s.jsonl", [session("a"), session("b")]))
    assert [lane.start_s for lane in lanes] == [0.0, 6.0, 10.0, 16.0]
    first, second, third = lanes[0].calls()
    assert [len(call.prompt) // 4 for call in (first, second, third)] == [330, 650, 700]
    assert second.prompt.startswith(first.prompt + first.output)
    assert third.prompt.startswith(second.prompt[: 9 * 256])
    assert not third.prompt.startswith(second.prompt[: 9 * 256 + 4])
    other = next(lanes[2].calls())
    assert other.prompt[: 129 * 4] == first.prompt[: 129 * 4]
    assert other.prompt[129 * 4 :][:4] != first.prompt[129 * 4 :][:4]
    assert [bytes(call.prompt) for call in lanes[0].calls()] == [bytes(c.prompt) for c in (first, second, third)]


def test_hash_blocks_are_512_tokens_and_global(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [3, 4]},
        {"timestamp": 2500, "input_length": 520, "output_length": 7, "hash_ids": [3, 9]},
    ]
    lanes = read_trace(write(tmp_path / "b.jsonl", rows))
    first, second = (next(lane.calls()) for lane in lanes)
    assert (len(first.prompt) // 4, len(second.prompt) // 4, lanes[1].start_s) == (600, 520, 2.5)
    assert first.prompt[:2048] == second.prompt[:2048]
    assert first.prompt[2048:2052] != second.prompt[2048:2052]


def test_text_and_token_ids_keep_sessions_in_order(tmp_path: Path) -> None:
    text: list[dict[str, object]] = [
        {"timestamp": 9_000_000, "session_id": "x", "input": "one two three", "output": "four"},
        {"timestamp": 1_000_000, "session_id": "x", "input": "one two", "output": "three"},
    ]
    (lane,) = read_trace(write(tmp_path / "t.jsonl", text))
    early, late = lane.calls()
    assert late.prompt.startswith(early.prompt)
    assert (early.at_s, late.at_s, lane.start_s) == (0.0, 8.0, 0.0)
    tokens: list[dict[str, object]] = [{"prompt": [1, 2, 3], "output": [4]}, {"prompt": [7], "output": 3, "t": 1.5}]
    first, second = (next(lane.calls()) for lane in read_trace(write(tmp_path / "i.jsonl", tokens)))
    assert (bytes(first.prompt), first.output, len(second.output)) == (encode([1, 2, 3]), encode([4]), 12)


def test_text_with_roles_is_marked_after_system_prompt_and_history(tmp_path: Path) -> None:
    system, history, last = "system: " + "a b " * 20, "\n\nuser: " + "c d " * 20, "\n\nassistant: e\n\nuser: user: f"
    inputs = [system + history + last, history[2:] + last, "user: f", "no roles " * 30, "user: a, and system: b " * 9]
    rows: list[dict[str, object]] = [
        {"timestamp": index, "session_id": "x", "input": text, "output": "g"} for index, text in enumerate(inputs)
    ]
    (lane,) = read_trace(write(tmp_path / "t.jsonl", rows))
    calls = list(lane.calls())
    whole, headless = calls[0], calls[1]
    first, second = whole.marks
    assert whole.prompt[4 * first :] == headless.prompt
    assert headless.marks == (second - first,)
    assert len(whole.prompt) // 4 - second == len(["user", ":", " ", "user", ":", " ", "f"])
    assert [call.marks for call in calls[2:]] == [(), (), ()]


def test_an_unknown_format_or_name_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is needed"):
        read_trace(write(tmp_path / "x.jsonl", [{"what": 1}]))
    with pytest.raises(ConfigError, match="prefix-4096"):
        synthetic_lanes("nothing")
    with pytest.raises(ConfigError, match="known are"):
        geometry("nothing")


def test_the_ideal_is_exact_inside_a_block() -> None:
    seen = SeenPrefixes()
    data = bytearray(random_tokens("a", 300))
    assert [seen.add(data[: n * 4]) for n in (100, 64, 130, 300, 200)] == [0, 64, 100, 130, 200]
    other = bytearray(random_tokens("b", 50))
    assert seen.add(data[: 77 * 4] + other) == 77
    assert seen.add(data[: 77 * 4] + other) == 127
    assert seen.add(data + other) == 300
    assert seen.add(data) == 300


@given(st.lists(st.lists(st.sampled_from([0, 1, 1, 1]), max_size=40)))
def test_ideal_is_the_longest_prefix_shared_with_earlier_sequences(histories: list[list[int]]) -> None:
    seen = SeenPrefixes()
    added: list[list[int]] = []
    for history in histories:
        tokens = [token for token in history for _ in range(7)]
        shared = max((num_shared(tokens, other) for other in added), default=0)
        assert seen.add(bytearray(encode(tokens))) == shared
        added.append(tokens)


def num_shared(left: list[int], right: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def test_figures_add_up_and_come_out_the_same_again(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", [session(name) for name in "abcdef"])
    results = [replay(read_trace(path, session_gap_s=1.0), gib=1) for _ in range(2)]
    assert results[0] == results[1]
    result = results[0]
    assert result.num_requests == 24
    assert result.prompt_tokens == result.hit_tokens + sum(result.missed_tokens.values())
    assert result.hit_tokens <= result.ideal_tokens
    assert len(result.ttft_s) == 24


def test_conversations_run_together_in_simulated_time() -> None:
    result = replay(synthetic_lanes("chat"))
    alone = sum(replay([lane]).simulated_s for lane in synthetic_lanes("chat"))
    assert result.simulated_s < 0.5 * alone


def test_prompt_larger_than_memory_is_refused_and_counted(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": [1] * 40_000, "output": 1}, {"prompt": [1] * 100, "output": 1}]
    result = replay(read_trace(write(tmp_path / "i.jsonl", rows)), gib=0.6)
    assert (result.num_requests, result.num_refused) == (1, 1)


def test_sessions_of_workloads_are_limited_as_those_of_traces(capsys: pytest.CaptureFixture[str]) -> None:
    num_requests = []
    for flags in ([], ["--max-sessions", "2"]):
        assert main(["bench", "replay", "chat", "--json", *flags]) == 0
        [row] = json.loads(capsys.readouterr().out)["rows"]
        num_requests.append(row["num_requests"])
    assert num_requests == [64, 64 * 2 // len(synthetic_lanes("chat"))]


def test_the_command_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write(tmp_path / "s.jsonl", [session("a")]))
    arguments = ["bench", "replay", path, "resend", "--memory", "1GiB,2GiB", "--policy", "auto,off"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 8
    assert main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["policy"] for row in rows] == ["auto", "off"] * 4
    assert main(["bench", "replay", path, "--policy", "best"]) == 2


@pytest.mark.parametrize("name", SYNTHETIC)
def test_every_workload_hits_something(name: str) -> None:
    result = replay(synthetic_lanes(name), gib=100)
    assert 0 < result.hit_tokens <= result.ideal_tokens


@pytest.mark.parametrize("name", ["Qwen3.5-35B-A3B", "Qwen3.5-4B"])
def test_a_geometry_is_the_same_by_name_and_by_configuration(name: str) -> None:
    assert geometry(str(CONFIGS / name.lower() / "config.json")) == GEOMETRIES[name]
    assert geometry(str(CONFIGS / name.lower())) == GEOMETRIES[name]


@pytest.mark.parametrize("name", ["Qwen3.5-35B-A3B", "Qwen3.5-4B"])
def test_estimated_costs_are_within_four_times_the_measured_ones(name: str) -> None:
    estimated = cost_model(str(CONFIGS / name.lower()))
    for guess, measured in zip(astuple(estimated), astuple(H200[name]), strict=True):
        assert measured / 4 < guess < measured * 4


def test_divided_memory_has_no_share_for_windows() -> None:
    spec = replace(geometry(str(CONFIGS / "gpt-oss-20b")), has_window_blocks=True)
    with pytest.raises(ConfigError, match="another policy"):
        Replay(Machine(spec, H200["Qwen3.5-4B"], 2**30), "8192-lru")


def test_divided_memory_refuses_what_its_share_for_blocks_cannot_hold(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": [index] * 30_000, "output": 1} for index in range(3)]
    lanes = read_trace(write(tmp_path / "i.jsonl", rows))
    shared, divided = (replay(lanes, gib=1, name=name) for name in ("auto", "8192-ends-lru"))
    assert (shared.num_requests, shared.num_refused) == (3, 0)
    assert (divided.num_requests, divided.num_refused) == (0, 3)


@pytest.mark.parametrize("num_tokens", [9_000, 12_000, 15_800])
def test_divided_memory_serves_whatever_fits_its_share(tmp_path: Path, num_tokens: int) -> None:
    rows: list[dict[str, object]] = [{"prompt": [index] * num_tokens, "output": 100} for index in range(4)]
    result = replay(read_trace(write(tmp_path / "i.jsonl", rows)), gib=1, name="8192-ends-lru")
    assert (result.num_requests, result.num_refused, len(result.ttft_s)) == (4, 0, 4)


@pytest.mark.parametrize("name", ["chat", "edit-last", "prefix-1500", "reasoning-agent"])
def test_models_without_states_hit_all_that_is_cached(name: str) -> None:
    """All but the last token of each answer, which has not been through the model."""
    result = replay(synthetic_lanes(name), model=ATTENTION_ONLY)
    assert 0 <= result.ideal_tokens - result.hit_tokens < result.num_requests


def test_blocks_of_conversations_are_kept_by_rate_not_by_age() -> None:
    by_rate, by_age = (
        replay([*Conversations(24, 8, 600, 150, 200).lanes()], gib=6, name=name, model=ATTENTION_ONLY)
        for name in ("auto", "auto-lru")
    )
    assert by_age.hit_tokens < 0.9 * by_rate.hit_tokens


@pytest.mark.parametrize("host_bytes", [0, 2**30], ids=["alone", "below host memory"])
def test_a_disk_brings_back_what_the_device_evicts(host_bytes: int) -> None:
    lanes, cost = conversations(), cost_model(MODEL)
    without, with_disk = (
        Replay(
            Machine(geometry(MODEL), cost, 2**30, host_bytes=host_bytes, disk_bytes=size, disk_bytes_per_s=96e9), "auto"
        )
        for size in (0, 8 * 2**30)
    )
    assert with_disk.run(lanes).hit_tokens > without.run(lanes).hit_tokens
    assert with_disk.result.num_disk_loads > 0
    assert (with_disk.result.host_bytes, with_disk.result.disk_bytes) == (host_bytes, 8 * 2**30)
    check(with_disk.cache)


def test_host_memory_that_is_too_slow_is_not_loaded_from() -> None:
    fast, slow = (
        Replay(
            Machine(geometry(MODEL), cost_model(MODEL), 2**30, host_bytes=8 * 2**30, host_bytes_per_s=rate), "auto"
        ).run(conversations())
        for rate in (55e9, 1e7)
    )
    assert fast.num_loads > 0 == slow.num_loads
    assert fast.hit_tokens > slow.hit_tokens


# Several replicas


def fleet(lanes: list[Lane], router: str, *, num_replicas: int = 4, speed: float = 0.25) -> Result:
    machine = Machine(geometry(MODEL), cost_model(MODEL).sped_up(speed), 4 * 2**30)
    replay = Replay(machine, "auto", num_replicas=num_replicas, router=make_router(router))
    result = replay.run(lanes)
    for replica in replay.replicas:
        check(replica.cache)
    return result


def figures(result: Result) -> list[object]:
    """Return all figures but those that a clock has measured."""
    return [value for name, value in asdict(result).items() if name not in ("hashing_s", "routing_s")]


def conversations(num: int = 16) -> list[Lane]:
    return [*Conversations(num, 5, 600, 150, 200, think_s=3.0).lanes()]


def test_fleet_of_one_is_a_replay_without_a_router() -> None:
    lanes = conversations(4)
    alone, fleet_of_one = replay(lanes, gib=4), fleet(lanes, "strandline", num_replicas=1, speed=1)
    assert fleet_of_one.routing_s > 0
    assert figures(fleet_of_one) == figures(alone)


@pytest.mark.parametrize("router", ROUTERS)
def test_figures_of_a_fleet_add_up(router: str) -> None:
    result, again = (fleet(conversations(), router) for _ in range(2))
    assert figures(result) == figures(again)
    assert (result.num_requests, len(result.ttft_s), result.num_replicas) == (80, 80, 4)
    assert result.prompt_tokens == result.hit_tokens + sum(result.missed_tokens.values())
    assert result.hit_tokens <= result.ideal_tokens
    assert 1 <= result.imbalance <= 4


def test_router_that_knows_snapshots_hits_and_balances() -> None:
    results = {router: fleet(conversations(), router) for router in ROUTERS}
    ours = results.pop("strandline")
    assert ours.hit_share > 0.95 * ours.ideal_share
    assert ours.hit_share > results["power-of-two"].hit_share + 0.1
    assert ours.hit_share > results["random"].hit_share + 0.1
    # All share a system prompt, for which the prefix tree sends everything to one replica.
    assert results["prefix-tree"].imbalance == 4
    assert ours.imbalance < 3


def test_command_compares_routers(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "replay", "resend", "--replicas", "3", "--memory", "4GiB", "--router", "strandline,random"]
    assert main(arguments) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["router"], row["num_replicas"]) for row in rows] == [("strandline", 3), ("random", 3)]
    assert main(["bench", "replay", "resend", "--replicas", "2", "--router", "best"]) == 2
    assert main(["bench", "replay", "resend", "--replicas", "0"]) == 2


def test_adapters_share_nothing_and_wait_for_their_slots(capsys: pytest.CaptureFixture[str]) -> None:
    """Ten conversations have one system prompt, which those of each adapter share."""
    rows: dict[str, dict[str, float]] = {}
    for name, flags in {
        "none": [],
        "one": ["--lora-modules", "sql"],
        "two": ["--lora-modules", "sql", "chat", "--max-loras", "2"],
        "a slot": ["--lora-modules", "sql", "chat"],
    }.items():
        assert main(["bench", "replay", "chat", "--json", "--memory", "40GiB", "--session-gap", "0", *flags]) == 0
        [rows[name]] = json.loads(capsys.readouterr().out)["rows"]
    hit, ideal = ({name: row[field] for name, row in rows.items()} for field in ("hit_tokens", "ideal_tokens"))
    assert hit["none"] == hit["one"] > hit["two"] > 0
    assert ideal["none"] == ideal["one"] > ideal["two"] >= hit["two"]
    assert rows["a slot"]["simulated_s"] > rows["two"]["simulated_s"]


def test_adapters_need_a_slot() -> None:
    assert main(["bench", "replay", "chat", "--max-loras", "0"]) == 2
