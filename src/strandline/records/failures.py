"""Exceptions that concern one output of a request: they end that output with an error, and nothing else."""

from typing import Final

OUTPUT_FAILED: Final = "an output has failed and ends with an error"
"""What is logged, with the traceback."""

MAX_CHARACTERS: Final = 200


def failure_text(error: Exception) -> str:
    """Return the text that an output ends with after an exception."""
    return f"{type(error).__name__}: {error}"[:MAX_CHARACTERS]
