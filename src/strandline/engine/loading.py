"""Loads a model and builds an engine around it."""

import logging
from typing import Final

import torch

from strandline.clock import SYSTEM_CLOCK
from strandline.config import EngineConfig
from strandline.device.dtypes import choose_dtype
from strandline.device.threads import limit_threads
from strandline.engine.core import EngineCore
from strandline.engine.engine import Engine
from strandline.errors import ConfigError
from strandline.models.weights import load_model
from strandline.text.vocabulary import find_model, load_frontend, load_vocabulary, read_model_config

LOGGER: Final = logging.getLogger("strandline.engine")


def load_engine(config: EngineConfig, *, progress: bool = False) -> Engine:
    """Load a model and build an engine around it; as ``load_core`` and ``load_vocabulary``."""
    core = load_core(config, progress=progress)
    frontend = load_frontend(config, core.limits, load_vocabulary(config))
    core.runner.grammars = frontend.grammars
    return Engine(core, frontend)


def load_core(config: EngineConfig, *, progress: bool = False) -> EngineCore:
    """Load a model and build a core around it.

    Args:
        progress: show a progress bar while weights load.

    Raises:
        ConfigError: model, weights or memory do not allow it.
    """
    directory = find_model(config.model)
    device = resolve_device(config.device)
    model_config = read_model_config(directory)
    choice = choose_dtype(config, model_config, device)
    notes = [choice.note, limit_threads() if device.type == "cpu" else None]
    for note in filter(None, notes):
        LOGGER.warning(note)
    start_s = SYSTEM_CLOCK()
    model = load_model(
        directory,
        config=model_config,
        dtype=choice.dtype,
        device=device,
        load_format=config.load_format,
        seed=config.seed,
        progress=progress,
    )
    if choice.is_widened:
        model.halve()
    weights_s = SYSTEM_CLOCK() - start_s
    core = EngineCore(model, config, device, progress=progress)
    core.start_s = {"weights": weights_s, **core.start_s}
    return core


def resolve_device(name: str) -> torch.device:
    """Return the device that a configuration names.

    Raises:
        ConfigError: it is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch finds no GPU; use device='cpu' or 'auto'")
    return torch.device(name)
