"""The engine's configuration: names and meanings are vLLM's where vLLM has the option."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from difflib import get_close_matches
from types import NoneType
from typing import Any, Final

from strandline.errors import ConfigError
from strandline.file_tiers import (
    DISK,
    OBJECTS,
    SHARED_DIRECTORY,
    ChosenTier,
    FileTier,
    read_bucket_url,
    shared_directory,
)
from strandline.foreign_flags import FOREIGN_FLAGS, OPTIONS_OF_SERVERS, value_hint
from strandline.ids import BLOCK_TOKENS
from strandline.json_options import read_json_option
from strandline.kv_events_config import KVEventsConfig, read_kv_events_config
from strandline.kv_transfer_config import KVTransferConfig, read_kv_transfer_config
from strandline.lora_config import LoRAPath, read_lora_path
from strandline.plain_values import plain
from strandline.reasoning_config import ReasoningConfig, read_reasoning_config
from strandline.specs import SNAPSHOT_DTYPES
from strandline.speculative_config import SpeculativeConfig, read_speculative_config
from strandline.weight_transfer_config import WeightTransferConfig, read_weight_transfer_config

DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS: Final = ("auto", "safetensors", "dummy")
KV_CACHE_DTYPES: Final = ("auto", "fp8", "fp8_e4m3")
CACHE_MODES: Final = ("auto", "align", "all", "none")
DEVICES: Final = ("auto", "cpu", "cuda")
EXECUTORS: Final = ("uni", "mp")
SCHEDULING_POLICIES: Final = ("fcfs", "priority")

FLAGS_OF_BOOL: Final = (
    *("skip_tokenizer_init", "enforce_eager", "enable_prefix_caching", "deterministic", "dequantize", "enable_lora"),
    *("language_model_only", "enable_return_routed_experts", "allow_non_finite_weights"),
)
HOST: Final = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*")
"""A name, or an address of IPv4 or IPv6."""
MEDIA: Final = ("image", "video", "audio")
"""What ``limit_mm_per_prompt`` may limit. Only images are read."""

MIN_MODEL_LEN: Final = 2
"""A token of a prompt, and one of output."""
REMEMBERED_ANSWERS: Final = "64MiB"
"""The memory for the tokens of answers, unless another is given."""
_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


USES_OF_HITS: Final = {
    "kv_transfer_config": "hands over what the cache holds",
    "host_memory": "holds what the cache evicts",
    "disk_cache": "holds what the cache evicts",
    "object_store": "holds what the cache evicts",
    "audit_rate": "replays what hits the cache",
}
"""Options that need a cache that can be hit, and what each does with it."""

NEED_CACHE: Final = frozenset(
    {*USES_OF_HITS, "kv_events_config", "disk_cache_size", "object_store_size", "snapshot_dtype"}
)
"""Options that an engine without a cache refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options that are fixed before the first request.

    Raises:
        ConfigError: a value is out of range.
    """

    model: str
    """A directory in Hugging Face layout, a hub name, or ``demo`` for the bundled model."""
    tokenizer: str | None = None
    """Path of the tokenizer; None: the model's directory."""
    skip_tokenizer_init: bool = False
    """Accept and return token ids only."""
    dtype: str = "auto"
    """Dtype of weights and activations; ``auto``: the model configuration's, or float32 on a CPU where that is
    faster."""
    kv_cache_dtype: str = "auto"
    """Dtype of keys and values: ``auto``: that of activations; ``fp8`` or ``fp8_e4m3``: e4m3, in half the memory."""
    device: str = "auto"
    distributed_executor_backend: str = "uni"
    """Where steps run: ``uni``: in the engine's process; ``mp``: in a worker process of its own."""
    tensor_parallel_size: int = 1
    """Ranks that the model is divided among, each in a worker process and on a device of its own."""
    data_parallel_size: int = 1
    """Engines of a server on one machine, each with the whole model and a cache of its own. ``LLM`` has one engine."""
    data_parallel_rank: int = 0
    """Number of this engine among these, from 0. The server sets it."""
    load_format: str = "auto"
    """``dummy``: random weights from the configuration alone."""
    allow_non_finite_weights: bool = False
    """Load weights with NaN or infinity, instead of refusing the model; requests that read these numbers fail."""
    max_model_len: int | None = None
    """Maximum length of a request, prompt and output; None: the model configuration's, as memory allows."""
    max_num_seqs: int = 256
    """Maximum number of running requests."""
    max_num_batched_tokens: int | None = None
    """Maximum number of tokens per step; longer prompts take several steps. None: 2,048, on GPUs 8,192."""
    scheduling_policy: str = "fcfs"
    """``fcfs``: in order of arrival; ``priority``: by the requests' ``priority`` first."""
    long_prefill_token_threshold: int | None = None
    """Prefills of more tokens are long. While other requests decode, each computes at most about this number of tokens,
    in every third to ninth step. 0: no limit. None: a quarter of ``max_num_batched_tokens``."""
    async_scheduling: bool | None = None
    """Plan each step while the device runs the previous one; None: on GPUs."""
    enforce_eager: bool = False
    """Disable CUDA graphs."""
    gpu_memory_utilization: float = 0.9
    """The share of a GPU's memory for weights, scratch memory and the cache together; unused if ``memory`` is set."""
    memory: str | int | None = None
    """Budget of the cache and of running requests together: bytes, or a string such as ``4GiB``."""
    host_memory: str | int | None = None
    """Budget of host memory for evicted entries, in the format of ``memory``; with several ranks, the budget of each.
    None: no host memory."""
    disk_cache: str | None = None
    """Directory for evicted entries, whose files outlive the process; None: no disk cache."""
    disk_cache_size: str | int | None = None
    """Budget of the disk cache, in the format of ``memory``; with several ranks, the budget of each. None: 100 GiB."""
    object_store: str | None = None
    """Where engines share evicted entries: a bucket of an S3-compatible server, as ``s3://BUCKET/PREFIX``, or a
    directory, as ``file:///DIR``; None: no object store."""
    object_store_size: str | int | None = None
    """How much of a bucket an engine uses, in the format of ``memory``; with several ranks, the share of each. None:
    1 TiB. A directory needs it: its size over all engines and ranks."""
    snapshot_dtype: str = "float32"
    """Dtype of recurrent states below the device: ``float32``: unchanged; ``bfloat16`` or ``int8``: smaller,
    but requests that resume from them are no longer exact."""
    enable_prefix_caching: bool = True
    mamba_cache_mode: str = "auto"
    """Where snapshots are taken: ``auto``, or for comparison ``align``, ``all``, ``none``."""
    mamba_block_size: int = 1024
    """Tokens between snapshots in the modes ``align`` and ``all``; a multiple of 64."""
    deterministic: bool = False
    """Compute bit-identical results, cached or not and in any batch: cuts and steps of prompts on the 64-token grid,
    batch-invariant kernels on GPUs. Slower."""
    remembered_answers: str | int | None = None
    """Host memory, in the server's or ``LLM``'s process, for the tokens of answers, so that those that come back in a
    conversation are encoded as they were generated; in the format of ``memory``. 0: off. None: 64 MiB, or off with
    ``deterministic``: what an answer that comes back is encoded as then depends on earlier requests."""
    audit_rate: float = 0.0
    """Share of hits that are replayed without the cache, to measure the difference in log-probabilities."""
    speculative_config: str | Mapping[str, Any] | None = None
    """Speculative decoding (``SpeculativeConfig``), as a mapping or as JSON; None: off."""
    kv_events_config: str | Mapping[str, Any] | None = None
    """Publication of cache events (``KVEventsConfig``), as a mapping or as JSON; None: off."""
    kv_transfer_config: str | Mapping[str, Any] | None = None
    """Transfer of prefixes between engines (``KVTransferConfig``), as a mapping or as JSON; None: off. Supported by the
    server, not by ``LLM``."""
    weight_transfer_config: str | Mapping[str, Any] | None = None
    """Weights that trainers send (``WeightTransferConfig``), as a mapping or as JSON; None: off. Supported by the
    server, not by ``LLM``."""
    reasoning_config: str | Mapping[str, Any] | None = None
    """What ends reasoning at its budget (``ReasoningConfig``), as a mapping or as JSON; None: the closing tag, if the
    server parses reasoning."""
    enable_return_routed_experts: bool = False
    """Record the experts that tokens are routed to, and return them where requests ask for them."""
    language_model_only: bool = False
    """Load no vision tower; requests with pictures are answered as by a model that reads text only."""
    max_image_tokens: int = 4096
    """Maximum number of tokens of a picture; larger pictures are scaled down to it."""
    limit_mm_per_prompt: str | Mapping[str, Any] | None = None
    """Maximum number of pictures in a prompt, such as ``{"image": 4}``, as a mapping or as JSON; None: no limit."""
    allowed_media_domains: Sequence[str] = ()
    """Hosts from which pictures may be fetched over http(s)."""
    allowed_local_media_path: str | None = None
    """Directory whose files requests may name as pictures; None: no files."""
    dequantize: bool = False
    """Convert weights that are published quantised to ``dtype`` as they load, also on GPUs."""
    merge_lora: str | Mapping[str, Any] | None = None
    """A LoRA adapter to add to the weights as they load, as ``name=path`` or a mapping; None: none."""
    enable_lora: bool = False
    """Compute requests with the LoRA adapters that they name."""
    lora_modules: Sequence[str | Mapping[str, Any]] = ()
    """Adapters to load at the start, each as ``name=path`` or a mapping."""
    max_loras: int = 1
    """Adapters that a step can use; further ones that are loaded stay in host memory meanwhile."""
    max_lora_rank: int | None = None
    """Maximum rank of an adapter; None: 16, or more if one of ``lora_modules`` has more."""
    lora_target_modules: Sequence[str] = ()
    """Names of the linear layers that adapters may change, such as ``q_proj``; empty: those that ``lora_modules``
    change, or all if there are none."""
    seed: int = 0
    """Seed for requests without a seed, and for dummy weights."""

    def __post_init__(self) -> None:
        _require_choice("dtype", self.dtype, DTYPES)
        _require_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _require_choice("load_format", self.load_format, LOAD_FORMATS)
        _require_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        _require_choice("mamba_cache_mode", self.mamba_cache_mode, CACHE_MODES)
        _require_choice("snapshot_dtype", self.snapshot_dtype, SNAPSHOT_DTYPES)
        _require_choice("device", self.device, DEVICES)
        _require_choice("distributed_executor_backend", self.distributed_executor_backend, EXECUTORS)
        _require_type("model", self.model, (str,))
        if not self.model.strip():
            raise ConfigError("the model's name is empty or blank: the shell variable that it comes from may be unset")
        _require_type("tokenizer", self.tokenizer, (str, NoneType))
        _require_type("async_scheduling", self.async_scheduling, (bool, NoneType))
        _require_type("allowed_local_media_path", self.allowed_local_media_path, (str, NoneType))
        for name in FLAGS_OF_BOOL:
            _require_type(name, getattr(self, name), (bool,))
        for name in ("max_num_seqs", "mamba_block_size", "tensor_parallel_size", "data_parallel_size"):
            _require_count(name, getattr(self, name))
        rank: object = self.data_parallel_rank
        if type(rank) is not int or not 0 <= rank < self.data_parallel_size:
            raise ConfigError(
                f"data_parallel_rank must be at least 0 and less than data_parallel_size {self.data_parallel_size}, "
                f"got {rank!r}"
            )
        for name, least in (("max_model_len", MIN_MODEL_LEN), ("max_num_batched_tokens", 1)):
            if getattr(self, name) is not None:
                _require_count(name, getattr(self, name), least)
        if self.mamba_block_size % BLOCK_TOKENS:
            raise ConfigError(f"--mamba-block-size must be a multiple of {BLOCK_TOKENS}, got {self.mamba_block_size}")
        seed: object = self.seed
        if type(seed) is not int or not -(2**63) <= seed < 2**63:
            raise ConfigError(f"--seed must be a whole number of 64 bits, got {seed!r}")
        if self.deterministic and (self.max_num_batched_tokens or BLOCK_TOKENS) < BLOCK_TOKENS:
            raise ConfigError(
                f"with --deterministic, steps compute whole blocks of a prompt: --max-num-batched-tokens must be at "
                f"least {BLOCK_TOKENS}, got {self.max_num_batched_tokens}"
            )
        threshold: object = self.long_prefill_token_threshold
        if threshold is not None and (type(threshold) is not int or 0 != threshold < BLOCK_TOKENS):
            raise ConfigError(
                f"--long-prefill-token-threshold must be 0 or a whole number of at least {BLOCK_TOKENS}, "
                f"got {threshold!r}"
            )
        share: object = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(f"--gpu-memory-utilization must be above 0 and at most 1, got {share!r}")
        rate: object = self.audit_rate
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
            raise ConfigError(f"--audit-rate must be from 0 to 1, got {rate!r}")
        if self.memory is not None:
            parse_bytes(self.memory)
        if self.reasoning is not None and self.skip_tokenizer_init:
            raise ConfigError("--reasoning-config needs a tokenizer: drop skip_tokenizer_init")
        self._require_tiers()
        self._require_cache()
        _require_count("max_image_tokens", self.max_image_tokens)
        _require_hosts("allowed_media_domains", self.allowed_media_domains)
        _ = self.remembered_bytes, self.max_images, self.weight_transfer
        self._require_loras()
        if self.kv_transfer is not None and self.kv_transfer.kv_connector == "NixlConnector" and self.num_workers:
            raise ConfigError(
                "--kv-transfer-config: NixlConnector reads the memory of the engine's own process, so it cannot "
                "be combined with --tensor-parallel-size or --distributed-executor-backend mp; use SocketConnector"
            )
        if self.speculation is not None and self.deterministic:
            raise ConfigError(
                "--deterministic cannot be combined with --speculative-config: drafts are computed in other steps than "
                "the tokens of plain decoding, and round differently; drop one of the two"
            )
        if self.speculation is not None and self.speculation.draft_vocab_size and self.tensor_parallel_size > 1:
            raise ConfigError(
                "--speculative-config: draft_vocab_size is for one rank, which has the whole vocabulary; drop it, or "
                f"--tensor-parallel-size, which is {self.tensor_parallel_size}"
            )

    def _require_loras(self) -> None:
        """Check the options of LoRA adapters."""
        _require_count("max_loras", self.max_loras)
        if self.max_lora_rank is not None:
            _require_count("max_lora_rank", self.max_lora_rank)
        names = [lora.name for lora in self.loras]
        if len({*names}) < len(names):
            raise ConfigError(f"--lora-modules must have names that differ, got {', '.join(names)}")
        given = {"lora_modules": names, "max_loras": self.max_loras > 1, "max_lora_rank": self.max_lora_rank}
        given["lora_target_modules"] = self.lora_target_modules
        for name in (name for name, value in given.items() if value and not self.enable_lora):
            raise ConfigError(f"{flag(name)} needs --enable-lora")
        if self.merged_lora is not None and self.load_format == "dummy":
            raise ConfigError(
                "--merge-lora needs the weights that the adapter was trained on; drop --load-format dummy"
            )

    def _require_tiers(self) -> None:
        """Check the options of host memory, the disk cache and the object store."""
        if self.host_memory is not None:
            parse_bytes(self.host_memory, "--host-memory")
        for tier, location, size in self._file_tiers:
            _require_type(tier.flag[2:].replace("-", "_"), location, (str, NoneType))
            if size is not None:
                parse_bytes(size, tier.size_flag)
                if location is None:
                    raise ConfigError(
                        f"{tier.size_flag} {size} is for the {tier.title}, and there is none; add {tier.flag} "
                        f"{tier.placeholder}"
                    )
        if self.disk_cache == "":
            raise ConfigError("--disk-cache must be a directory, got ''")
        if self.object_store is not None:
            if shared_directory(self.object_store) is None:
                read_bucket_url(self.object_store)
            elif self.object_store_size is None:
                raise ConfigError(
                    f"--object-store {self.object_store} needs --object-store-size: the size of the directory, over "
                    "all engines that share it"
                )
            if self.disk_cache is not None:
                raise ConfigError(
                    "--object-store cannot be combined with --disk-cache: both are the tier below host memory; drop "
                    "one of the two"
                )
        if self.snapshot_dtype != "float32":
            if self.deterministic:
                raise ConfigError(
                    f"--deterministic cannot be combined with --snapshot-dtype {self.snapshot_dtype}: a state stored "
                    "in fewer bits is not restored exactly; drop one of the two"
                )
            if not self.has_tiers:
                raise ConfigError(
                    f"--snapshot-dtype {self.snapshot_dtype} applies to host memory, the disk cache and the object "
                    "store; add --host-memory, --disk-cache or --object-store"
                )

    @property
    def num_workers(self) -> int:
        """How many processes steps run in, one for each rank; 0: in the engine's own."""
        is_divided = self.tensor_parallel_size > 1 or self.distributed_executor_backend == "mp"
        return self.tensor_parallel_size if is_divided else 0

    @property
    def has_tiers(self) -> bool:
        """Whether what the cache evicts is stored below the device."""
        return self.host_memory is not None or self.file_tier is not None

    @property
    def _file_tiers(self) -> tuple[tuple[FileTier, str | None, str | int | None], ...]:
        """The kinds of tiers in files, and what is given for each: where it is, and its size."""
        return (DISK, self.disk_cache, self.disk_cache_size), (OBJECTS, self.object_store, self.object_store_size)

    @property
    def file_tier(self) -> ChosenTier | None:
        """The tier whose files outlive the process; None: there is none."""
        for tier, location, size in self._file_tiers:
            if location is not None:
                is_shared_directory = tier == OBJECTS and shared_directory(location) is not None
                kind = SHARED_DIRECTORY if is_shared_directory else tier
                return ChosenTier(kind, location, tier.default_size if size is None else size)
        return None

    def _require_cache(self) -> None:
        """Refuse options that would have no effect because nothing can be hit."""
        if self.kv_events is not None and not self.enable_prefix_caching:
            raise ConfigError("--kv-events-config publishes what the cache holds; drop --no-enable-prefix-caching")
        if self.enable_prefix_caching and self.mamba_cache_mode != "none":
            return
        for name, use in USES_OF_HITS.items():
            if getattr(self, name) not in (None, 0.0):
                cause = "--mamba-cache-mode none" if self.enable_prefix_caching else "--no-enable-prefix-caching"
                raise ConfigError(f"{flag(name)} {use}; drop {cause}")

    @property
    def remembered_bytes(self) -> int:
        """Memory for the tokens of answers; 0: none are remembered."""
        size = self.remembered_answers
        if size is None:
            size = 0 if self.deterministic else REMEMBERED_ANSWERS
        return 0 if str(size).strip() == "0" else parse_bytes(size, "--remembered-answers")

    @property
    def max_images(self) -> int | None:
        """Maximum number of pictures in a prompt; None: no limit."""
        if self.limit_mm_per_prompt is None:
            return None
        limits = read_json_option(
            "--limit-mm-per-prompt", self.limit_mm_per_prompt, known=MEDIA, example='{"image": 4}'
        )
        for name, value in limits.items():
            if type(value) is not int or value < 0:
                raise ConfigError(f"--limit-mm-per-prompt: {name} must be a whole number of at least 0, got {value!r}")
        return limits.get("image")

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """Speculative decoding; None: off."""
        return None if self.speculative_config is None else read_speculative_config(self.speculative_config)

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """Publication of cache events; None: off."""
        config = None if self.kv_events_config is None else read_kv_events_config(self.kv_events_config)
        return config if config is not None and config.is_published else None

    @property
    def kv_transfer(self) -> KVTransferConfig | None:
        """Transfer of prefixes between engines; None: off."""
        return None if self.kv_transfer_config is None else read_kv_transfer_config(self.kv_transfer_config)

    @property
    def weight_transfer(self) -> WeightTransferConfig | None:
        """How trainers send weights; None: they do not."""
        given = self.weight_transfer_config
        return None if given is None else read_weight_transfer_config(given)

    @property
    def reasoning(self) -> ReasoningConfig | None:
        """What ends reasoning at its budget; None: not given."""
        return None if self.reasoning_config is None else read_reasoning_config(self.reasoning_config)

    @property
    def merged_lora(self) -> LoRAPath | None:
        """The adapter that is added to the weights; None: none."""
        return None if self.merge_lora is None else read_lora_path("--merge-lora", self.merge_lora)

    @property
    def loras(self) -> list[LoRAPath]:
        """The adapters that are loaded at the start."""
        return [read_lora_path("--lora-modules", value) for value in self.lora_modules]

    @property
    def model_name(self) -> str:
        """What a server calls the model unless it is given other names."""
        return self.model if self.merged_lora is None else self.merged_lora.name

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "EngineConfig":
        """Build a configuration from keyword options.

        Raises:
            ConfigError: an option is unknown (the message names the nearest), or a value is out of range.
        """
        reject_unknown(options, [field.name for field in fields(cls)])
        return cls(**{name: plain(value) for name, value in options.items()})


