"""What fails in a step: one output, or all of it."""

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
    """Note why one output fails, in place of raising the exception, unless that concerns the whole step."""
    try:
        yield
    except STEP_ERRORS:
        raise
    except Exception as error:
        LOGGER.exception(OUTPUT_FAILED)
        failures[key] = failure_text(error)
