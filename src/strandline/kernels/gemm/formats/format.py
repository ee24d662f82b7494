"""What kernels know of a format of weights: a row, in the format's own module of this folder."""

from dataclasses import dataclass

from strandline.kernels.gemm.formats.launches import FormatLaunches


@dataclass(kw_only=True, slots=True, eq=False)
class Format:
    """A format of weights. It is not frozen, so that tests and benchmarks can try other launches."""

    name: str
    """In messages."""
    functions: str
    """The module of this folder that has its device functions (``operand_triton.py``)."""
    launches: FormatLaunches
    multiplies_fp8: bool = False
    """Whether activations are quantised to FP8 for it."""
