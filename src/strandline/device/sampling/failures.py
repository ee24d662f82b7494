"""Failures in a step, of one output or of the whole step."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import torch

from strandline.records.failures import OUTPUT_FAILED, failure_text

LOGGER: Final = logging.getLogger(__name__)

STEP_ERRORS: Final = (torch.AcceleratorError, torch.OutOfMemoryError, MemoryError)
"""Errors that concern the whole step, wherever they are raised."""


Key = TypeVar("Key")


@contextmanager
def catch_failure(failures: dict[Key, str], key: Key) -> Iterator[None]:
    """Record an exception as the failure of one output instead of raising it, unless it concerns the whole step."""
    try:
        yield
    except STEP_ERRORS:
        raise
    except Exception as error:
        LOGGER.exception(OUTPUT_FAILED)
        failures[key] = failure_text(error)
