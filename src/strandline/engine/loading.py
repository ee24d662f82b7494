"""Loads a model and builds an engine around it."""

import logging
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Final

import torch

from strandline.clock import SYSTEM_CLOCK
from strandline.config import EngineConfig
from strandline.device.executor import Executor
from strandline.device.hardware.dtypes import (
    DtypeChoice,
    choose_dtype,
    choose_kv_cache_dtype,
    choose_storage,
    dequantized_note,
    drafts_in_fp8,
    peak_note,
    unused_note,
)
from strandline.device.hardware.gpu_limits import set_up_gpu
from strandline.device.hardware.threads import limit_threads
from strandline.device.sizing import require_room_for_weights
from strandline.device.uni_executor import UniExecutor
from strandline.drafter_config import BlockDrafterConfig, DrafterConfig, read_drafter_config
from strandline.engine.core import EngineCore
from strandline.engine.engine import Engine
from strandline.engine.model_loader import ModelLoader
from strandline.engine.mp_executor import MpExecutor
from strandline.engine.startup.compiling import compiling
from strandline.engine.startup.model_identity import weights_of_files
from strandline.engine.workers.workers import Workers, spawned_workers
from strandline.errors import ConfigError
from strandline.kernels.gemm.weights import lay_out, lay_out_in_half
from strandline.kernels.ranks import ONE_RANK, Ranks
from strandline.model_config import ModelConfig, read_model_config
from strandline.models.layers.parts.shard import Shard
from strandline.models.lora.adapter_files import read_adapter
from strandline.models.lora.adapter_slots import SlotSizes
from strandline.models.model_options import ModelOptions, published_dtype
from strandline.models.weights import FillOptions
from strandline.picture_config import PREPROCESSOR_CONFIG, read_picture_config
from strandline.text.model_files import find_drafter, find_model
from strandline.text.vocabulary import Vocabulary, load_frontend, load_vocabulary

LOGGER: Final = logging.getLogger("strandline.engine")

DEFAULT_MAX_LORA_RANK: Final = 16


def load_engine(config: EngineConfig, workers: Workers | None = None, *, progress: bool = False) -> Engine:
    """Load a model and build an engine around it; as ``load_core`` and ``load_vocabulary``."""
    vocabulary = load_vocabulary(config)
    core = load_core(config, vocabulary, workers, progress=progress)
    return Engine(core, load_frontend(config, core.limits, vocabulary))


def load_core(
    config: EngineConfig,
    vocabulary: Vocabulary | None = None,
    workers: Workers | None = None,
    *,
    progress: bool = False,
) -> EngineCore:
    """Load a model and build a core around it; as ``load_executor``."""
    executor = load_executor(config, vocabulary, workers, progress=progress)
    try:
        return EngineCore(executor, config)
    except BaseException:
        executor.close()
        raise


def load_executor(
    config: EngineConfig,
    vocabulary: Vocabulary | None = None,
    workers: Workers | None = None,
    *,
    progress: bool = False,
) -> Executor:
    """Load a model into the executor that the configuration names.

    Args:
        vocabulary: vocabulary for structured outputs and stop strings where steps run in this process; by default it is
            loaded here.
        workers: those of ``spawned_workers``; by default they begin here, if the configuration has any.
        progress: show a progress bar while weights load.

    Raises:
        ConfigError: model, weights or memory do not allow it.
    """
    with spawned_workers(config.num_workers) if workers is None else nullcontext(workers) as spawned:
        if spawned is not None:
            return MpExecutor(config, spawned, progress=progress)
    return load_uni_executor(config, vocabulary, progress=progress)


