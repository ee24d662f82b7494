"""The list of ``strandline serve``'s flags, so that it changes on purpose only."""

import argparse
from dataclasses import fields

import pytest

from strandline.cli import build_parser
from strandline.config import EngineConfig
from strandline.errors import ConfigError
from strandline.server.config import ServerConfig

FLAGS = [
    "--allow-credentials", "--allow-non-finite-weights", "--allow-runtime-lora", "--allowed-headers",
    "--allowed-hosts", "--allowed-local-media-path",
    "--allowed-media-domains", "--allowed-methods", "--allowed-origins", "--api-key", "--api-keys-file",
    "--async-scheduling", "--audit-rate", "--cache-page", "--chat-template", "--client-timeout-s",
    "--data-parallel-size", "--default-chat-template-kwargs", "--dequantize", "--deterministic", "--device",
    "--disk-cache", "--disk-cache-size",
    "--distributed-executor-backend", "--dtype", "--enable-admin-endpoints", "--enable-auto-tool-choice",
    "--enable-log-requests", "--enable-lora", "--enable-prefix-caching", "--enable-return-routed-experts",
    "--enable-ssl-refresh", "--enforce-eager",
    "--gpu-memory-utilization", "--host", "--host-memory", "--keep-client-telemetry", "--kv-cache-dtype",
    "--kv-events-config", "--kv-transfer-config", "--language-model-only", "--limit-mm-per-prompt", "--load-format",
    "--log-format", "--log-level", "--long-prefill-token-threshold", "--lora-modules", "--lora-target-modules",
    "--mamba-block-size",
    "--mamba-cache-mode", "--max-body-bytes", "--max-concurrent-requests", "--max-image-tokens", "--max-lora-rank",
    "--max-loras", "--max-model-len", "--max-num-batched-tokens", "--max-num-seqs", "--max-queue",
    "--max-requests-per-minute", "--max-tokens-per-minute", "--memory", "--merge-lora", "--no-async-scheduling",
    "--no-enable-prefix-caching", "--object-store", "--object-store-size", "--otlp-traces-endpoint",
    "--override-generation-config", "--parse-special-tokens", "--port", "--reasoning-config", "--reasoning-field",
    "--reasoning-parser",
    "--remembered-answers", "--request-timeout-s", "--response-store", "--restart", "--salt-per-key",
    "--scheduling-policy", "--seed", "--served-model-name", "--snapshot-dtype", "--speculative-config",
    "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-certfile", "--ssl-keyfile", "--stream-interval",
    "--stream-ping-interval-s", "--tensor-parallel-size", "--tokenizer", "--tool-call-parser",
    "--weight-transfer-config", "-dp", "-tp",
]  # fmt: skip

OF_VLLM = {
    "--host": "0.0.0.0", "--port": "8001", "--served-model-name": "a", "--api-key": "k", "--chat-template": "{}",
    "--tokenizer": "t", "--dtype": "bfloat16", "--kv-cache-dtype": "fp8", "--load-format": "dummy",
    "--max-model-len": "100",
    "--max-num-seqs": "4", "--max-num-batched-tokens": "512", "--seed": "1", "--tool-call-parser": "hermes",
    "--reasoning-parser": "qwen3", "--long-prefill-token-threshold": "2048", "--tensor-parallel-size": "2",
    "--scheduling-policy": "priority", "--allowed-media-domains": "example.com", "--allowed-local-media-path": "/tmp",
    "--limit-mm-per-prompt": '{"image": 2}', "--lora-modules": "sql=adapters/sql", "--max-loras": "4",
    "--max-lora-rank": "32",
    "--data-parallel-size": "2", "--allowed-origins": '["https://app.example"]', "--allowed-methods": '["POST"]',
    "--allowed-headers": '["Authorization"]',
    "--kv-events-config": '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}',
    "--weight-transfer-config": '{"backend": "nccl"}',
    "--kv-transfer-config": '{"kv_connector": "SocketConnector", "kv_role": "kv_both", "kv_ip": "10.0.0.1"}',
    "--reasoning-config": '{"reasoning_start_str": "<think>", "reasoning_end_str": "So.</think>"}',
    "--default-chat-template-kwargs": '{"enable_thinking": false}',
    "--override-generation-config": '{"temperature": 0.7}',
    "--otlp-traces-endpoint": "http://127.0.0.1:4317", "--stream-interval": "4",
    "--ssl-certfile": "cert.pem", "--ssl-keyfile": "key.pem", "--ssl-ca-certs": "ca.pem", "--ssl-cert-reqs": "2",
    "--speculative-config": '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}',
}  # fmt: skip
"""Flags that mean what they mean in vLLM, with a value each."""


def serve_parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = build_parser().parse_args(["serve"]).parser
    return parser


def test_these_are_the_flags() -> None:
    assert sorted(set(serve_parser()._option_string_actions) - {"-h", "--help"}) == FLAGS


def test_vllms_flags_are_taken_as_they_are() -> None:
    given = [part for pair in OF_VLLM.items() for part in pair]
    options = build_parser().parse_args(["serve", "some/model", *given, "--no-enable-prefix-caching"])
    assert (options.model, options.host, options.port, options.dtype) == ("some/model", "0.0.0.0", 8001, "bfloat16")
    assert not options.enable_prefix_caching


def test_flag_defaults_equal_configuration_defaults() -> None:
    options = build_parser().parse_args(["serve"])
    assert (options.model, options.host) == ("demo", "127.0.0.1")
    engine = EngineConfig(model="demo")
    for config in (engine, ServerConfig()):
        for field in fields(config):
            assert getattr(options, field.name, getattr(config, field.name)) == getattr(config, field.name)


@pytest.mark.parametrize(
    ("wrong", "nearest"), [("--max-num-seq", "--max-num-seqs"), ("--api-keys", "--api-key"), ("--ports", "--port")]
)
def test_an_unknown_flag_names_the_nearest(wrong: str, nearest: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", wrong, "4"])
    assert f"unknown argument {wrong}; did you mean {nearest}?" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name", "--allowed-hosts"])
def test_a_flag_given_twice_keeps_both_values(flag: str) -> None:
    options = build_parser().parse_args(["serve", flag, "a", "b", flag, "c"])
    assert getattr(options, flag[2:].replace("-", "_")) == ["a", "b", "c"]
    assert getattr(build_parser().parse_args(["serve"]), flag[2:].replace("-", "_")) == ()


@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name"])
@pytest.mark.parametrize("blank", ["", " "])
def test_blank_values_are_refused_by_flag(flag: str, blank: str) -> None:
    values = getattr(build_parser().parse_args(["serve", flag, "a", blank]), flag[2:].replace("-", "_"))
    with pytest.raises(ConfigError, match=f"{flag} must not be empty or blank"):
        ServerConfig(**{flag[2:].replace("-", "_"): values})


def test_bodies_may_be_larger_where_the_model_reads_pictures() -> None:
    assert [ServerConfig().body_limit(has_pictures=has) for has in (False, True)] == [8 * 2**20, 64 * 2**20]
    assert ServerConfig(max_body_bytes=5).body_limit(has_pictures=True) == 5
