"""Which published weights an adapter changes.

An adapter names modules as the class does that it was trained on: with the prefixes of a model with towers or without,
and experts one by one or all in one tensor, whichever way the model's own weights are published.

Shape suffixes: O outputs, I inputs, R ranks, X experts; N ranks of all experts.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from strandline.errors import WeightsError
from strandline.models.layers.parts.targets import Target
from strandline.models.lora.adapter_files import AdapterFiles, Factors
from strandline.models.lora.low_rank import LowRank, added, is_matrix, listed

MAX_NAMES: Final = 5
"""Maximum number of modules listed in an error; further ones are counted."""

OUTER: Final = re.compile(r"(?:(?:model|backbone|language_model|llm)\.)*(?=layers\.\d|lm_head$)")
"""What classes of one architecture put before the names of layers and of the output head."""

WRAPPED: Final = re.compile(r"(?P<experts>(?:.*\.)?experts)(?P<inner>(?:\.base_layer)*)")
"""Name of a change of a parameter of all experts. Changes of two parameters are nested."""

ONE_EXPERT: Final = re.compile(r"(?P<experts>(?:.*\.)?experts)\.(?P<index>\d+)\.(?P<part>gate_proj|up_proj|down_proj)")
SYNONYMS: Final = (
    (re.compile(r"(?<=\.)block_sparse_moe(?=\.)"), "mlp"),
    (re.compile(r"(?<=\.self_attn\.)forget_gate\."), ""),
    (re.compile(r"(?<=\.self_attn\.)gate_proj$"), "g_proj"),
    (re.compile(r"(?<=\d\.)attention(?=\.)"), "self_attn"),
    (re.compile(r"(?<=\.self_attn\.)dense$"), "o_proj"),
    (re.compile(r"(?<=\.experts\.)(\d+\.)w1$"), r"\1gate_proj"),
    (re.compile(r"(?<=\.experts\.)(\d+\.)w2$"), r"\1down_proj"),
    (re.compile(r"(?<=\.experts\.)(\d+\.)w3$"), r"\1up_proj"),
)
"""What published weights and classes of transformers call differently."""

FUSED: Final = re.compile(r"(?P<experts>(?:.*\.)?experts)\.(?P<part>gate_up_proj|up_proj|down_proj)")
PARTS: Final = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
"""Parameters of all experts, and the projections of one expert that each holds, one above the other."""


class Module(NamedTuple):
    """A module that an adapter changes."""

    label: str
    """Its name in messages, and for patterns."""
    name: str
    """Its name without what differs between classes."""
    factors: Factors


class ExpertShapes(NamedTuple):
    """The experts of a layer, as the model's weights are published."""

    num: int
    parts: Mapping[str, tuple[int, int]]
    """Shapes of one expert's projections."""
    are_fused: bool

    def fused(self, part: str) -> tuple[int, int, int] | None:
        """Return the shape of a parameter of all experts; None: the model's would not be this one."""
        shapes = [self.parts[name] for name in PARTS[part] if name in self.parts]
        is_wanted = len(shapes) == len(PARTS[part]) and not (part == "up_proj" and "gate_proj" in self.parts)
        return (self.num, sum(shape[0] for shape in shapes), shapes[0][1]) if is_wanted else None


