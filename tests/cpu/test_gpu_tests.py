"""Tests that need a GPU replace only attributes that exist: they rarely run, and mypy reads no names in strings."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GPU_TESTS = sorted((ROOT / "tests" / "gpu").rglob("*.py"))
OURS = ("strandline", "tests")


def missing_names(source: str) -> Iterator[str]:
    """Yield the attributes in ``setattr(owner, "name", value)`` that an owner imported from our modules lacks."""
    tree = ast.parse(source)
    imported = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] in OURS
        for alias in node.names
    }
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(_, "setattr"), [ast.Name(owner), ast.Constant(str(name)), *_]):
                if owner in imported and not hasattr(_member(*imported[owner]), name):
                    yield f"{owner}.{name}"


def _member(module: str, name: str) -> Any:
    found = import_module(module)
    return getattr(found, name) if hasattr(found, name) else import_module(f"{module}.{name}")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from strandline import LLM\npatch.setattr(LLM, 'generate', 1)", []),
        ("from strandline import LLM\npatch.setattr(LLM, 'missing', 1)", ["LLM.missing"]),
        ("from strandline.kernels import launch as x\npatch.setattr(x, 'missing', 1)", ["x.missing"]),
    ],
)
def test_missing_names_are_found(source: str, expected: list[str]) -> None:
    assert list(missing_names(source)) == expected


def test_gpu_tests_replace_what_exists() -> None:
    missing = {str(path.relative_to(ROOT)): list(missing_names(path.read_text())) for path in GPU_TESTS}
    assert not {path: names for path, names in missing.items() if names}
