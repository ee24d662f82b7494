"""What the package imports is declared in ``pyproject.toml``, and what is declared is pinned."""

import re
import sys
import tomllib
from importlib.metadata import packages_distributions

from tests.cpu.test_rooms import PACKAGES, ROOT, SOURCES, modules_imported

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BROUGHT_BY_TORCH = {"triton"}
"""On machines with a GPU; the modules that import it are loaded nowhere else."""


def distribution_name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-")


DECLARED = {distribution_name(each) for each in PROJECT["dependencies"]}
DEVELOPMENT = {distribution_name(each) for each in PROJECT["optional-dependencies"]["dev"]}
EXTRAS = {
    distribution_name(each)
    for name, extra in PROJECT["optional-dependencies"].items()
    if name != "dev"
    for each in extra
}
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#")


def test_every_third_party_import_is_a_declared_dependency() -> None:
    imported = {
        name.split(".")[0]
        for module, text in SOURCES.items()
        for name in modules_imported(text, module, is_package=module in PACKAGES)
    }
    foreign = imported - set(sys.stdlib_module_names) - {"strandline"} - BROUGHT_BY_TORCH
    owners = packages_distributions()
    allowed = DECLARED | EXTRAS
    undeclared = {name for name in foreign if not set(map(distribution_name, owners.get(name, [name]))) & allowed}
    assert undeclared == set()


def test_every_declared_dependency_is_pinned() -> None:
    assert set(PINS) == DECLARED | DEVELOPMENT
