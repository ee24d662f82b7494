"""Processes log from the level on that the environment names, and no more than their own least level allows."""

import logging
from collections.abc import Iterator

import pytest

from strandline import env
from strandline.log_format import configure_log


@pytest.fixture
def strandline_log() -> Iterator[logging.Logger]:
    """Yield the logger, whose level is restored afterwards."""
    log = logging.getLogger("strandline")
    before = log.level
    yield log
    log.setLevel(before)


@pytest.mark.parametrize(
    ("wanted", "least", "level"),
    [
        ("", logging.INFO, logging.INFO),
        ("info", logging.WARNING, logging.WARNING),
        ("warning", logging.INFO, logging.WARNING),
        ("error", logging.WARNING, logging.ERROR),
    ],
)
def test_level_is_the_higher_of_both(
    strandline_log: logging.Logger, monkeypatch: pytest.MonkeyPatch, wanted: str, least: int, level: int
) -> None:
    monkeypatch.setenv(env.LOG_LEVEL, wanted)
    configure_log(least=least)
    assert strandline_log.level == level
