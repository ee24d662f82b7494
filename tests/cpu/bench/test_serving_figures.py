"""Figures of the load generator, computed by hand; the table and the file in vLLM's words."""

import json
from math import inf
from pathlib import Path

import pytest

from strandline.bench.serving.figures import figures_of
from strandline.bench.serving.load import Run
from strandline.bench.serving.options import Pace, Wanted, pace_of, wanted_of
from strandline.bench.serving.result import read_results, record, save, table, warnings
from strandline.bench.serving.session import Answer
from strandline.errors import ConfigError
from tests.cpu.bench.conftest import serve_options

ANSWERS = [
    Answer(0.0, 0.1, 0.5, [0.1, 0.3], "abc", [], 10, 3, 4, 6),
    Answer(0.2, 0.3, 0.3, [], "a", [], 20, 1, 8, 12),
    Answer(1.4, 0.2, 0.6, [0.2, 0.2], "abcde", [], 30, 5, 12, 12),
    Answer(0.3, error="HTTP 500: oh"),
]

OF_VLLM = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput",
    "max_output_tokens_per_s", "max_concurrent_requests",
    "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "std_tpot_ms",
    "p99_tpot_ms", "mean_itl_ms", "median_itl_ms", "std_itl_ms", "p99_itl_ms",
}  # fmt: skip
DETAILS_OF_VLLM = {"input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors"}


def test_figures_are_those_worked_out_by_hand() -> None:
    wanted = Wanted(("ttft", "tpot", "itl", "e2el"), (50.0, 99.9), {"ttft": 250.0, "e2el": 550.0})
    figures = figures_of(Run(ANSWERS, duration_s=2.0), wanted)
    assert (figures["completed"], figures["failed"]) == (3, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (60, 9)
    assert (figures["request_throughput"], figures["output_throughput"]) == (1.5, 4.5)
    assert figures["total_token_throughput"] == 34.5
    assert figures["request_goodput"] == 0.5, "the second is late at first, the third at last"
    assert figures["mean_ttft_ms"] == pytest.approx(200)
    assert figures["p50_itl_ms"] == pytest.approx(200)
    assert figures["median_tpot_ms"] == pytest.approx(150), "of (0.5 - 0.1) / 2 and (0.6 - 0.2) / 4; one token has none"
    assert figures["p99.9_e2el_ms"] == pytest.approx(599.8)
    assert figures["max_concurrent_requests"] == 2
    assert figures["max_output_tokens_per_s"] == pytest.approx(4), "of the first and the second"
    assert (figures["total_cached_tokens"], figures["total_ideal_cached_tokens"]) == (24, 30)
    assert (figures["cache_hit_rate"], figures["ideal_cache_hit_rate"]) == (0.4, 0.5)
    quantiles = figures["ttft_ms_quantiles"]
    assert (len(quantiles), quantiles[0], quantiles[50], quantiles[100]) == (101, 100, 200, 300)


def test_requests_are_listed_in_the_order_in_which_they_began() -> None:
    figures = figures_of(Run(ANSWERS, duration_s=2.0), Wanted())
    assert figures["input_lens"] == [10, 20, 0, 30]
    assert figures["errors"] == ["", "", "HTTP 500: oh", ""]


def test_a_run_without_answers_has_figures_too() -> None:
    figures = figures_of(Run([], duration_s=0.0, num_interrupted=3), Wanted())
    assert (figures["completed"], figures["mean_ttft_ms"], figures["cache_hit_rate"]) == (0, 0.0, None)
    assert "Interrupted requests:                    3" in table(figures, Pace(), Wanted())


def test_the_table_is_vllms_with_the_cache_in_it() -> None:
    pace = Pace(request_rate=2.0, max_concurrency=4)
    lines = table(figures_of(Run(ANSWERS, duration_s=2.0), Wanted()), pace, Wanted())
    assert lines[:9] == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     3",
        "Failed requests:                         1",
        "Maximum request concurrency:             4",
        "Request rate configured (RPS):           2.00",
        "Benchmark duration (s):                  2.00",
        "Total input tokens:                      60",
        "Total generated tokens:                  9",
        "Request throughput (req/s):              1.50",
    ]
    assert "Cache hit rate (%):                      40.00" in lines
    assert "Ideal cache hit rate (%):                50.00" in lines
    assert lines.index("---------------Time to First Token----------------") < lines.index(
        "P99 TTFT (ms):                           298.00"
    )


