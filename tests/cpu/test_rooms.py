"""Who may import whom: the table of docs/architecture.md, held against the source."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
VOCABULARY = frozenset(
    {
        "ids",
        "specs",
        "errors",
        "config",
        "model_config",
        "speculative_config",
        "drafter_config",
        "kv_events_config",
        "json_options",
        "plain_values",
    }
    | {"kv_transfer_config", "reasoning_config", "env", "clock", "gc_policy", "version", "config_fields", "tier_sizes"}
    | {
        "architectures",
        "picture_config",
        "lora_config",
        "log_format",
        "signals",
        "file_forms",
        "text_input",
        "flag_actions",
        "foreign_flags",
        "weight_transfer_config",
        "file_tiers",
    }
)
ROOMS = {
    "vocabulary": frozenset[str](),
    "records": frozenset({"vocabulary"}),
    "cache": frozenset({"vocabulary", "records"}),
    "kernels": frozenset({"vocabulary"}),
    "models": frozenset({"vocabulary", "kernels"}),
    "transfer": frozenset({"vocabulary", "records"}),
    "events": frozenset({"vocabulary", "records"}),
    "routing": frozenset({"vocabulary", "records", "events"}),
    "text": frozenset({"vocabulary", "records"}),
    "pictures": frozenset({"vocabulary", "records"}),
    "device": frozenset({"vocabulary", "kernels", "models", "transfer", "records"}),
    "engine": frozenset(
        {"vocabulary", "cache", "kernels", "models", "transfer", "events", "records", "text", "pictures", "device"}
    ),
    "server": frozenset({"vocabulary", "events", "routing", "records", "text", "pictures"}),
    "ray": frozenset({"vocabulary", "events", "routing", "records", "text", "server"}),
    "demo": frozenset(),
    "bench": frozenset(
        {"demo", "vocabulary", "cache", "models", "records", "text", "engine", "server", "events"} | {"routing"}
    ),
}
ROOMS["cli"] = frozenset(ROOMS)
"""Each room, and the rooms that it may import besides itself."""

FOLDERS: Mapping[str, Mapping[str, frozenset[str]]] = {
    "kernels": {
        "": frozenset(),
        "rowwise": frozenset({""}),
        "gemm": frozenset({"", "rowwise"}),
        "experts": frozenset({"", "rowwise", "gemm"}),
        "attention": frozenset({"", "rowwise", "gemm"}),
        "recurrences": frozenset({"", "rowwise"}),
        "streams": frozenset({"", "rowwise"}),
        "sampling": frozenset({""}),
        "collectives": frozenset({"", "rowwise"}),
    },
    "cache": {
        "": frozenset(),
        "states": frozenset({""}),
        "policy": frozenset({"", "states"}),
        "announcing": frozenset({""}),
        "tiers": frozenset({"", "policy", "announcing"}),
        "inspection": frozenset({"", "policy", "announcing", "tiers"}),
    },
    "models/layers": {
        "parts": frozenset(),
        "attention": frozenset({"parts"}),
        "recurrences": frozenset({"parts"}),
        "feed_forward": frozenset({"parts"}),
        "streams": frozenset({"parts"}),
        "": frozenset({"parts", "attention", "recurrences", "feed_forward", "streams"}),
    },
    "models": {
        "layers": frozenset(),
        "vision": frozenset({"layers"}),
        "storage": frozenset({"layers"}),
        "lora": frozenset({"layers", "storage"}),
        "drafters": frozenset({"layers", "storage"}),
        "families": frozenset({"layers", "vision", "lora", "drafters"}),
        "": frozenset({"layers", "vision", "storage", "lora", "drafters", "families"}),
    },
    "device": {
        "hardware": frozenset(),
        "ranks": frozenset(),
        "weights": frozenset({"hardware"}),
        "stores": frozenset({"hardware"}),
        "batches": frozenset({"hardware"}),
        "sampling": frozenset({"hardware"}),
        "steps": frozenset({"hardware", "stores", "batches", "sampling"}),
        "drafters": frozenset({"hardware", "batches", "sampling", "steps"}),
        "": frozenset({"hardware", "weights", "stores", "batches", "sampling", "steps", "drafters"}),
    },
    "engine": {
        "requests": frozenset(),
        "drafting": frozenset({"requests"}),
        "scheduling": frozenset({"requests", "drafting"}),
        "prefix_transfer": frozenset({"requests", "scheduling"}),
        "caching": frozenset({"requests", "scheduling"}),
        "startup": frozenset({"requests", "scheduling"}),
        "workers": frozenset(),
        "": frozenset({"requests", "drafting", "scheduling", "prefix_transfer", "caching", "startup", "workers"}),
        "processes": frozenset({"", "startup", "workers"}),
    },
    "server": {
        "engines": frozenset(),
        "http": frozenset({"engines"}),
        "requests": frozenset({"engines", "http"}),
        "completions": frozenset({"engines", "http", "requests"}),
        "messages": frozenset({"engines", "http", "requests"}),
        "responses": frozenset({"engines", "http", "requests"}),
        "generate": frozenset({"engines", "http", "requests"}),
        "labels": frozenset({"engines", "http", "requests"}),
        "admin": frozenset({"engines", "http", "requests"}),
        "pooling": frozenset({"engines", "http", "requests"}),
        "": frozenset({"engines", "http", "requests", "completions", "messages", "responses", "generate", "labels"})
        | {"admin", "pooling"},
    },
}
"""Each folder of a room, or of a folder of one, and which others of these it may import; "": the files at the top."""

LIGHT_ROOMS = ("events", "routing", "records", "text", "server", "ray")
"""Rooms that load no tensor library."""

IMPURE = frozenset(
    {"asyncio", "concurrent", "datetime", "io", "logging", "mmap", "multiprocessing", "os", "pathlib", "random"}
    | {"secrets", "shutil", "socket", "subprocess", "tempfile", "threading", "time", "urllib", "uuid"}
)
"""Parts of the standard library that do I/O, read a clock, or give another answer the next time."""

Sources = Mapping[str, str]
"""Module name -> source text; a package's name stands for its ``__init__``."""


