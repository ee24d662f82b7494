"""How published files hold weights in codes of a few bits: a row for each layout.

Microscaling formats:

| files | codes | scales | factor |
| --- | --- | --- | --- |
| ModelOpt, NVFP4 | ``M.weight`` | ``M.weight_scale``, e4m3, of 16 inputs | ``M.weight_scale_2`` |
| compressed-tensors, NVFP4 | ``M.weight_packed`` | the same | 1 / ``M.weight_global_scale`` |
| gpt-oss, MXFP4 | ``E_blocks``, groups in a dimension of their own | ``E_scales``, uint8 exponents | 1 |
| compressed-tensors, MXFP4 | ``M.weight_packed`` | ``M.weight_scale``, uint8 exponents, of 32 inputs | 1 |
| MXFP8 | ``M.weight``, e4m3 | ``M.weight_scale`` or ``M.weight_scale_inv``, uint8 exponents, of 32 inputs | 1 |

Integers of 4 bits, eight to an int32:

| files | codes | scales | zero points | index of groups |
| --- | --- | --- | --- | --- |
| compressed-tensors | ``M.weight_packed`` ``[N, K/8]`` | ``M.weight_scale`` ``[N, X]`` | ``M.weight_zero_point``
``[N/8, X]`` | ``M.weight_g_idx`` |
| gptq | ``M.qweight`` ``[K/8, N]`` | ``M.scales`` ``[X, N]`` | ``M.qzeros`` ``[X, N/8]`` | ``M.g_idx`` |
| awq | ``M.qweight`` ``[K, N/8]``, columns in another order | ``M.scales`` ``[X, N]`` | ``M.qzeros`` ``[X, N/8]`` | |

A layout's facts are all in its row; ``quantization_config.py`` recognises it by the names there.

Source: the published layouts of ModelOpt (``NVFP4``, ``W4A16_NVFP4``, ``MXFP8``), and ``nvfp4-pack-quantized``,
``mxfp4-pack-quantized``, ``mxfp8-quantized`` and ``pack-quantized`` of compressed-tensors; ``gptq`` and ``gptq_v2`` of
GPTQModel and ``gemm`` of AutoAWQ; Open Compute Project, "OCP Microscaling Formats (MX) Specification".

Shape suffixes: N rows, K inputs, X groups of inputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from strandline.kernels.gemm.formats.coded import CodedFormat
from strandline.kernels.gemm.formats.fp4 import FP4
from strandline.kernels.gemm.formats.mxfp8 import MXFP8

EXPONENTS: Final = ("U8", "F8_E8M0")
"""Dtypes of scales that are powers of two, as safetensors names them."""

E4M3: Final = ("F8_E4M3",)


@dataclass(frozen=True, slots=True)
class Bytes:
    """How the bytes of a tensor hold codes."""

    dtype: str
    """Dtype of the tensor, as safetensors names it."""
    inputs: int
    """Inputs that some bytes hold together."""
    bytes: int
    """How many bytes these are."""
    split: Callable[[Tensor], Tensor]
    """Returns the codes of bytes ``[..., B]``."""


def _split_nibbles(codes: Tensor) -> Tensor:
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


NIBBLES: Final = Bytes("U8", 2, 1, _split_nibbles)
"""Two codes to a byte, the earlier input in its low bits."""

NUMBERS: Final = Bytes("F8_E4M3", 1, 1, lambda codes: codes)
"""Codes of 8 bits, as numbers in e4m3."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """How files hold weights in a microscaling format, and how configurations announce it.

    Names of tensors are what follows the name of the weight; those of scales of activations replace ``weight`` there.
    """

    kind: str
    """The format's name."""
    format: CodedFormat
    """What kernels know of it."""
    group: int
    """Inputs that share a scale."""
    scale_dtypes: tuple[str, ...]
    """One of these, as safetensors names dtypes."""
    bytes: Bytes
    codes: str = ""
    """Name of the tensor of codes."""
    scales: tuple[str, ...] = ("_scale",)
    """Names of the tensor of scales, one of these."""
    factor: str | None = None
    """Name of the factor of a matrix; None: it is 1."""
    is_reciprocal: bool = False
    """Whether files hold the reciprocal of the factor."""
    activations: tuple[str, ...] = ()
    """Names of scales of activations."""
    has_group_dimension: bool = False
    """Whether groups have a dimension of their own in the tensor of codes."""
    of_experts_alone: bool = False
    """Whether only experts in one tensor are published so."""
    quant_method: str | None = None
    """Announces it."""
    compressed: str | None = None
    """The ``format`` of compressed-tensors that announces it."""
    algorithms: tuple[str, ...] = ()
    """Those of ``quant_algo`` of ModelOpt that announce it."""

    @property
    def has_exponents(self) -> bool:
        """Whether scales are powers of two."""
        return self.scale_dtypes == EXPONENTS

    def __str__(self) -> str:
        return f"{self.kind} (groups of {self.group})"


