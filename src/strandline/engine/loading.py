"""Loads a model and builds an engine around it."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, cast

import torch
from torch import Tensor

from strandline.clock import SYSTEM_CLOCK
from strandline.config import EngineConfig
from strandline.device.executor import Executor
from strandline.device.hardware.dtypes import (
    choose_dtype,
    choose_kv_cache_dtype,
    choose_storage,
    drafts_in_fp8,
    kept_note,
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
from strandline.engine.mp_executor import MpExecutor
from strandline.engine.startup.compiling import compiling
from strandline.engine.startup.model_identity import weights_of_files
from strandline.errors import ConfigError
from strandline.kernels.gemm.weights import DenseWeight, Layout, lay_out, lay_out_in_half
from strandline.kernels.ranks import ONE_RANK, Ranks
from strandline.model_config import read_model_config
from strandline.models.adapter_slots import SlotSizes
from strandline.models.causal_lm import CausalLM
from strandline.models.drafter_weights import load_drafter
from strandline.models.layers.shard import Shard
from strandline.models.storage.adapter_files import read_adapter
from strandline.models.weights import LoadedModel, load_model, published_dtype
from strandline.picture_config import PREPROCESSOR_CONFIG, read_picture_config
from strandline.text.model_files import find_drafter, find_model
from strandline.text.vocabulary import Vocabulary, load_frontend, load_vocabulary

LOGGER: Final = logging.getLogger("strandline.engine")

DEFAULT_MAX_LORA_RANK: Final = 16


def load_engine(config: EngineConfig, *, progress: bool = False) -> Engine:
    """Load a model and build an engine around it; as ``load_core`` and ``load_vocabulary``."""
    vocabulary = load_vocabulary(config)
    core = load_core(config, vocabulary, progress=progress)
    return Engine(core, load_frontend(config, core.limits, vocabulary))


def load_core(config: EngineConfig, vocabulary: Vocabulary | None = None, *, progress: bool = False) -> EngineCore:
    """Load a model and build a core around it; as ``load_executor``."""
    executor = load_executor(config, vocabulary, progress=progress)
    try:
        return EngineCore(executor, config)
    except BaseException:
        executor.close()
        raise


def load_executor(config: EngineConfig, vocabulary: Vocabulary | None = None, *, progress: bool = False) -> Executor:
    """Load a model into the executor that the configuration names.

    Args:
        vocabulary: vocabulary for structured outputs and stop strings where steps run in this process; by default it is
            loaded here.
        progress: show a progress bar while weights load.

    Raises:
        ConfigError: model, weights or memory do not allow it.
    """
    if config.distributed_executor_backend == "mp" or config.tensor_parallel_size > 1:
        return MpExecutor(config, progress=progress)
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
    has_drafts = config.speculation is not None and config.speculation.has_draft_layer
    drafter = choose_drafter(config)
    need = (choice.dtype, device, shard)
    require_room_for_weights(model_config, *need, with_draft_layer=has_drafts, pictures=pictures, bits=storage.bits)
    notes = [choice.note, storage.note]
    if model_config.vision is not None and pictures is None and not config.language_model_only:
        notes.append(f"pictures are refused: {directory} has no {PREPROCESSOR_CONFIG}, which says how to scale them")
    notes.append(limit_threads(ranks.size, config.data_parallel_size) if device.type == "cpu" else None)
    for note in filter(None, notes if shard.is_first else ()):
        LOGGER.warning(note)
    start_s = SYSTEM_CLOCK()
    lora = config.merged_lora
    load = partial(
        load_model,
        config=model_config,
        dtype=choice.dtype,
        device=device,
        shard=shard,
        seed=config.seed,
        progress=progress,
        with_draft_layer=has_drafts,
        kv_cache_dtype=choose_kv_cache_dtype(config, device),
        rounded_to=published_dtype(model_config) if choice.is_widened else None,
        keeps_quantized=storage.keeps_quantized,
        pictures=pictures,
        adapter=None if lora is None else read_adapter(Path(lora.path)),
        adapter_slots=choose_adapter_slots(config),
        records_routing=config.enable_return_routed_experts,
    )
    layout = lay_out_in_half if choice.is_widened else lay_out
    has_rounded_head = (has_drafts or drafter is not None) and drafts_in_fp8(config, device, choice.dtype)
    complete = partial(
        _complete, drafter=drafter, config=config, has_rounded_head=has_rounded_head, device=device, layout=layout
    )
    with compiling(config, device, ranks.rank) as compilation:
        ranks.connect()
        model = complete(load(directory, load_format=config.load_format))
    loading_s = {"compilation": compilation.waited_s, "weights": SYSTEM_CLOCK() - start_s - compilation.waited_s}
    notes = [unused_note(model.weights_report)] if shard.is_first else []
    if storage.keeps_quantized and device.type == "cuda":
        notes += [kept_note(model.weights_report), peak_note(device)]
    for note in filter(None, notes):
        LOGGER.warning(note)
    if weights is None:
        weights = weights_of_files(config)
    parts = (model, config, device, vocabulary, ranks)
    executor = UniExecutor(*parts, weights=weights, loading_s=loading_s, progress=progress)
    if device.type != "cpu":  # into the host's memory, in the GPU's layout
        host = torch.device("cpu")
        load, complete = partial(load, device=host), partial(complete, device=host, layout=DenseWeight)
    load = partial(load, quantized_as=model.weights_report.kept)
    executor.weights.read_with(lambda source: complete(_load_other(source, load, config)))
    return executor


def _load_other(
    source: str | Mapping[str, Tensor], load: Callable[..., LoadedModel], config: EngineConfig
) -> LoadedModel:
    """Load other weights of a model: those in a directory, or published tensors."""
    if not isinstance(source, str):
        return load(find_model(config.model), load_format="auto", tensors=source)
    # Random weights stand for the model's own alone.
    return load(find_model(source), load_format=config.load_format if source == config.model else "auto")


def _complete(
    model: LoadedModel,
    drafter: DrafterConfig | None,
    config: EngineConfig,
    has_rounded_head: bool,
    device: torch.device,
    layout: Layout,
) -> LoadedModel:
    """Load a drafter that has its own files, limit what is drafted, and lay out the weights.

    Args:
        has_rounded_head: whether drafts take an output head in FP8.
    """
    if drafter is not None:
        kv_cache_dtype = choose_kv_cache_dtype(config, device)
        load_drafter(cast(CausalLM, model), drafter, device, config.load_format, config.seed, kv_cache_dtype)
    if config.speculation is not None and config.speculation.draft_vocab_size is not None:
        model.limit_drafts(config.speculation.draft_vocab_size)
    if device.type == "meta":
        cast(CausalLM, model).keep_distinct_layers()
    model.lay_out(layout)
    if has_rounded_head:
        model.round_draft_head()
    return model


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