class Weights:
    """The published weights of a model, by their names without what differs between classes.

    Args:
        shapes: shapes of the weights, by their published names.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.names = {_inner(name.removesuffix(".weight")): name for name in shapes}
        self._experts = dict[str, ExpertShapes]()
        for name in self.names:
            found = FUSED.fullmatch(name) or ONE_EXPERT.fullmatch(name)
            if found is not None and found["experts"] not in self._experts:
                self._experts[found["experts"]] = self._read_experts(found["experts"])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight."""
        return self.shapes[self.names[name]]

    def experts(self, name: str) -> ExpertShapes | None:
        """Return the shapes of a layer's experts; None: there are none of this name."""
        return self._experts.get(name)

    def _read_experts(self, experts: str) -> ExpertShapes:
        parts, num, are_fused = dict[str, tuple[int, int]](), 0, False
        for fused, names in PARTS.items():
            if f"{experts}.{fused}" in self.names:
                num, rows, columns = self.shape(f"{experts}.{fused}")
                parts |= dict.fromkeys(names, (rows // len(names), columns))
                are_fused = True
        for part in () if are_fused else ("gate_proj", "up_proj", "down_proj"):
            if f"{experts}.0.{part}" in self.names:
                rows, columns = self.shape(f"{experts}.0.{part}")
                parts[part] = rows, columns
                num = sum(1 for name in self.names if (x := ONE_EXPERT.fullmatch(name)) and x["experts"] == experts)
        return ExpertShapes(num if are_fused else num // max(1, len(parts)), parts, are_fused)


def place_adapter(adapter: AdapterFiles, targets: Mapping[str, Target]) -> dict[str, LowRank]:
    """Return the changes that an adapter makes, by the published names of the weights.

    Args:
        targets: targets of the model's weights, by their published names.

    Raises:
        WeightsError: a module is not the model's, has another shape, is changed twice, or is used by several layers.
    """
    shapes = {name: target.shape for name, target in targets.items() if is_matrix(target.shape)}
    changes = _Placement(adapter, Weights(shapes)).changes()
    shared = next((name for name in changes if targets[name].is_shared), None)
    if shared is not None:
        raise WeightsError(f"{adapter.directory} changes {shared} for one of several layers that use it")
    return changes


class _Placement:
    """Finds the weights of an adapter's modules."""

    def __init__(self, adapter: AdapterFiles, weights: Weights) -> None:
        self._adapter, self._weights = adapter, weights
        self._changes = dict[str, LowRank]()
        self._experts = dict[str, dict[str, dict[int, LowRank]]]()
        """By layer and projection, the changes of single experts."""

    def changes(self) -> dict[str, LowRank]:
        unknown = [module.label for module in self._modules() if not self._place(module)]
        if unknown:
            shown = ", ".join(unknown[:MAX_NAMES])
            more = f" and {len(unknown) - MAX_NAMES} more" if len(unknown) > MAX_NAMES else ""
            raise self._error(f"the model has no weights that it could change at {shown}{more}")
        for experts, parts in self._experts.items():
            self._place_experts(experts, parts)
        return self._changes

    def _error(self, message: str) -> WeightsError:
        return WeightsError(f"{self._adapter.directory}: {message}")

    def _modules(self) -> Iterator[Module]:
        """Yield the adapter's modules; those that change a parameter of all experts by the parameter's name."""
        wrapped = dict[str, list[tuple[int, Module]]]()
        for label, factors in self._adapter.modules.items():
            name = _inner(label)
            found = WRAPPED.fullmatch(name)
            if found is None or name in self._weights.names:
                yield Module(label, name, factors)
            else:
                depth = found["inner"].count("base_layer")
                wrapped.setdefault(found["experts"], []).append((depth, Module(label, name, factors)))
        for experts, modules in wrapped.items():
            for _, module in sorted(modules, reverse=True):
                part = self._wrapped_part(experts, module)
                outer = module.label[: module.label.rindex(experts)] + experts
                yield Module(f"{outer}.{part}", f"{experts}.{part}", module.factors)

    def _wrapped_part(self, experts: str, module: Module) -> str:
        """Return which parameter of all experts a module changes, which only its shapes say."""
        shapes = self._weights.experts(experts)
        if shapes is None:
            raise self._error(f"the model has no weights that it could change at {module.label}")
        num_outputs, num_inputs = module.factors.up_OR.shape[0], module.factors.down_RI.shape[1]
        fused = {part: shape[1:] for part in PARTS if (shape := shapes.fused(part)) is not None}
        # PEFT once took a parameter's outputs for its inputs; where both ways fit, today's is meant.
        for sizes in ((num_outputs, num_inputs), (num_inputs, num_outputs)):
            fitting = [part for part, shape in fused.items() if shape == sizes]
            if len(fitting) == 1:
                return fitting[0]
        found = f"{list(module.factors.down_RI.shape)} and {list(module.factors.up_OR.shape)}"
        which = ", ".join(f"{part} {list(shape)}" for part, shape in fused.items())
        raise self._error(f"{module.label} has shapes {found}, which say of no parameter of all experts: {which}")

    def _place(self, module: Module) -> bool:
        """Note what a module changes; return whether there is such a weight."""
        one, fused = ONE_EXPERT.fullmatch(module.name), FUSED.fullmatch(module.name)
        if one is not None and (experts := self._weights.experts(one["experts"])) and one["part"] in experts.parts:
            if int(one["index"]) >= experts.num:
                return False
            change = self._change(module, experts.parts[one["part"]])
            self._add_expert(module, one["experts"], one["part"], int(one["index"]), change)
            return True
        if fused is not None and (experts := self._weights.experts(fused["experts"])):
            shape = experts.fused(fused["part"])
            if shape is None:
                return False
            change, start = self._change(module, shape), 0
            for part in PARTS[fused["part"]]:
                rows = slice(start, start := start + experts.parts[part][0])
                for index in range(experts.num):
                    one_change = LowRank(change.down_RI[index], change.up_OR[index, rows])
                    self._add_expert(module, fused["experts"], part, index, one_change)
            return True
        if module.name not in self._weights.names:
            return False
        name = self._weights.names[module.name]
        if name in self._changes:
            raise self._error(f"{module.label} is changed twice, under two names")
        self._changes[name] = self._change(module, self._weights.shapes[name])
        return True

    def _add_expert(self, module: Module, experts: str, part: str, index: int, change: LowRank) -> None:
        changes = self._experts.setdefault(experts, {}).setdefault(part, {})
        if index in changes:
            raise self._error(f"{module.label} is changed twice, under two names")
        changes[index] = change

    def _place_experts(self, experts: str, changes: Mapping[str, Mapping[int, LowRank]]) -> None:
        """Note the changes of a layer's experts, by the names that their weights are published by."""
        shapes, names = self._weights.experts(experts), self._weights.names
        assert shapes is not None, "their changes have been found by these"
        if not shapes.are_fused:
            for part, by_index in changes.items():
                self._changes |= {names[f"{experts}.{index}.{part}"]: change for index, change in by_index.items()}
            return
        for fused, parts in PARTS.items():
            if (shape := shapes.fused(fused)) is None or not any(part in changes for part in parts):
                continue
            stacked, start = list[LowRank](), 0
            for part in parts:
                by_index = changes.get(part, {})
                if by_index:
                    all_changes = listed([by_index.get(i) for i in range(shapes.num)], shapes.parts[part])
                    stacked.append(all_changes.embedded(start, shape[1]))
                start += shapes.parts[part][0]
            self._changes[names[f"{experts}.{fused}"]] = added(stacked)

    def _change(self, module: Module, shape: Sequence[int]) -> LowRank:
        """Return a module's change of a weight, or of one for each expert."""
        down, up = module.factors.down_RI.float(), module.factors.up_OR.float()
        num = 1 if len(shape) == 2 else shape[0]
        sizes = (up.shape[0], down.shape[1])
        is_turned = len(shape) == 3 and sizes == (shape[2], shape[1]) != (shape[1], shape[2])
        if (sizes != tuple(shape[-2:]) and not is_turned) or len(down) % num or len(shape) not in (2, 3):
            found = f"{list(down.shape)} and {list(up.shape)}"
            raise self._error(f"{module.label} has shapes {found}, which do not fit a weight of {list(shape)}")
        up = up * self._adapter.config.scale(module.label, len(down) // num)
        if not bool(up.isfinite().all()):
            raise self._error(f"{module.label} has numbers that are too large once they are scaled")
        if len(shape) == 2:
            return LowRank(down, up)
        down_XRI = down.unflatten(0, (num, -1))
        up_XOR = up.unflatten(1, (-1, num)).permute(2, 0, 1)
        return LowRank(up_XOR.mT, down_XRI.mT) if is_turned else LowRank(down_XRI, up_XOR)


def _inner(name: str) -> str:
    """Return a module's name without what differs between classes."""
    found = OUTER.match(name)
    inner = name if found is None else name[found.end() :]
    for pattern, synonym in SYNONYMS:
        inner = pattern.sub(synonym, inner)
    return inner
