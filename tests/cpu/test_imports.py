"""Benchmarks, tools and GPU tests, which no other check imports, import only names that exist."""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for folder in ("benchmarks", "tools", "tests/gpu") for path in (ROOT / folder).rglob("*.py"))


def missing_names(text: str) -> list[str]:
    """Return what a script imports from the package or the tests that is not there."""
    found = [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("strandline", "tests")
        for alias in node.names
    ]
    return [f"{module}.{name}" for module, name in found if module and not exists(module, name)]


def exists(module: str, name: str) -> bool:
    if find_spec(module) is None:
        return False
    loaded = import_module(module)
    return hasattr(loaded, name) or (hasattr(loaded, "__path__") and find_spec(f"{module}.{name}") is not None)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_script_imports_only_names_that_exist(path: Path) -> None:
    assert missing_names(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    ["from strandline.ids import Nothing", "from strandline.nothing import x", "from tests.cpu.test_imports import x"],
)
def test_missing_name_is_found(line: str) -> None:
    assert len(missing_names(line)) == 1