def room_of(module: str) -> str:
    """Return a module's room; raise ValueError when it is in none."""
    parts = module.split(".")
    if len(parts) == 1 or parts[1] == "__main__":
        return "cli"
    if parts[1] in VOCABULARY:
        return "vocabulary"
    if parts[1] in ROOMS and parts[1] != "vocabulary":
        return parts[1]
    raise ValueError(f"{module} is in no room: put it into one, or add a room here and in docs/architecture.md")


@cache
def modules_imported(text: str, module: str, *, is_package: bool) -> frozenset[str]:
    """Return the dotted names that a module imports anywhere: on top, in functions, under TYPE_CHECKING, by string.

    ``from a import b`` counts as ``a.b``: whether ``b`` is a module of ``a`` is not known from the text.
    """
    return frozenset(_modules_imported(text, module, is_package=is_package))


def _modules_imported(text: str, module: str, *, is_package: bool) -> Iterator[str]:
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*origin, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in {"import_module", "__import__"}:
                yield str(node.args[0].value)


def import_graph(sources: Sources, packages: frozenset[str] = frozenset()) -> dict[str, set[str]]:
    """Return which of our modules each of our modules imports."""
    graph = dict[str, set[str]]()
    for module, text in sources.items():
        names = modules_imported(text, module, is_package=module in packages)
        graph[module] = {nearest_module(name, sources) for name in names if name.split(".")[0] == "strandline"}
    return graph


def nearest_module(name: str, sources: Sources) -> str:
    """Return the module that an imported dotted name is, or lies in."""
    while "." in name and name not in sources:
        name = name.rpartition(".")[0]
    return name


def forbidden_imports(sources: Sources, packages: frozenset[str] = frozenset()) -> list[str]:
    """Return the imports that the table does not allow, as sentences."""
    return [
        f"{module} ({room_of(module)}) imports {imported} ({room_of(imported)})"
        for module, imports in import_graph(sources, packages).items()
        for imported in sorted(imports)
        if room_of(imported) not in {room_of(module), *ROOMS[room_of(module)]}
    ]


def is_below(module: str, parent: str) -> bool:
    """Whether a module is in a folder, given as in ``FOLDERS``, or in one of its folders."""
    return module.startswith(f"strandline.{parent.replace('/', '.')}.")


