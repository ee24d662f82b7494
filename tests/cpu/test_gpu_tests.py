"""Tests that need a GPU name only what exists: they rarely run, and names change meanwhile."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GPU_TESTS = sorted((ROOT / "tests" / "gpu").rglob("*.py"))
OURS = ("strandline", "tests")


def missing_names(source: str) -> Iterator[str]:
    """Yield names imported from our modules, and attributes of what is, that do not exist."""
    tree, found = ast.parse(source), dict[str, Any]()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.module is None or node.module.split(".")[0] not in OURS:
            continue
        module = import_module(node.module)
        for alias in node.names:
            try:
                found[alias.asname or alias.name] = _member(module, alias.name)
            except (AttributeError, ImportError):
                yield f"{node.module}.{alias.name}"
    for owner, name in _attributes(tree):
        value = found.get(owner)
        if isinstance(value, type | ModuleType) and not hasattr(value, name):
            yield f"{owner}.{name}"


def _member(module: ModuleType, name: str) -> Any:
    return getattr(module, name) if hasattr(module, name) else import_module(f"{module.__name__}.{name}")


def _attributes(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield names with their attributes: ``owner.name`` and ``setattr(owner, "name", value)``."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name(owner), name):
                yield owner, name
            case ast.Call(ast.Attribute(_, "setattr"), [ast.Name(owner), ast.Constant(str(name)), *_]):
                yield owner, name


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from strandline import LLM\nLLM.generate", []),
        ("from strandline import LLM\nLLM.missing", ["LLM.missing"]),
        ("from strandline import LLM\npatch.setattr(LLM, 'missing', 1)", ["LLM.missing"]),
        ("from strandline import missing", ["strandline.missing"]),
        ("from strandline.kernels import launch\nlaunch.missing", ["launch.missing"]),
    ],
)
def test_missing_names_are_found(source: str, expected: list[str]) -> None:
    assert list(missing_names(source)) == expected


def test_gpu_tests_name_what_exists() -> None:
    missing = {str(path.relative_to(ROOT)): list(missing_names(path.read_text())) for path in GPU_TESTS}
    assert not {path: names for path, names in missing.items() if names}
