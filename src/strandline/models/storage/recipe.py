"""Which weights are quantised, and how, as a configuration says: for random weights. Otherwise the files decide.

Where a configuration has one format, it is that of all weights that published models convert. Where it has several, it
names modules, by the names of another implementation: what comes before the layers may differ.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

from strandline.models.storage.conversion import is_converted
from strandline.models.storage.layouts import Layout
from strandline.models.storage.published_names import text_name
from strandline.models.storage.quantization_config import (
    MODELOPT,
    Block,
    Fp8Scheme,
    Scheme,
    format_of_group,
)

IGNORED: Final = ("ignore", "exclude_modules", "modules_to_not_convert")
"""Fields that list modules which are not quantised, by the tools that write them."""

BEFORE_LAYERS: Final = re.compile(r"(model\.|backbone\.|llm\.)*")

Chooser = Callable[[str, Sequence[int]], int | None]
"""Returns which scheme a published weight of a name and a shape has; None: it is not quantised."""


def choose_schemes(values: Mapping[str, Any], schemes: Sequence[Scheme]) -> Chooser:
    """Return what chooses among the schemes that ``read_schemes`` found in a ``quantization_config``."""
    recipe = values.get("quantization", values)
    if isinstance(schemes[0], Layout) and schemes[0].of_experts_alone:
        return lambda name, shape: 0 if len(shape) == 3 else None
    if len(schemes) == 1:
        return _by_names(recipe)
    if "quantized_layers" in recipe:
        return _by_layers(recipe["quantized_layers"], schemes)
    return _by_groups(values, schemes)


def _by_names(recipe: Mapping[str, Any]) -> Chooser:
    """Return what chooses the only scheme for all that published models convert, unless the recipe ignores it."""
    ignored = _ignored(recipe)

    def choose(name: str, shape: Sequence[int]) -> int | None:
        return 0 if is_converted(name, shape) and not _matches_any(name.removesuffix(".weight"), ignored) else None

    return choose


def _ignored(recipe: Mapping[str, Any]) -> list[str]:
    """Return the patterns of modules that are not quantised."""
    return [pattern for field in IGNORED for pattern in recipe.get(field) or []]


def _by_layers(layers: Mapping[str, Mapping[str, Any]], schemes: Sequence[Scheme]) -> Chooser:
    """Return what chooses by ModelOpt's list of modules and of experts as a whole."""
    kinds = {_module(name): _index(layer["quant_algo"], schemes) for name, layer in layers.items()}

    def choose(name: str, shape: Sequence[int]) -> int | None:
        parts = _module(name).split(".")
        modules = (".".join(parts[:length]) for length in range(len(parts), 0, -1) if len(shape) > 1)
        return next((kinds[module] for module in modules if module in kinds), None)

    return choose


def _index(algorithm: str | None, schemes: Sequence[Scheme]) -> int | None:
    if algorithm is None:
        return None
    found = MODELOPT[algorithm.upper()]
    if isinstance(found, Block):
        return next(index for index, scheme in enumerate(schemes) if isinstance(scheme, Fp8Scheme))
    return schemes.index(found)


def _by_groups(values: Mapping[str, Any], schemes: Sequence[Scheme]) -> Chooser:
    """Return what chooses by the targets of the groups of ``compressed-tensors``: modules, patterns, or all."""
    formats = list(dict.fromkeys(format_of_group(group, values) for group in values["config_groups"].values()))
    targets = [
        (target, formats.index(format_of_group(group, values)))
        for group in values["config_groups"].values()
        for target in group.get("targets") or ["Linear"]
    ]
    # A class of modules is that of all.
    targets.sort(key=lambda target: _is_class(target[0]))
    ignored = _ignored(values)

    def choose(name: str, shape: Sequence[int]) -> int | None:
        module = name.removesuffix(".weight")
        if _matches_any(module, ignored):
            return None
        found = (index for target, index in targets if _matches(module, target) or _is_class(target))
        return next(found, None) if is_converted(name, shape) else None

    return choose


def _is_class(target: str) -> bool:
    return target[:1].isupper()


def _matches_any(module: str, patterns: Sequence[str]) -> bool:
    return any(_matches(module, pattern) for pattern in patterns)


def _matches(module: str, target: str) -> bool:
    """Return whether a module has a name, or one that matches a regular expression or a pattern with ``*``."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return _module(module) == _module(target) or ("*" in target and fnmatchcase(module, target))


def _module(name: str) -> str:
    """Return the name of a module as all implementations have it."""
    return BEFORE_LAYERS.sub("", text_name(name.removesuffix(".weight")), count=1)
