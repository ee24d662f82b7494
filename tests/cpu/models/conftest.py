"""Models of ours, loaded once from what transformers saved."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from strandline.models.model_options import ModelOptions
from strandline.models.weights import load_model
from tests.cpu.models import families

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return what loads our model of a family, in float32."""
    directory = tmp_path_factory.mktemp("models")

    @cache
    def load_once(name: str) -> Any:
        return load_model(families.save(name, directory), ModelOptions(dtype=torch.float32))

    return load_once
