"""The flags of ``strandline bench serve``: vLLM's are taken as they are, and the page names every one."""

import re
from pathlib import Path

from strandline.cli import build_parser
from tests.cpu.bench.conftest import serve_options

PAGE = (Path(__file__).parents[3] / "docs" / "benchmarking.md").read_text()

OF_VLLM = {
    "--base-url": "http://x", "--host": "h", "--port": "1", "--endpoint": "/v1/completions", "--backend": "vllm",
    "--model": "m", "--served-model-name": "s", "--tokenizer": "t", "--dataset-name": "sharegpt",
    "--dataset-path": "f", "--num-prompts": "5", "--random-input-len": "1", "--random-output-len": "2",
    "--random-prefix-len": "3", "--random-range-ratio": "0.5", "--prefix-repetition-prefix-len": "4",
    "--prefix-repetition-suffix-len": "5", "--prefix-repetition-num-prefixes": "6",
    "--prefix-repetition-output-len": "7", "--sharegpt-output-len": "8", "--custom-output-len": "9",
    "--request-rate": "inf", "--burstiness": "2", "--max-concurrency": "3", "--seed": "4", "--num-warmups": "1",
    "--ramp-up-strategy": "linear", "--ramp-up-start-rps": "1", "--ramp-up-end-rps": "2",
    "--percentile-metrics": "ttft", "--metric-percentiles": "50,99", "--goodput": "ttft:5", "--result-dir": "d",
    "--result-filename": "f", "--label": "l", "--metadata": "a=b", "--header": "a=b", "--logprobs": "1",
    "--extra-body": "{}", "--temperature": "0.5", "--top-p": "0.5", "--top-k": "5", "--min-p": "0.1",
    "--frequency-penalty": "0", "--presence-penalty": "0", "--repetition-penalty": "1",
    "--ready-check-timeout-sec": "5", "--lora-modules": "sql", "--lora-assignment": "round-robin",
}  # fmt: skip
SWITCHES_OF_VLLM = [
    *("--ignore-eos", "--save-result", "--save-detailed", "--append-result", "--disable-tqdm"),
    *("--disable-shuffle", "--no-oversample", "--skip-chat-template"),
]


def test_vllms_flags_are_taken_as_they_are() -> None:
    given = [part for pair in OF_VLLM.items() for part in pair]
    options = serve_options(*given, *SWITCHES_OF_VLLM)
    assert (options.random_range_ratio, options.request_rate, options.extra_body) == (0.5, float("inf"), {})
    assert all(getattr(options, name[2:].replace("-", "_")) for name in SWITCHES_OF_VLLM)


def test_every_flag_is_on_the_page_and_no_other() -> None:
    report = build_parser().parse_args(["bench", "report", "x", "-o", "y"]).parser
    flags = {*serve_options().parser._option_string_actions, *report._option_string_actions}
    named = set(re.findall(r"--[a-z][a-z-]+", PAGE.partition("## Other measurements")[0]))
    assert flags - named == {"-h", "--help", "-o", "--output", "--title"}
    assert named - flags == {"--enable-prompt-tokens-details"}, "a flag of vLLM's server"
