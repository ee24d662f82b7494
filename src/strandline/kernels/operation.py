"""Operations that layers use, each declared with its reference implementation.

An operation is a torch function that runs on every device, its reference implementation, and the backends that
implement it faster: functions of the same name and signature in other modules of this package. A backend declares what
it supports, so that ``bind_kernels`` (``binding.py``) can choose once per engine, before the first step. A backend
whose results depend on how it is launched also takes ``launches``, a keyword that ``bind_kernels`` gives::

    @operation(triton("attention.attention_triton"), numba("attention.attention_numba", memory={"key": ("float32",)}))
    def paged_attention(...) -> Tensor:
        ...
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Generic, ParamSpec, TypeVar

from strandline.specs import E4M3, TensorSpec

P = ParamSpec("P")
R = TypeVar("R")

FLOATS: Final = ("float32", "bfloat16")
"""Dtypes that Numba kernels load and store."""

KEYS_AND_VALUES: Final = dict.fromkeys(("key", "value"), (*FLOATS, E4M3))
"""Dtypes of keys and values that Numba kernels read and write."""


class Launches(Enum):
    """How a backend chooses the sizes of its launches."""

    MEASURED = "measured"
    """The fastest launch for each number of rows."""
    FIXED = "fixed"
    """Launches that add in one order for any number of rows."""


@dataclass(frozen=True, slots=True)
class Workload:
    """An engine's requirements on its kernels."""

    device_type: str
    dtype: str
    """Dtype of activations."""
    memory: tuple[TensorSpec, ...] = ()
    """Tensors that layers keep; a name may occur with several shapes and dtypes."""
    is_deterministic: bool = False
    """Whether a row's result must depend on that row alone, to the last bit."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A faster implementation of an operation, and what it supports."""

    name: str
    """``Triton`` or ``Numba``."""
    module: str
    """Module in ``strandline.kernels``, with a function of the operation's name."""
    dtypes: tuple[str, ...] | None = None
    """Supported dtypes of activations; None: all."""
    memory: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Supported dtypes of tensors that a layer keeps, by name; names not listed support all."""
    channel_multiples: Mapping[str, int] = field(default_factory=dict)
    """Required multiple of the last dimension of tensors that a layer keeps, by name."""
    takes_launches: bool = False
    """Whether the function takes ``launches``; if not, its results do not depend on how it is launched."""

    def limit(self, workload: Workload) -> str | None:
        """Return why this backend does not support a workload; None: it does."""
        if self.dtypes is not None and workload.dtype not in self.dtypes:
            return f"activations are {workload.dtype}, supported: {_either(self.dtypes)}"
        for tensor in workload.memory:
            dtypes, multiple = self.memory.get(tensor.name), self.channel_multiples.get(tensor.name, 1)
            if dtypes is not None and tensor.dtype not in dtypes:
                return f"the {tensor.name} is {tensor.dtype}, supported: {_either(dtypes)}"
            if tensor.shape[-1] % multiple:
                return f"the {tensor.name} has {tensor.shape[-1]} channels, supported: multiples of {multiple}"
        return None


def triton(module: str, *, takes_launches: bool = False) -> Backend:
    """Declare a Triton version, for GPUs; arguments as the attributes of ``Backend``."""
    return Backend("Triton", module, takes_launches=takes_launches)


def numba(
    module: str,
    *,
    memory: Mapping[str, tuple[str, ...]] | None = None,
    channel_multiples: Mapping[str, int] | None = None,
) -> Backend:
    """Declare a Numba version, for CPUs; arguments as the attributes of ``Backend``."""
    return Backend("Numba", module, FLOATS, memory or {}, channel_multiples or {})


class Operation(Generic[P, R]):
    """A declared operation. It is not callable: call its ``reference``, or the function that ``Kernels`` binds.

    Without a Triton version, the reference implementation needs nothing of the host, so that CUDA graphs may hold it.
    """

    def __init__(self, reference: Callable[P, R], backends: Iterable[Backend]) -> None:
        self.name, self.__doc__ = reference.__name__, reference.__doc__
        self.reference = reference
        self.backends = tuple(backends)

    def __repr__(self) -> str:
        return f"<operation {self.name}>"


def operation(*backends: Backend) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Declare the decorated function as the reference implementation of an operation with these backends."""
    return lambda reference: Operation(reference, backends)


def _either(names: Iterable[str]) -> str:
    return " and ".join(names)
