"""What transformers imports with tokenizers and configurations, and an engine's process has no use for."""

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from typing import Any, Final

GENERATION: Final = "transformers.generation"


def leave_generation_out() -> None:
    """Let transformers load tokenizers and configurations without its own code for generating.

    They import one class of it, a base of its models; with that come torch's compiler and distributed tensors, a third
    of the time that an engine without weights takes to start. Whatever asks for another name gets the whole package.
    """
    spec = find_spec(GENERATION)
    if spec is None or GENERATION in sys.modules:
        return
    stand_in: Any = module_from_spec(spec)
    stand_in.GenerationMixin = type("GenerationMixin", (), {})

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules[GENERATION] is stand_in:
            del sys.modules[GENERATION], stand_in.GenerationMixin
        return getattr(import_module(GENERATION), name)

    stand_in.__getattr__ = find
    sys.modules[GENERATION] = stand_in
