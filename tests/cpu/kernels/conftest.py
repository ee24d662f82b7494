"""Both versions of what runs on a CPU; and Triton's interpreter, made to work with our NumPy and bfloat16, faster."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from strandline import env
from strandline.kernels.binding import why_unavailable
from tests.interpreter import spare_repeated_work


@pytest.fixture(scope="module", params=["torch", "numba"])
def each_version(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a module's tests once with reference implementations, once with Numba versions where there are any."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(env.NUMBA, "0" if request.param == "torch" else "1")
        if request.param == "numba" and why_unavailable("Numba", "cpu"):
            pytest.skip("Numba is not installed, or torch's threads are not GNU OpenMP's")
        yield request.param


if find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1":
    from triton.language import bfloat16, float32
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor
    create_dot = interpreter.InterpreterBuilder.create_dot

    def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        """Let a loop run to a scalar: Triton 3.6 turns its one-element array into an int as NumPy 2.4 forbids."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))

    def _widen(operand: Any) -> Any:
        if operand.dtype.scalar != bfloat16:
            return operand
        data = (operand.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, float32)

    def _create_dot_of_numbers(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        """Multiply bfloat16 as numbers: Triton 3.6 multiplies the integers that it keeps them as."""
        return create_dot(builder, _widen(a), _widen(b), *rest)

    interpreter._patch_lang_tensor = _patch_tensor_and_index
    interpreter.InterpreterBuilder.create_dot = _create_dot_of_numbers
    spare_repeated_work()