def load_uni_executor(
    config: EngineConfig,
    vocabulary: Vocabulary | None = None,
    ranks: Ranks = ONE_RANK,
    *,
    device: torch.device | None = None,
    weights: str | None = None,
    progress: bool = False,
) -> UniExecutor:
    """Load a model, or this rank's shard of it, into an executor in this process; as ``load_executor``.

    Args:
        ranks: are connected once kernels are being compiled.
        device: None: the one that the configuration names.
        weights: a digest of all weights; None: it is computed if files of a tier need it.
    """
    if vocabulary is None:
        vocabulary = load_vocabulary(config)
        if vocabulary.tokenizer is not None:
            vocabulary.grammars.begin()  # while the weights are read
    directory = find_model(config.model)
    device, shard = device or resolve_device(config, ranks.rank), Shard(ranks.rank, ranks.size)
    set_up_gpu(device)
    model_config = read_model_config(directory)
    pictures = None if config.language_model_only else read_picture_config(directory, model_config)
    choice = choose_dtype(config, model_config, device)
    storage = choose_storage(config, model_config, device, choice.dtype)
    drafter = choose_drafter(config)
    options = ModelOptions(
        dtype=choice.dtype,
        device=device,
        shard=shard,
        with_draft_layer=config.speculation is not None and config.speculation.has_draft_layer,
        pictures=pictures,
        adapter_slots=choose_adapter_slots(config),
        kv_cache_dtype=choose_kv_cache_dtype(config, device),
        keeps_quantized=storage.keeps_quantized,
        records_routing=config.enable_return_routed_experts,
    )
    require_room_for_weights(model_config, options, storage.bits)
    notes = [choice.note, storage.note]
    if model_config.vision is not None and pictures is None and not config.language_model_only:
        notes.append(f"pictures are refused: {directory} has no {PREPROCESSOR_CONFIG}, which says how to scale them")
    notes.append(limit_threads(ranks.size, config.data_parallel_size) if device.type == "cpu" else None)
    _warn(notes if shard.is_first else ())
    start_s = SYSTEM_CLOCK()
    loader = _choose_loader(config, model_config, options, choice, drafter, progress=progress)
    with compiling(config, device, ranks.rank) as compilation:
        ranks.connect()
        model = loader.load()
    loading_s = {"weights": SYSTEM_CLOCK() - start_s - compilation.waited_s}
    if device.type == "cuda":  # kernels for CPUs are compiled when they are bound
        loading_s["compilation"] = compilation.waited_s
    _warn([unused_note(model.weights_report)] if shard.is_first else ())
    if storage.keeps_quantized and device.type == "cuda":
        _warn([dequantized_note(model.weights_report), peak_note(device)])
    if weights is None:
        weights = weights_of_files(config)
    parts = (model, config, device, vocabulary, ranks)
    executor = UniExecutor(*parts, weights=weights, loading_s=loading_s, progress=progress)
    executor.weights.read_with(loader.for_changes_of(model).load_other)
    return executor


def _warn(notes: Iterable[str | None]) -> None:
    for note in filter(None, notes):
        LOGGER.warning(note)


def _choose_loader(
    config: EngineConfig,
    model_config: ModelConfig,
    options: ModelOptions,
    choice: DtypeChoice,
    drafter: DrafterConfig | None,
    *,
    progress: bool,
) -> ModelLoader:
    """Return what loads a model that is built with these options, and its drafter.

    Raises:
        ConfigError: the adapter that is to be merged cannot be read.
    """
    lora, device = config.merged_lora, torch.device(options.device)
    drafts = options.with_draft_layer or drafter is not None
    return ModelLoader(
        name=config.model,
        config=model_config,
        options=options,
        filling=FillOptions(
            load_format=config.load_format,
            seed=config.seed,
            rounded_to=published_dtype(model_config) if choice.is_widened else None,
            adapter=None if lora is None else read_adapter(Path(lora.path)),
            progress=progress,
            allows_non_finite=config.allow_non_finite_weights,
        ),
        layout=lay_out_in_half if choice.is_widened else lay_out,
        drafter=drafter,
        draft_vocab_size=None if config.speculation is None else config.speculation.draft_vocab_size,
        has_rounded_head=drafts and drafts_in_fp8(config, device, choice.dtype),
    )


def choose_drafter(config: EngineConfig) -> DrafterConfig | None:
    """Return the configuration of the drafter that has its own files; None: there is none.

    Raises:
        ConfigError: it is not supported, or drafts fewer tokens than are wanted.
    """
    speculation = config.speculation
    if speculation is None or speculation.model is None or speculation.drafter_method is None:
        return None
    drafter = read_drafter_config(find_drafter(speculation.model), speculation.drafter_method)
    if isinstance(drafter, BlockDrafterConfig) and speculation.num_speculative_tokens > drafter.most_drafts:
        raise ConfigError(
            f"--speculative-config: num_speculative_tokens is {speculation.num_speculative_tokens}; the drafter makes "
            f"at most {drafter.most_drafts} drafts"
        )
    return drafter


def choose_adapter_slots(config: EngineConfig) -> SlotSizes | None:
    """Return the sizes of the memory for adapters; None: the engine takes none.

    Raises:
        ConfigError: an adapter that is loaded at the start cannot be read.
    """
    if not config.enable_lora:
        return None
    adapters = [read_adapter(Path(lora.path)) for lora in config.loras]
    rank = config.max_lora_rank
    if rank is None:
        rank = max(DEFAULT_MAX_LORA_RANK, *(adapter.rank for adapter in adapters), 0)
    changed = (module.rpartition(".")[2] for adapter in adapters for module in adapter.modules)
    return SlotSizes(config.max_loras, rank, frozenset(config.lora_target_modules or changed))


def resolve_device(config: EngineConfig, rank: int) -> torch.device:
    """Return the device that a rank computes on: of several GPUs each has its own.

    Raises:
        ConfigError: it is not there.
    """
    name, size = config.device, config.tensor_parallel_size
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch finds no GPU; use --device cpu or auto")
    if name != "cuda" or size == 1:
        return torch.device(name)
    if size > torch.cuda.device_count():
        raise ConfigError(f"--tensor-parallel-size is {size}, but torch finds {torch.cuda.device_count()} GPUs")
    return torch.device(name, rank)