def without_cache(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options for the same engine without a prefix cache, for comparisons."""
    left = {name: value for name, value in options.items() if name not in NEED_CACHE}
    return {**left, "enable_prefix_caching": False}


def reject_unknown(options: Mapping[str, Any], known: list[str]) -> None:
    """Raise a ConfigError for the first unknown option, naming what to do instead, or the nearest known one."""
    for name in options:
        if name not in known:
            reason = FOREIGN_FLAGS.get(flag(name), OPTIONS_OF_SERVERS.get(name))
            nearest = get_close_matches(name, known, n=1)
            hint = f": {reason}" if reason is not None else f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ConfigError(f"unknown option {name!r}{hint}")


def flag(name: str) -> str:
    """Return the flag that sets a field, for messages; ``LLM`` takes the same name without the dashes."""
    return f"--{name.replace('_', '-')}"


def parse_bytes(text: str | int, name: str = "--memory") -> int:
    """Read a number of bytes such as ``512MiB``, ``4G`` or ``1000000``; units are powers of 1,024.

    Args:
        name: the flag, for messages.

    Raises:
        ConfigError: it is not a positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(text), re.IGNORECASE)
    size = int(Decimal(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise ConfigError(f"{name} must be a size such as 4GiB, got {text!r}")
    return size


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        hint = value_hint(flag(name), value, choices)
        raise ConfigError(f"{flag(name)} must be one of {', '.join(choices)}; got {value!r}{hint}")


def _require_type(name: str, value: object, types: tuple[type, ...]) -> None:
    if type(value) not in types:
        wanted = " or ".join("None" if kind is NoneType else kind.__name__ for kind in types)
        raise ConfigError(f"{flag(name)} must be {wanted}, got {value!r}")


def _require_hosts(name: str, value: object) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(type(each) is str for each in value):
        raise ConfigError(f"{flag(name)} must be a list of strings, got {value!r}")
    for each in value:
        if HOST.fullmatch(each) is None:
            raise ConfigError(
                f"{flag(name)} must be names of hosts, such as images.example.com, without scheme, port, path or "
                f"wildcard, got {each!r}"
            )


def _require_count(name: str, value: object, least: int = 1) -> None:
    if type(value) is not int or not least <= value < 2**63:
        raise ConfigError(f"{flag(name)} must be a whole number of at least {least}, got {value!r}")
