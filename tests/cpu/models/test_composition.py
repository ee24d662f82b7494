"""Layers are composed of parts: what a class of a model inherits from another one, it overrides only as listed here."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

MODELS = Path(__file__).parents[3] / "src" / "strandline" / "models"

OVERRIDDEN = {
    "DecoderLayer": {"forward"},  # what connects the parts of a layer, where a family does that in its own way
    "Projection": {"targets"},  # names of published tensors
    "PreNorm": {"connect", "enter", "add"},  # residuals of one file that share a norm and its kernels
}
"""By class, the methods that classes which inherit from it override."""


class Class(NamedTuple):
    """What a definition says."""

    bases: tuple[str, ...]
    methods: frozenset[str]


def classes_of(texts: Iterable[str]) -> dict[str, Class]:
    """Return the classes that modules define, without ``__init__``."""
    found = dict[str, Class]()
    for node in (node for text in texts for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.ClassDef):
            bases = tuple(ast.unparse(base).partition("[")[0] for base in node.bases)
            methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)} - {"__init__"}
            found[node.name] = Class(bases, frozenset(methods))
    return found


def overridden(classes: Mapping[str, Class]) -> Iterator[tuple[str, str]]:
    """Yield classes with methods of theirs that classes which inherit from them override; protocols have none."""
    for each in classes.values():
        inherited = [base for base in each.bases if base in classes]
        while inherited:
            base = inherited.pop()
            bases, methods = classes[base]
            if "Protocol" not in bases:
                yield from ((base, method) for method in each.methods & methods)
            inherited += [other for other in bases if other in classes]


def test_classes_override_only_what_is_listed() -> None:
    classes = classes_of(path.read_text() for path in MODELS.rglob("*.py"))
    found = dict[str, set[str]]()
    for base, method in overridden(classes):
        found.setdefault(base, set()).add(method)
    assert found == OVERRIDDEN


def test_an_override_of_an_inherited_method_is_found() -> None:
    first = "class First(nn.Module):\n    def f(self): ...\n    def g(self): ...\n"
    others = "class Second(First):\n    def g(self): ...\nclass Third(Second[int]):\n    def f(self): ...\n"
    assert list(overridden(classes_of([first, others]))) == [("First", "g"), ("First", "f")]