def folder_of(module: str, parent: str) -> str:
    """Return which folder of another one a module is in, or "" for its top; raise ValueError when there is no such one.

    Args:
        parent: as in ``FOLDERS``; the module is below it.
    """
    package = f"strandline.{parent.replace('/', '.')}"
    first, *others = module.removeprefix(f"{package}.").split(".")
    folder = first if others or f"{package}.{first}" in PACKAGES else ""
    if folder not in FOLDERS[parent]:
        raise ValueError(f"{module} is in no folder of {parent}: add one here and in docs/architecture.md")
    return folder


def forbidden_in_rooms(sources: Sources, packages: frozenset[str] = frozenset()) -> list[str]:
    """Return the imports between folders of one parent that the table does not allow, as sentences.

    A parent's ``__init__`` is empty and therefore not counted.
    """
    return [
        f"{module} imports {imported}"
        for module, imports in import_graph(sources, packages).items()
        for imported in sorted(imports)
        for parent, folders in FOLDERS.items()
        if is_below(module, parent) and is_below(imported, parent)
        if folder_of(imported, parent) not in {folder_of(module, parent), *folders[folder_of(module, parent)]}
    ]


def cycle(sources: Sources, packages: frozenset[str] = frozenset()) -> list[str]:
    """Return the modules of one import cycle, or nothing."""
    try:
        TopologicalSorter(import_graph(sources, packages)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def impurities(text: str, module: str) -> list[str]:
    """Return what a module imports that a pure one must not: other people's packages, I/O, clocks, chance."""
    roots = {name.split(".")[0] for name in modules_imported(text, module, is_package=False)}
    allowed = {"strandline", *sys.stdlib_module_names} - IMPURE
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return sorted(roots - allowed) + sorted(calls & {"open", "input"})


def package_files() -> dict[str, Path]:
    """Return our modules by name; a package stands for its ``__init__``."""
    files = dict[str, Path]()
    for path in sorted((SRC / "strandline").rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


FILES = package_files()
SOURCES: Sources = {module: path.read_text() for module, path in FILES.items()}
PACKAGES = frozenset(module for module, path in FILES.items() if path.name == "__init__.py")


def test_every_module_is_in_a_room() -> None:
    for module in SOURCES:
        room_of(module)


def test_rooms_import_only_what_the_table_allows() -> None:
    assert forbidden_imports(SOURCES, PACKAGES) == []


def test_every_module_is_in_a_folder_of_its_room() -> None:
    for module in SOURCES:
        for parent in FOLDERS:
            if is_below(module, parent):
                folder_of(module, parent)


def test_folders_import_only_what_the_table_allows() -> None:
    assert forbidden_in_rooms(SOURCES, PACKAGES) == []


def test_modules_import_each_other_in_no_cycle() -> None:
    assert cycle(SOURCES, PACKAGES) == []


def records_loaded_by_the_cache() -> set[str]:
    """Return the modules of ``records/`` that modules of the cache import, directly or not."""
    graph = import_graph(SOURCES, PACKAGES)
    waiting = [module for module in graph if room_of(module) == "cache"]
    loaded = set(waiting)
    while waiting:
        new = {module for module in graph[waiting.pop()] if room_of(module) in {"cache", "records"}} - loaded
        loaded |= new
        waiting.extend(new)
    return {module for module in loaded if room_of(module) == "records"}


def test_the_cache_is_pure_python() -> None:
    modules = [*(m for m in SOURCES if room_of(m) == "cache"), *sorted(records_loaded_by_the_cache())]
    found = {module: impurities(SOURCES[module], module) for module in modules}
    assert {module: names for module, names in found.items() if names} == {}


def test_rooms_without_tensors_import_no_tensor_library() -> None:
    forbidden = {
        f"{module} imports {name}"
        for module, text in SOURCES.items()
        if room_of(module) in LIGHT_ROOMS
        for name in modules_imported(text, module, is_package=module in PACKAGES)
        if name.split(".")[0] in {"torch", "triton", "numba", "safetensors"}
    }
    assert forbidden == set()


def test_importing_the_cache_loads_no_tensor_library() -> None:
    modules = [m for m in SOURCES if m.startswith("strandline.cache") or m.partition(".")[2] in VOCABULARY]
    program = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert "strandline.cache" in loaded
    assert {"torch", "numpy", "transformers", "safetensors"} & set(loaded) == set()


def test_the_table_in_the_documentation_is_the_one_held_here() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `([a-z]+)/?`([^|]*)\|[^|]*\| ([^|]*) \|$", text, re.MULTILINE)
    assert {room: set(re.findall(r"`([a-z]+)`", allowed)) for room, _, allowed in rows} == ROOMS
    assert set(re.findall(r"`([a-z_]+)`", rows[0][1])) == VOCABULARY


def test_the_table_of_folders_in_the_documentation_is_held_here() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    row = rf"^\| `({'|'.join(FOLDERS)})/([a-z_]*)(?:/|\*\.py)` \|[^|]*\|([^|]*)\|$"
    rows = re.findall(row, text, re.MULTILINE)
    documented = {(room, folder): set(re.findall(r"`([a-z_]+)`", allowed)) for room, folder, allowed in rows}
    for room, folders in FOLDERS.items():
        for folder, allowed in folders.items():
            assert documented[room, folder] == allowed - {""}, (room, folder)
    assert len(documented) == sum(len(folders) for folders in FOLDERS.values())


# The checks themselves: each finds a fault that was put in.


@pytest.mark.parametrize(
    "text",
    [
        "import strandline.engine.loop",
        "from strandline.engine import loop",
        "from strandline.engine.loop import run",
        "from ..engine import loop",
        "from ..engine.loop import run",
        "def f():\n    from strandline.engine import loop",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from strandline.engine.loop import run",
        "try:\n    import strandline.engine.loop as loop\nexcept ImportError:\n    pass",
        "import importlib\nimportlib.import_module('strandline.engine.loop')",
        "from strandline import LLM",
        "import strandline",
    ],
)
def test_a_forbidden_import_is_found_however_it_is_written(text: str) -> None:
    sources = {"strandline": "", "strandline.engine": "", "strandline.engine.loop": "", "strandline.cache.tree": text}
    assert len(forbidden_imports(sources)) == 1


@pytest.mark.parametrize("text", ["from strandline import ids", "from .walk import x", "from ..ids import BlockId"])
def test_an_allowed_import_is_let_pass(text: str) -> None:
    sources = {"strandline.ids": "", "strandline.cache.walk": "", "strandline.cache.tree": text}
    assert forbidden_imports(sources) == []
    assert len(import_graph(sources)["strandline.cache.tree"]) == 1


def test_a_forbidden_import_between_folders_is_found() -> None:
    text = "from strandline.kernels.experts.moe import mixture"
    sources = {"strandline.kernels.experts.moe": "", "strandline.kernels.gemm.linear": text}
    assert len(forbidden_in_rooms(sources)) == 1
    assert forbidden_in_rooms({**sources, "strandline.kernels.gemm.linear": ""}) == []


def test_a_forbidden_import_between_nested_folders_is_found() -> None:
    text = "from strandline.models.layers.attention.attention import Attention"
    sources = {"strandline.models.layers.attention.attention": "", "strandline.models.layers.recurrences.mamba2": text}
    assert len(forbidden_in_rooms(sources)) == 1
    assert forbidden_in_rooms({**sources, "strandline.models.layers.recurrences.mamba2": ""}) == []


def test_a_module_in_an_unknown_folder_is_refused() -> None:
    with pytest.raises(ValueError, match="in no folder of kernels"):
        folder_of("strandline.kernels.misc.thing", "kernels")


def test_a_relative_import_in_a_package_counts_from_the_package() -> None:
    sources = {"strandline.cache": "from .tree import x", "strandline.cache.tree": ""}
    packages = frozenset({"strandline.cache"})
    assert import_graph(sources, packages)["strandline.cache"] == {"strandline.cache.tree"}


def test_a_module_in_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match="in no room"):
        room_of("strandline.utils")


@pytest.mark.parametrize(
    "back", ["from strandline.cache import a", "def f():\n    import strandline.cache.a", "from .a import x"]
)
def test_a_cycle_is_found(back: str) -> None:
    sources = {"strandline.cache.a": "from strandline.cache.b import x", "strandline.cache.b": back}
    assert set(cycle(sources)) == {"strandline.cache.a", "strandline.cache.b"}


@pytest.mark.parametrize(
    "text", ["import torch", "def f():\n    import numpy as np", "from time import time", "open(1)"]
)
def test_an_impurity_is_found(text: str) -> None:
    assert len(impurities(text, "strandline.cache.tree")) == 1
