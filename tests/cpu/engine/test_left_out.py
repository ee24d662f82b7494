"""Engines' processes start without what transformers would import for its own models."""

import subprocess
import sys

PROGRAM = """
import sys
from strandline.engine.left_out import leave_generation_out
leave_generation_out()
from strandline.model_config import read_model_config
from strandline.text.model_files import DEMO_DIRECTORY
from strandline.text.vocabulary import load_tokenizer
import strandline.engine.loading
read_model_config(DEMO_DIRECTORY)
print(load_tokenizer(str(DEMO_DIRECTORY)).decode([100, 101]).strip() != "")
print("torch" in sys.modules, "torch._dynamo" in sys.modules, "torch.distributed.tensor" in sys.modules)
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.generation.utils import GenerationMixin as theirs
print(GenerationMixin is theirs, GenerationConfig.__module__.startswith("transformers.generation."))
"""


def test_tokenizers_load_without_generation_which_is_there_when_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "True", "False", "False", "True", "True"], done.stderr
