"""Files that are not what their names say are named as what they are."""

from pathlib import Path

import pytest

from strandline.config import EngineConfig
from strandline.errors import ConfigError
from strandline.file_forms import why_unreadable
from strandline.text.model_files import check_files


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "pointer of Git LFS"),
        (b"\n<!DOCTYPE html><html>", "web page"),
        (b"GGUF\x03\0\0\0", "GGUF"),
        (b"", "it is empty"),
        (b"{", "what its reader says"),
        (None, "what its reader says"),
    ],
    ids=["pointer", "page", "gguf", "empty", "other", "missing"],
)
def test_reason_says_what_the_file_is(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "model.safetensors"
    if content is not None:
        path.write_bytes(content)
    assert reason in why_unreadable(path, ValueError("what its reader says"))


def test_pointer_instead_of_a_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read as JSON: it is a pointer of Git LFS"):
        check_files(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize("name", ["model-Q4_K_M.gguf", "pytorch_model.bin"])
def test_weights_in_other_formats_are_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.touch()
    for model in (tmp_path, path):
        with pytest.raises(ConfigError, match=f"{name}: .* not read.*; name a directory"):
            check_files(EngineConfig(model=str(model)))
