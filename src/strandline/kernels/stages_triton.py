"""Kernels whose loops take fewer stages where a GPU has too little shared memory for as many as their launches name.

Launches are measured on Hopper GPUs. A stage is a tile that is loaded ahead: fewer take longer, and change no result.
What a kernel takes is known when it has been compiled: the first number of stages that fits is looked for then.
"""
# mypy: ignore-errors

from collections.abc import Iterator
from typing import Any

from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from strandline.env import TRITON
from strandline.errors import ConfigError

NAMES = ("num_stages", "NUM_STAGES")
"""Options of launches that set the number of stages, of all loops or of one."""


def fewer_stages(options: dict[str, Any]) -> dict[str, Any] | None:
    """Return the options of a launch with one stage less; None: it has one."""
    return next(({**options, name: options[name] - 1} for name in NAMES if options.get(name, 1) > 1), None)


def with_fewer_stages(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the options of a launch, then those with fewer and fewer stages."""
    while options is not None:
        yield options
        options = fewer_stages(options)


def staged(kernel):
    """Let a kernel take fewer stages where they do not fit."""
    if not isinstance(kernel, JITFunction):  # interpreted
        return kernel
    fitting: dict[tuple, dict[str, Any]] = {}

    def run(*args, grid, warmup, **options):
        key = tuple(options.items()) if fitting else ()
        taken = fitting.get(key, options)
        while True:
            try:
                # Looked up in the class: launches may be recorded instead.
                return JITFunction.run(kernel, *args, grid=grid, warmup=warmup, **taken)
            except OutOfResources as error:
                taken = fewer_stages(taken)
                if taken is None:
                    raise ConfigError(
                        f"{kernel.__name__} needs {error.required:,} of {error.name} with one stage, and this GPU has "
                        f"{error.limit:,}; choose a model in another format or with smaller heads, use --device cpu, "
                        f"or set {TRITON}=0 to run the reference implementations, which are slow"
                    ) from error
                fitting[tuple(options.items())] = taken

    kernel.run = run
    return kernel
