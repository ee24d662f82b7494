"""Flags of vLLM and SGLang that no command has, and values that ours do not take, and what to do instead.

Errors about unknown flags and values say so, as do those about options of ``LLM``: they are the flags' names without
dashes.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Final

_STATES: Final = "states and keys and values share one memory, which --memory or --gpu-memory-utilization sets"
_LOGGING: Final = "requests are logged only with --enable-log-requests"
_GRAPHS: Final = "not needed: CUDA graphs are captured for the sizes of steps"
_GRAMMARS: Final = "there is one backend, llguidance"
_KERNELS: Final = "kernels are chosen for the device"
_STATE_DTYPE: Final = "states are float32 unless the model's configuration says otherwise"
_DETECTED: Final = "detected in the model's files"
_ONE_MACHINE: Final = "a server runs on one machine; Ray Serve runs engines on several (docs/routing.md)"
_NOT_NEEDED: Final = "not needed: there is no such choice"
_COLLECTIVES: Final = "not needed: sums over ranks are chosen for the machine"
_EXPERTS: Final = "experts are divided among the ranks of --tensor-parallel-size"
_SPECULATION: Final = "use --speculative-config"
_LOADING: Final = "not needed: weights are read from safetensors in parallel"
_LOG: Final = "use --log-level and --log-format"
_PIPELINE: Final = "pipeline parallelism is not supported yet"
_CONTEXT: Final = "not supported; use --tensor-parallel-size"
_BALANCING: Final = "not needed: the server routes requests to the engines of --data-parallel-size"
_EMBEDDINGS: Final = "prompts are texts, tokens and pictures, not embeddings"
_CLASSES: Final = "parts of the engine cannot be replaced"
_CONFIG: Final = "config.json is read from the model's directory"
_METRICS: Final = "not needed: no metric has to be enabled; docs/server.md lists them"
_TRANSFER: Final = "use --kv-transfer-config"
_ROOT_PATH: Final = "have the proxy remove the path"
_CUSTOM_LOGITS: Final = "not supported; grammars, logit_bias and allowed_token_ids limit tokens"

FOREIGN_FLAGS: Final[Mapping[str, str]] = {
    # Of both.
    "--pipeline-parallel-size": _PIPELINE,
    "--nnodes": _ONE_MACHINE,
    "--node-rank": _ONE_MACHINE,
    "--disable-custom-all-reduce": _COLLECTIVES,
    "--skip-tokenizer-init": "servers need the tokenizer; /inference/v1/generate takes and returns tokens",
    "--model-loader-extra-config": _LOADING,
    "--speculative-model": _SPECULATION,
    "--num-speculative-tokens": _SPECULATION,
    "--data-parallel-size": "only 'strandline serve' runs several engines",
    "--quantization": "quantised weights are detected in the model's files; 'strandline quantize' writes them",
    "--trust-remote-code": "code from a model's repository is never run; docs/models.md lists the architectures",
    "--revision": "name a directory with the revision's files instead",
    "--download-dir": "set HF_HOME",
    # vLLM's.
    "--model": "the model is an argument without a flag: strandline serve MODEL",
    "--block-size": "blocks always have 64 tokens, and hits are exact to the token",
    "--enable-chunked-prefill": "prefill is always chunked: see --max-num-batched-tokens",
    "--enable-prompt-tokens-details": "responses always have cached_tokens",
    "--enable-request-id-headers": "responses always have x-request-id",
    "--enable-server-load-tracking": "/load is always served",
    "--enable-sleep-mode": "not needed: /sleep is served with an API key, or with --enable-admin-endpoints",
    "--enable-expert-parallel": "experts are divided among the ranks of --tensor-parallel-size",
    "--swap-space": "give --host-memory for evicted entries; a preempted request keeps its state",
    "--kv-offloading-size": "use --host-memory, and --disk-cache or --object-store for files",
    "--kv-cache-memory-bytes": "use --memory, the size for keys, values and states together",
    "--max-cpu-loras": "not needed: all adapters that are loaded are in host memory",
    "--compilation-config": "not needed: use --enforce-eager to disable CUDA graphs",
    "--generation-config": "the defaults of sampling are the model's; servers take --override-generation-config",
    "--runner": "not needed: one server generates, scores and embeds",
    "--task": "not needed: one server generates, scores and embeds",
    "--tokenizer-mode": _DETECTED,
    "--mm-processor-kwargs": "use --max-image-tokens to limit the size of pictures",
    "--disable-log-requests": _LOGGING,
    "--disable-log-stats": "not needed: statistics are in /metrics, not in the log",
    "--root-path": _ROOT_PATH,
    "--config": "give the flags themselves",
    "--hf-token": "set HF_TOKEN",
    "--hf-overrides": "change the model's config.json",
    "--tokenizer-revision": "name a directory with the revision's files instead, as --tokenizer",
    "--attention-backend": _KERNELS,
    "--guided-decoding-backend": _GRAMMARS,
    "--structured-outputs-config": _GRAMMARS,
    "--cpu-offload-gb": "weights are not offloaded",
    "--mamba-cache-dtype": _STATE_DTYPE,
    "--mamba-ssm-cache-dtype": _STATE_DTYPE,
    "--num-gpu-blocks-override": "use --memory",
    "--no-enable-chunked-prefill": "prefill is always chunked: see --max-num-batched-tokens",
    "--cudagraph-capture-sizes": _GRAPHS,
    "--max-seq-len-to-capture": _GRAPHS,
    "--disable-hybrid-kv-cache-manager": "not needed: blocks and states of all layers share one memory",
    "--exclude-tools-when-tool-choice-none": "the prompt has all tools whatever the choice, so that it hits alike",
    "--tool-parser-plugin": "the formats of --tool-call-parser are part of the package",
    "--api-server-count": "one HTTP process serves all engines",
    "--disable-uvicorn-access-log": _LOGGING,
    "--no-enable-log-requests": _LOGGING,
    "--uvicorn-log-level": _LOGGING,
    "--enable-log-outputs": "answers are never logged",
    "--max-logprobs": "requests may ask for 20 log-probabilities of a token",
    "--logprobs-mode": "log-probabilities are those of the model, before temperature and penalties",
    "--return-tokens-as-token-ids": "requests ask for it: return_tokens_as_token_ids",
    "--enable-force-include-usage": "requests ask for it: stream_options.include_usage",
    "--chat-template-content-format": "templates get texts; the pictures of a message are parts",
    "--trust-request-chat-template": "requests have no templates; use --chat-template",
    "--response-role": "answers have the role assistant",
    "--uds": "the server listens on --host and --port",
    "--optimization-level": _GRAPHS,
    "--moe-backend": _KERNELS,
    "--mamba-backend": _KERNELS,
    "--disable-cascade-attn": _KERNELS,
    "--model-impl": "every model is Strandline's own; docs/models.md lists the architectures",
    "--rope-scaling": "change the model's config.json",
    "--calculate-kv-scales": "with --kv-cache-dtype fp8, the scales are those in the model's files, or 1",
    "--prefix-caching-hash-algo": "prefixes are compared token by token",
    "--kv-offloading-backend": "use --host-memory, and --disk-cache or --object-store for files",
    "--max-num-partial-prefills": "use --long-prefill-token-threshold, the share of long prompts in a step",
    "--max-long-partial-prefills": "use --long-prefill-token-threshold, the share of long prompts in a step",
    "--disable-sliding-window": "not needed: layers with windows keep their windows alone",
    "--decode-context-parallel-size": _CONTEXT,
    "--prefill-context-parallel-size": _CONTEXT,
    "-dcp": _CONTEXT,
    "-pcp": _CONTEXT,
    "--lora-dtype": "adapters are computed in --dtype",
    "-q": "quantised weights are detected in the model's files",
    "-pp": _PIPELINE,
    "--data-parallel-address": _ONE_MACHINE,
    "--data-parallel-backend": _ONE_MACHINE,
    "--data-parallel-rank": _ONE_MACHINE,
    "--data-parallel-size-local": _ONE_MACHINE,
    "--data-parallel-start-rank": _ONE_MACHINE,
    "--data-parallel-external-lb": _BALANCING,
    "--data-parallel-hybrid-lb": _BALANCING,
    "--headless": _ONE_MACHINE,
    "--master-addr": _ONE_MACHINE,
    "--enable-dbo": _EXPERTS,
    "--enable-eplb": _EXPERTS,
    "--all2all-backend": _EXPERTS,
    "-ep": _EXPERTS,
    "--kv-sharing-fast-prefill": _NOT_NEEDED,
    "--preemption-mode": "a preempted request keeps its state",
    "--disable-frontend-multiprocessing": "the HTTP process and the engine are always separate",
    "--safetensors-load-strategy": _LOADING,
    "--use-tqdm-on-load": _LOADING,
    "--convert": "not needed: one server generates, scores and embeds",
    "--pooler-config": "not needed: one server generates, scores and embeds",
    "--middleware": "have a proxy do it",
    "--logits-processors": _CUSTOM_LOGITS,
    "--tool-server": "not supported; clients run the tools",
    "--mm-processor-cache-gb": "not needed: pictures that hit are not encoded again",
    "--mm-encoder-tp-mode": "not needed: the vision tower is chosen for the ranks",
    "--skip-mm-profiling": "not needed: --max-image-tokens limits what a picture takes",
    "--log-config-file": _LOG,
    "--max-log-len": "prompts are never logged",
    "--disable-fastapi-docs": "not needed: /openapi.json is a description, not a page",
    "--collect-detailed-traces": "use --otlp-traces-endpoint",
    "--enable-reasoning": "not needed: reasoning is parsed by default",
    "--reasoning-parser-plugin": "the formats of --reasoning-parser are part of the package",
    "--enable-prompt-embeds": _EMBEDDINGS,
    "--enable-mm-embeds": _EMBEDDINGS,
    "--fully-sharded-loras": "not needed: adapters are divided among ranks as the layers that they change",
    "--default-mm-loras": "requests name their adapter as the model",
    "--worker-cls": _CLASSES,
    "--worker-extension-cls": _CLASSES,
    "--scheduler-cls": _CLASSES,
    "--additional-config": "not needed: no device has options of its own",
    "--profiler-config": "not supported; start the server under the device's profiler",
    "--config-format": _CONFIG,
    "--hf-config-path": _CONFIG,
    "--ignore-patterns": "only the files that docs/models.md lists are read",
    "--max-parallel-loading-workers": _LOADING,
    "--attention-config": _KERNELS,
    "--kernel-config": _KERNELS,
    "-cc": "not needed: use --enforce-eager to disable CUDA graphs",
    **dict.fromkeys(("-O0", "-O1", "-O2", "-O3"), _GRAPHS),
    "--kv-cache-metrics": _METRICS,
    "--kv-cache-metrics-sample": _METRICS,
    "--cudagraph-metrics": _METRICS,
    "--enable-mfu-metrics": _METRICS,
    "--show-hidden-metrics-for-version": _METRICS,
    "--grpc": "not supported; the server speaks only HTTP",
    "--tokens-only": "not needed: /inference/v1/generate takes and returns tokens",
    "--disable-access-log-for-endpoints": _LOGGING,
    "--ssl-ciphers": "ciphers are the defaults of Python's ssl module",
    "--mm-processor-cache-type": "not needed: pictures that hit are not encoded again",
    # SGLang's.
    "--model-path": "the model is an argument without a flag: strandline serve MODEL",
    "--tokenizer-path": "use --tokenizer",
    "--context-length": "use --max-model-len",
    "--mem-fraction-static": "use --gpu-memory-utilization",
    "--max-running-requests": "use --max-num-seqs",
    "--max-queued-requests": "use --max-queue, which counts outputs",
    "--chunked-prefill-size": "use --max-num-batched-tokens, which counts all tokens of a step",
    "--max-prefill-tokens": "use --max-num-batched-tokens, which counts all tokens of a step",
    "--schedule-policy": "use --scheduling-policy; prompts with cached tokens are preferred in every policy",
    "--disable-radix-cache": "use --no-enable-prefix-caching",
    "--mamba-scheduler-strategy": "not needed: hits are exact to the token in every mode",
    "--mamba-full-memory-ratio": _STATES,
    "--max-mamba-cache-size": _STATES,
    "--enable-hierarchical-cache": "use --host-memory, and --disk-cache or --object-store for files",
    "--hicache-size": "use --host-memory",
    "--hicache-storage-backend": "use --disk-cache for files, or --object-store for a bucket",
    "--tp": "use --tensor-parallel-size or -tp",
    "--dp": "use --data-parallel-size or -dp",
    "--pp": _PIPELINE,
    "--ep": _EXPERTS,
    "--tp-size": "use --tensor-parallel-size or -tp",
    "--dp-size": "use --data-parallel-size or -dp",
    "--pp-size": _PIPELINE,
    "--ep-size": _EXPERTS,
    "--expert-parallel-size": _EXPERTS,
    "--enable-dp-attention": _EXPERTS,
    "--dist-init-addr": _ONE_MACHINE,
    "--base-gpu-id": "set CUDA_VISIBLE_DEVICES",
    "--load-balance-method": "engines of --data-parallel-size are chosen by the prefixes that they have",
    "--max-total-tokens": "use --memory",
    "--enable-mixed-chunk": "not needed: steps mix prefills and decodes; see --long-prefill-token-threshold",
    "--schedule-conservativeness": "not needed: requests are admitted when their memory is free",
    "--num-continuous-decode-steps": _NOT_NEEDED,
    "--enable-priority-scheduling": "use --scheduling-policy priority",
    "--radix-eviction-policy": "entries are evicted by what they are worth",
    "--hicache-ratio": "use --host-memory, which is a size",
    "--hicache-write-policy": "entries are written when they are evicted",
    "--mamba-ssm-dtype": _STATE_DTYPE,
    "--mamba-track-interval": "not needed: hits are exact to the token in every mode",
    "--speculative-draft-model-path": _SPECULATION,
    "--speculative-eagle-topk": "use --speculative-config; drafts are chains, not trees",
    "--prefill-attention-backend": _KERNELS,
    "--decode-attention-backend": _KERNELS,
    "--sampling-backend": _KERNELS,
    "--fp8-gemm-backend": _KERNELS,
    "--moe-runner-backend": _KERNELS,
    "--moe-a2a-backend": _KERNELS,
    "--enable-torch-compile": _KERNELS,
    "--torchao-config": "use 'strandline quantize' to write quantised weights",
    "--weight-loader-disable-mmap": _LOADING,
    "--enable-memory-saver": "not needed: /release_memory_occupation is served with --enable-admin-endpoints",
    "--enable-multimodal": "not needed: pictures are read unless --language-model-only is given",
    "--is-embedding": "not needed: one server generates, scores and embeds",
    "--json-model-override-args": "change the model's config.json",
    "--preferred-sampling-params": "use --override-generation-config",
    "--allow-auto-truncate": "requests ask for it: truncate_prompt_tokens",
    "--constrained-json-whitespace-pattern": _GRAMMARS,
    "--stream-output": "not needed: streams send what is new",
    "--watchdog-timeout": "not needed: /health names an engine that hangs, and --restart restarts one that ends",
    "--log-level-http": _LOGGING,
    "--decode-log-interval": "not needed: statistics are in /metrics, not in the log",
    "--show-time-cost": "use --enable-log-requests, or --otlp-traces-endpoint",
    "--grammar-backend": _GRAMMARS,
    "--page-size": "blocks always have 64 tokens, and hits are exact to the token",
    "--enable-cache-report": "responses always have cached_tokens",
    "--cuda-graph-max-bs": _GRAPHS,
    "--speculative-algorithm": "use --speculative-config",
    "--speculative-num-steps": "use --speculative-config",
    "--speculative-num-draft-tokens": "use --speculative-config",
    "--disaggregation-mode": _TRANSFER,
    "--disaggregation-transfer-backend": _TRANSFER,
    "--disaggregation-bootstrap-port": _TRANSFER,
    "--disaggregation-ib-device": _TRANSFER,
    "--skip-server-warmup": "the engine is always warmed up before the server listens",
    "--warmups": "the engine is always warmed up before the server listens",
    "--admin-api-key": "use --api-key, whose keys are also those of administrators",
    "--sampling-defaults": "the defaults are the model's; use --override-generation-config",
    "--fastapi-root-path": _ROOT_PATH,
    "--ssl-keyfile-password": "not supported; give --ssl-keyfile a key without a password",
    "--enable-custom-logit-processor": _CUSTOM_LOGITS,
    "--lora-paths": "use --lora-modules with --enable-lora",
    "--max-loras-per-batch": "use --max-loras",
    "--disable-cuda-graph": "use --enforce-eager",
    "--disable-overlap-schedule": "use --no-async-scheduling",
    "--enable-deterministic-inference": "use --deterministic",
    "--random-seed": "use --seed",
    "--enable-metrics": "/metrics is always served",
    "--enable-trace": "use --otlp-traces-endpoint",
    "--log-requests": "use --enable-log-requests, which logs no prompts",
}

OPTIONS_OF_SERVERS: Final[Mapping[str, str]] = {
    "chat_template": "it is a server's; LLM.chat takes a chat_template",
    "default_chat_template_kwargs": "it is a server's; LLM.chat takes chat_template_kwargs",
    "override_generation_config": "it is a server's; LLM.generate and LLM.chat take sampling_params",
}
"""Options that vLLM's ``LLM`` has and ours does not, since its methods take the same, and what to do instead."""

