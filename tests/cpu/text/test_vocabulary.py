"""What is loaded of a model for its texts."""

import logging

import pytest

from strandline.text.model_files import DEMO_DIRECTORY
from strandline.text.vocabulary import load_tokenizer


def test_tokenizer_warns_of_no_limit_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        assert len(load_tokenizer(str(DEMO_DIRECTORY)).encode("word " * 9000)) > 8192
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records
