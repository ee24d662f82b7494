"""Strandline: inference for hybrid language models, with prefix caching that just works.

Importing the package loads no tensor library; ``LLM`` and ``SamplingParams`` do, when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from strandline.version import VERSION

if TYPE_CHECKING:
    from strandline.engine.llm import LLM as LLM
    from strandline.records.adapters import LoRARequest as LoRARequest
    from strandline.records.outputs import CompletionOutput as CompletionOutput
    from strandline.records.outputs import RequestOutput as RequestOutput
    from strandline.records.sampling_params import SamplingParams as SamplingParams
    from strandline.records.sampling_params import StructuredOutputsParams as StructuredOutputsParams

__version__ = VERSION

_HOMES = {
    "LLM": "strandline.engine.llm",
    "LoRARequest": "strandline.records.adapters",
    "SamplingParams": "strandline.records.sampling_params",
    "StructuredOutputsParams": "strandline.records.sampling_params",
    "RequestOutput": "strandline.records.outputs",
    "CompletionOutput": "strandline.records.outputs",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'strandline' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
