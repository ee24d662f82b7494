"""Flags of vLLM and SGLang that no command has, and what to do instead: errors about unknown flags say so.

Errors about unknown options of ``LLM`` do too: they are the flags' names without dashes.
"""

from collections.abc import Mapping
from typing import Final

_STATES: Final = "states and keys and values share one memory, which --memory or --gpu-memory-utilization sets"
_LOGGING: Final = "requests are logged only with --enable-log-requests"
_GRAPHS: Final = "not needed: CUDA graphs are captured for the sizes of steps"
_GRAMMARS: Final = "there is one backend, llguidance"
_KERNELS: Final = "kernels are chosen for the device"
_STATE_DTYPE: Final = "states are float32 unless the model's configuration says otherwise"
_DETECTED: Final = "detected in the model's files"

FOREIGN_FLAGS: Final[Mapping[str, str]] = {
    # Of both.
    "--pipeline-parallel-size": "pipeline parallelism is not supported yet",
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
    "--root-path": "have the proxy remove the path",
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
    "--pp": "pipeline parallelism is not supported yet",
    "--ep": "experts are divided among the ranks of --tensor-parallel-size",
    "--grammar-backend": _GRAMMARS,
    "--page-size": "blocks always have 64 tokens, and hits are exact to the token",
    "--enable-cache-report": "responses always have cached_tokens",
    "--cuda-graph-max-bs": _GRAPHS,
    "--speculative-algorithm": "use --speculative-config",
    "--speculative-num-steps": "use --speculative-config",
    "--speculative-num-draft-tokens": "use --speculative-config",
    "--disaggregation-mode": "use --kv-transfer-config",
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
