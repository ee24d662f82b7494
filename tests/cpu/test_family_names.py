"""Only a family's description, its builder and its own kernels know it by name; every other use has a reason."""

import re
from collections.abc import Mapping
from pathlib import Path

import strandline

PACKAGE = Path(strandline.__file__).parent

FAMILY = re.compile(
    r"gdn|gated.?delta|olmo|qwen|lfm|mamba.?[12]|falcon|jamba|kimi|kda|granite|bamba|zamba|recurrent.?gemma|rglru|minimax|lightning|nemotron|glm|gpt.?oss|gemma.?3|bailing|lara.?mini|minicpm|intern.?s2",
    re.IGNORECASE,
)

HOMES = re.compile(r"(models|architectures)/.*|kernels/recurrences/(gdn|kda|lightning|rglru|mamba[12])\w*\.py")

ALLOWED: Mapping[str, str] = {
    "model_config.py": "the nearest of unsupported architectures",
    "drafter_config.py": "published drafters describe their layers as Qwen3 does",
    "text/tool_formats.py": "wire formats of tool calls are named after the models that brought them",
    "server/requests/output_parser.py": "wire formats of reasoning, named likewise",
    "bench/known_models.py": "a table of known models, and the default of flags",
    "bench/cost.py": "times measured of known models",
    "demo/intents.py": "what the demo model is taught about itself",
    "demo/words.py": "names of animals",
    "foreign_flags.py": "flags of vLLM and SGLang that name a recurrence",
}


def test_family_names_stay_in_models_and_own_kernels() -> None:
    paths = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    found = {name for name, path in paths.items() if FAMILY.search(name) or FAMILY.search(path.read_text())}
    assert any(HOMES.fullmatch(name) for name in found)
    assert {name for name in found if not HOMES.fullmatch(name)} <= set(ALLOWED)