NVFP4_MODELOPT: Final = Layout(
    kind="NVFP4",
    format=FP4,
    group=16,
    scale_dtypes=E4M3,
    bytes=NIBBLES,
    factor="_scale_2",
    activations=("input_scale",),
    algorithms=("NVFP4", "W4A16_NVFP4"),
)

NVFP4_COMPRESSED: Final = Layout(
    kind="NVFP4",
    format=FP4,
    group=16,
    scale_dtypes=E4M3,
    bytes=NIBBLES,
    codes="_packed",
    factor="_global_scale",
    is_reciprocal=True,
    activations=("input_global_scale",),
    compressed="nvfp4-pack-quantized",
)

MXFP4_COMPRESSED: Final = Layout(
    kind="MXFP4",
    format=FP4,
    group=32,
    scale_dtypes=EXPONENTS,
    bytes=NIBBLES,
    codes="_packed",
    compressed="mxfp4-pack-quantized",
)

MXFP4_EXPERTS: Final = Layout(
    kind="MXFP4",
    format=FP4,
    group=32,
    scale_dtypes=EXPONENTS,
    bytes=NIBBLES,
    codes="_blocks",
    scales=("_scales",),
    has_group_dimension=True,
    of_experts_alone=True,
    quant_method="mxfp4",
)

MXFP8_LAYOUT: Final = Layout(
    kind="MXFP8",
    format=MXFP8,
    group=32,
    scale_dtypes=EXPONENTS,
    bytes=NUMBERS,
    scales=("_scale", "_scale_inv"),
    activations=("input_scale",),
    quant_method="mxfp8",
    compressed="mxfp8-quantized",
    algorithms=("MXFP8",),
)

LAYOUTS: Final = (NVFP4_MODELOPT, NVFP4_COMPRESSED, MXFP4_COMPRESSED, MXFP4_EXPERTS, MXFP8_LAYOUT)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """How files hold integers of 4 bits, eight to an int32."""

    name: str
    """The format's name."""
    parts: Mapping[str, str]
    """What follows the name of the weight, less ``replaced``, in the names of its tensors."""
    replaced: str = ""
    """The end of the weight's name that these names do not have."""
    is_by_row: bool = False
    """Whether tensors begin with rows; else with inputs or groups."""
    packs_inputs: bool = True
    """Whether an int32 of codes holds eight inputs; else eight rows. Those of zero points hold eight rows."""
    order: tuple[int, ...] | None = None
    """In which four bits of an int32, counted from the lowest, each of eight codes is; None: in order."""


PACKED_COMPRESSED: Final = Packing(
    name="compressed-tensors",
    parts={
        "codes": "_packed",
        "scales": "_scale",
        "zeros": "_zero_point",
        "groups": "_g_idx",
        "shape": "_shape",
    },
    is_by_row=True,
)

GPTQ: Final = Packing(
    name="gptq",
    parts={"codes": "qweight", "scales": "scales", "zeros": "qzeros", "groups": "g_idx"},
    replaced="weight",
)

AWQ: Final = Packing(
    name="awq",
    parts={"codes": "qweight", "scales": "scales", "zeros": "qzeros"},
    replaced="weight",
    packs_inputs=False,
    order=(0, 4, 1, 5, 2, 6, 3, 7),
)
