"""Models load without transformers: its release cannot change what a file means."""

import subprocess
import sys
from pathlib import Path

from tests.cpu.models import families

PROGRAM = """
import sys
from pathlib import Path
import strandline.engine.loading as loading
from strandline.config import EngineConfig
from strandline.models.geometry import read_model_size
from strandline.text.model_files import default_sampling_params
for directory in map(Path, sys.argv[1:]):
    read_model_size(directory)
    default_sampling_params(directory)
    config = EngineConfig(model=str(directory), device="cpu", memory="4MiB", skip_tokenizer_init=True)
    loading.load_core(config, loading.load_vocabulary(config)).close()
    print([name for name in sys.modules if name.partition(".")[0] == "transformers"])
"""

WITH_TOKENIZER = """
import sys
import strandline.engine.loading
from strandline.text.model_files import DEMO_DIRECTORY
from strandline.text.vocabulary import load_tokenizer
print(load_tokenizer(str(DEMO_DIRECTORY)).decode([100, 101]).strip() != "", "torch" in sys.modules)
unwanted = ("torch._dynamo", "torch.distributed.tensor", "transformers.generation", "transformers.configuration_utils")
print(*(name in sys.modules for name in unwanted))
"""


def test_models_load_without_transformers(tmp_path: Path) -> None:
    directories = [str(families.save(name, tmp_path)) for name in ("qwen3_5-vision", "nemotron_h")]
    command = [sys.executable, "-c", PROGRAM, *directories]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-2:] == ["[]", "[]"], done.stderr


def test_tokenizers_load_without_what_models_need() -> None:
    # With transformers' own models come torch's compiler and distributed tensors, a third of an engine's start.
    done = subprocess.run([sys.executable, "-c", WITH_TOKENIZER], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "True", "False", "False", "False", "False"], done.stderr
