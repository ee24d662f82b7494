"""The engine tests' tiny model, and engines around it."""

from tests.cpu.engine.conftest import make_llm, model_dir

__all__ = ["make_llm", "model_dir"]