_ACTIVATIONS: Final = "use auto: keys and values have the dtype of activations, which --dtype sets"
_VISIBLE: Final = "use cuda, and set CUDA_VISIBLE_DEVICES"
_PARALLEL: Final = "use auto: weights are read from safetensors in parallel"
FOREIGN_VALUES: Final[Mapping[str, Mapping[str, str]]] = {
    "--dtype": {
        "half": "use float16",
        "fp16": "use float16",
        "float": "use float32",
        "fp32": "use float32",
        "bf16": "use bfloat16",
    },
    "--kv-cache-dtype": {
        **dict.fromkeys(("bfloat16", "bf16", "float16", "fp16", "half", "float32"), _ACTIVATIONS),
        "fp8_e5m2": "use fp8: 8-bit keys and values are e4m3",
    },
    "--load-format": {
        "pt": "use auto: only safetensors are read, as PyTorch's files may run code",
        "gguf": "use auto: only safetensors are read, no GGUF files",
        "bitsandbytes": f"use auto: quantised weights are {_DETECTED}",
        **dict.fromkeys(("fastsafetensors", "instanttensor", "runai_streamer", "tensorizer"), _PARALLEL),
    },
    "--distributed-executor-backend": {"ray": f"use mp: {_ONE_MACHINE}"},
    "--log-level": dict.fromkeys(("debug", "trace"), "use info, the most detailed level"),
    "--device": {"gpu": "use cuda", **{f"cuda:{index}": _VISIBLE for index in range(16)}},
    "--tool-call-parser": {
        **dict.fromkeys(("qwen", "qwen25"), "use hermes"),
        **dict.fromkeys(("gpt-oss", "openai_gptoss"), "use openai"),
        "llama3": "use llama3_json",
        "minimax-m2": "use minimax_m2",
    },
    "--reasoning-parser": {"qwen3-thinking": "use qwen3", "gpt-oss": "use openai_gptoss", "minimax": "use minimax_m2"},
}
"""By flag of ours: values that it has in vLLM or SGLang, or that are spelled so there."""


def value_hint(flag: str, value: object, choices: Iterable[str]) -> str:
    """Return what ends the error about a value that a flag does not take; empty: nothing resembles it."""
    reason = FOREIGN_VALUES.get(flag, {}).get(str(value).lower())
    if reason is not None:
        return f"; {reason}"
    nearest = get_close_matches(str(value).lower(), list(choices), n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""