def test_figures_missing_from_a_server_are_not_zero() -> None:
    figures = figures_of(Run([Answer(0, 0.1, 0.2, [], "a", [], 5, 1)], 1.0), Wanted())
    assert "Cached prompt tokens:                    not reported" in table(figures, Pace(), Wanted())


def test_a_cache_warmed_by_another_run_is_pointed_out() -> None:
    figures = figures_of(Run([Answer(0, 0.1, 0.2, [], "a", [], 5, 1, 4, 0)], 1.0), Wanted())
    assert any("--cache-salt random" in line for line in warnings(figures, 0))


def test_busy_load_generator_is_pointed_out() -> None:
    busy, idle = Run(duration_s=2.0, client_cpu_s=1.9), Run(duration_s=2.0, client_cpu_s=0.5)
    assert any("used 95% of its one core" in line for line in warnings(figures_of(busy, Wanted()), 0))
    assert warnings(figures_of(idle, Wanted()), 0) == []
    assert "Load generator's CPU (% of a core):      25.0" in table(figures_of(idle, Wanted()), Pace(), Wanted())


@pytest.mark.parametrize("flags", [(), ("--save-detailed",)], ids=["plain", "detailed"])
def test_the_file_has_vllms_fields(tmp_path: Path, flags: tuple[str, ...]) -> None:
    flags = (*flags, "--result-dir", str(tmp_path / "new"), "--metadata", "gpu=none", "--goodput", "ttft:100")
    options = serve_options(*flags)
    data = record(options, "org/name", None, figures_of(Run(ANSWERS, 2.0), wanted_of(options)))
    path = save(options, data)
    assert path.name == f"openai-infqps-name-{data['date']}.json"
    [read] = read_results(str(path))
    assert read == json.loads(json.dumps(data))
    assert set(read) >= OF_VLLM | {"gpu", "total_cached_tokens", "ideal_cache_hit_rate"}
    assert (set(read) >= DETAILS_OF_VLLM) == ("--save-detailed" in flags)
    assert (read["request_rate"], read["request_goodput"]) == ("inf", 0.5)


def test_results_can_be_added_to_one_file(tmp_path: Path) -> None:
    options = serve_options("--append-result", "--result-dir", str(tmp_path), "--result-filename", "all.json")
    data = record(options, "m", None, figures_of(Run(ANSWERS, 2.0), Wanted()))
    save(options, data)
    path = save(options, {**data, "label": "second"})
    assert [row["label"] for row in read_results(str(path))] == [None, "second"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["--request-rate", "0"], "--request-rate must be above 0"),
        (["--burstiness", "-1"], "--burstiness must be above 0"),
        (["--max-concurrency", "0"], "--max-concurrency must be above 0"),
        (["--ramp-up-strategy", "linear"], "needs --ramp-up-start-rps"),
        (["--ramp-up-end-rps", "3"], "need --ramp-up-strategy"),
        (
            [
                "--ramp-up-strategy",
                "linear",
                "--ramp-up-start-rps",
                "1",
                "--ramp-up-end-rps",
                "2",
                "--request-rate",
                "3",
            ],
            "either --request-rate or --ramp-up-strategy",
        ),
        (["--percentile-metrics", "ttft,tpt"], "got 'tpt'"),
        (["--metric-percentiles", "50,x"], "numbers from 0 to 100"),
        (["--metric-percentiles", "101"], "numbers from 0 to 100"),
        (["--goodput", "ttft:fast"], "got ttft:fast"),
        (["--goodput", "itl:5"], "got itl:5"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_value_is_refused_by_name(flags: list[str], message: str) -> None:
    options = serve_options(*flags)
    with pytest.raises(ConfigError, match=message):
        (pace_of(options), wanted_of(options))


def test_the_defaults_are_vllms() -> None:
    options = serve_options()
    assert pace_of(options) == Pace(request_rate=inf, burstiness=1.0, num_requests=1000, seed=0)
    assert wanted_of(options) == Wanted(("ttft", "tpot", "itl"), (99.0,), None)
    assert (options.dataset_name, options.random_input_len, options.random_output_len) == ("random", 1024, 128)
