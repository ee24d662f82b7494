"""Shape suffixes: a module's legend explains every letter in the suffixes of the names that the module binds."""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "strandline"
LEGEND = re.compile(r"^Shape suffixes(.*?)(?:\n\n|\Z)", re.DOTALL | re.MULTILINE)
SUFFIX = re.compile(r"_([A-Z][A-Z0-9]*)$")
MODULES = {
    str(path.relative_to(PACKAGE)): path.read_text()
    for folder in ("kernels", "models")
    for path in sorted((PACKAGE / folder).rglob("*.py"))
}


@cache
def legend(text: str) -> str | None:
    """Return the part of a module's docstring that explains its shape suffixes."""
    found = LEGEND.search(ast.get_docstring(ast.parse(text)) or "")
    return found and found[1]


def explained(name: str, modules: Mapping[str, str]) -> set[str]:
    """Return the letters of a module's legend, and of the legends of kernel modules that it refers to."""
    text = legend(modules[name]) or ""
    others = {home(other, name, modules) for other in re.findall(r"``(?:kernels/)?([\w/]+\.py)``", text)} - {name}
    return set(re.findall(r"\b[A-Z]\b", text)).union(*(explained(other, modules) for other in others))


def home(file: str, name: str, modules: Mapping[str, str]) -> str:
    """Return the kernel module that a legend refers to by its file: of several, the one in the same folder."""
    found = [module for module in modules if module.startswith("kernels/") and module.endswith(f"/{file}")]
    return min(found, key=lambda module: Path(module).parent != Path(name).parent)


def bound_names(text: str) -> Iterator[str]:
    """Yield the variables, parameters and attributes that a module binds."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name


def unexplained(name: str, modules: Mapping[str, str]) -> set[str]:
    """Return the letters of a module's suffixes that its legend lacks; digits are sizes, and constants pass."""
    suffixes = [
        found[1] for bound in bound_names(modules[name]) if not bound.isupper() if (found := SUFFIX.search(bound))
    ]
    return {letter for suffix in suffixes for letter in suffix if letter.isalpha()} - explained(name, modules)


def test_legends_explain_every_suffix() -> None:
    found = {name: unexplained(name, MODULES) for name, text in MODULES.items() if legend(text) is not None}
    assert found
    assert {name: letters for name, letters in found.items() if letters} == {}


# The check itself: it finds a fault that was put in.


@pytest.mark.parametrize("line", ["x_TZ = 1", "def f(x_Z): pass", "class C:\n    x_Z: int", "self.x_Z = 1"])
def test_unexplained_letter_is_found(line: str) -> None:
    modules = {"kernels/x.py": f'"""Text.\n\nShape suffixes: T tokens.\n"""\n{line}\n'}
    assert unexplained("kernels/x.py", modules) == {"Z"}


@pytest.mark.parametrize("line", ["x_TN1 = 1", "MAX_Z = 1", "f(x_Z=y.x_Z)"])
def test_explained_letter_passes(line: str) -> None:
    modules = {
        "kernels/x.py": f'"""Text.\n\nShape suffixes: as in ``y.py``; N sequences.\n"""\n{line}\n',
        "kernels/y.py": '"""Text.\n\nShape suffixes: T tokens.\n"""\n',
    }
    assert unexplained("kernels/x.py", modules) == set()
