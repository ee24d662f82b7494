"""Operations of Triton's interpreter that derive types once for operands of some types, and not for each value.

What an operation of the language does depends on the types of its operands, and not on their values: it calls the
interpreter's builder, which computes with NumPy. The first operands of some types have the builder's calls recorded,
and further ones have them repeated: for blocks as small as those of tests, NumPy takes a fraction of the time that the
interpreter takes to derive types.
"""

import inspect
from collections.abc import Callable
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

MAX_RECORDINGS = 20_000
"""Most recordings of an operation, which Python's integers among the operands distinguish; then all are dropped."""

CONSTANTS = (bool, int, float, str, type(None))

ALL = slice(None)

VARYING = ("create_get_program_id", "create_get_num_programs")
"""Calls whose results differ though they take no value."""


class Slot(int):
    """The number of a value: operands are numbered first, then what calls return."""


class Call(NamedTuple):
    """A call of the builder; arguments that are values are their numbers, as are the results."""

    name: str
    arguments: list[Any]
    results: list[Slot]
    returns_tuple: bool


class Tensor(NamedTuple):
    """A tensor that an operation returns: its value, or the value's number, and its other attributes."""

    value: Any
    attributes: dict[str, Any]


class Recording:
    """A builder that records its calls, which the interpreter's executes, except for those without a varying value.

    It ``is_complete`` if all values come from operands and calls.
    """

    def __init__(self, interpreter: Any, values: list[Any]) -> None:
        self._interpreter, self._tensor = interpreter, interpreter.tl.core.tensor
        self._module: str = interpreter.__name__
        self._known = dict[int, Any]()
        self._values = list[Any]()
        self.calls: list[Call] = []
        self.result: Any = None
        self.is_complete = True
        self.num_operands = len(values)
        for value in values:
            self._number(value)

    def _number(self, value: Any) -> Slot:
        slot = self._known[id(value)] = Slot(len(self._values))
        self._values.append(value)
        return slot

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._interpreter.interpreter_builder, name)
        return partial(self._call, name) if callable(member) else member

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        found = getattr(self._interpreter.interpreter_builder, name)(*arguments, **named)
        if isinstance(found, self._interpreter.tl.dtype):
            return found
        known = [self._find(argument) for argument in arguments]
        self.is_complete &= not named
        takes_value = any(type(argument) is Slot for argument in known)
        if not takes_value and name not in VARYING and self._is_value(found):
            self._known[id(found)] = found
            return found
        results = [self._number(value) for value in (found if type(found) is tuple else (found,))]
        self.calls.append(Call(name, known, results, type(found) is tuple))
        return found

    def _is_value(self, found: Any) -> bool:
        return type(found).__module__ == self._module

    def _find(self, argument: Any) -> Any:
        """Return an argument, or the number of a value that is not constant."""
        parts = argument if isinstance(argument, list | tuple) else (argument,)
        if not any(map(self._is_value, parts)):
            return argument
        self.is_complete &= id(argument) in self._known
        return self._known.get(id(argument))

    def finish(self, result: Any) -> None:
        """Record what the operation returns."""
        self.result = self._pattern(result)

    def _pattern(self, result: Any) -> Any:
        if type(result) is self._tensor:
            attributes = {name: value for name, value in vars(result).items() if name != "handle"}
            return Tensor(self._find(result.handle), attributes)
        if type(result) is tuple:
            return tuple(map(self._pattern, result))
        self.is_complete &= isinstance(result, (*CONSTANTS, self._interpreter.tl.constexpr, self._interpreter.tl.dtype))
        return result

    @cached_property
    def replay(self) -> Callable[[list[Any]], Any]:
        """What repeats the calls for other operands."""
        return Replay(self, self._interpreter.interpreter_builder, self._tensor).function()


class Replay:
    """A recording as a function of Python, for which a call of the builder takes no more than that call.

    Recordings that differ in constants alone share its code.
    """

    def __init__(self, recording: Recording, builder: Any, tensor: type) -> None:
        self._recording, self._builder, self._tensor = recording, builder, tensor
        self._constants: list[Any] = []
        self._lines: list[str] = []
        self._num_tensors = 0

    def function(self) -> Callable[[list[Any]], Any]:
        """Compile the function, which takes the operands' values."""
        for name, arguments, results, returns_tuple in self._recording.calls:
            targets = "".join(f"v{slot}, " for slot in results) if returns_tuple else f"v{results[0]}"
            self._lines.append(f"{targets} = builder.{name}({', '.join(map(self._name, arguments))})")
        returned = self._build(self._recording.result)
        taken = "".join(f"v{number}, " for number in range(self._recording.num_operands))
        lines = [f"{taken} = values" if taken else "pass", *self._lines, f"return {returned}"]
        constants = [f"c{number}" for number in range(len(self._constants))]
        source = f"def make({', '.join(('builder', 'tensor', 'new', *constants))}):\n def replay(values):\n  "
        source += "\n  ".join(lines) + "\n return replay"
        make = compile_maker(source)
        function: Callable[[list[Any]], Any] = make(self._builder, self._tensor, self._tensor.__new__, *self._constants)
        return function

    def _name(self, value: Any) -> str:
        """Return the name of a value, or of a constant."""
        if type(value) is Slot:
            return f"v{value}"
        self._constants.append(value)
        return f"c{len(self._constants) - 1}"

    def _build(self, pattern: Any) -> str:
        """Return what stands for a part of the result; append the lines that build its tensors."""
        if type(pattern) is tuple:
            return "(" + "".join(f"{self._build(part)}, " for part in pattern) + ")"
        if type(pattern) is not Tensor:
            return self._name(pattern)
        name = f"t{self._num_tensors}"
        self._num_tensors += 1
        self._lines.append(f"{name} = new(tensor)")
        for attribute, value in {"handle": pattern.value, **pattern.attributes}.items():
            self._lines.append(f"{name}.{attribute} = {self._name(value)}")
        return name


@cache
def compile_maker(source: str) -> Callable[..., Any]:
    """Compile a function ``make``."""
    scope: dict[str, Any] = {}
    exec(source, scope)
    maker: Callable[..., Any] = scope["make"]
    return maker


class Operations:
    """The functions of the language, which record and replay."""

    def __init__(self, interpreter: Any) -> None:
        self._interpreter, self._core = interpreter, interpreter.tl.core
        self._types: dict[Any, int] = {}
        self._operations: dict[Any, list[tuple[str, Callable[..., Any]]]] = {}
        self._recordings: list[Recording] = []

    def patch(self, package: Any, _: Any, scope: Any) -> None:
        """Replace functions of a module or a class, as the interpreter's ``_patch_builtin`` does."""
        if package not in self._operations:
            members = inspect.getmembers(package, self._core.is_builtin)
            self._operations[package] = [(name, self._operation(member)) for name, member in members]
        for name, operation in self._operations[package]:
            scope.set_attr(package, name, operation)

    def _operation(self, member: Callable[..., Any]) -> Callable[..., Any]:
        recorded: dict[Any, Recording] = {}
        semantic = self._interpreter.interpreter_semantic

        def operation(*operands: Any, **options: Any) -> Any:
            asked = options.pop("_semantic", None) if options else None
            if asked is not None:  # an operation that is a part of another
                return member(*operands, **options, _semantic=asked)
            if self._recordings:
                for outer in self._recordings:
                    outer.is_complete = False
            values: list[Any] = []
            try:
                key = self._key(operands, options, values)
            except LookupError:
                return member(*operands, **options, _semantic=semantic)
            recording = recorded.get(key)
            if recording is None:
                if len(recorded) == MAX_RECORDINGS:
                    recorded.clear()
                result, recorded[key] = self._record(member, operands, options, values)
                return result
            if not recording.is_complete:
                return member(*operands, **options, _semantic=semantic)
            return recording.replay(values)

        return operation

    def _record(
        self, member: Callable[..., Any], operands: Any, options: dict[str, Any], values: list[Any]
    ) -> tuple[Any, Recording]:
        recording = Recording(self._interpreter, values)
        self._recordings.append(recording)
        try:
            result = member(*operands, **options, _semantic=type(self._interpreter.interpreter_semantic)(recording))
        finally:
            self._recordings.pop()
        recording.finish(result)
        return result, recording

    def _key(self, operands: tuple[Any, ...], options: dict[str, Any], values: list[Any]) -> Any:
        """Return what the calls depend on; append the operands' values."""
        tensor, parts = self._core.tensor, list[Any]()
        for operand in operands:
            if type(operand) is tensor:  # as in `_part`, for most operands
                values.append(operand.handle)
                try:
                    parts.append(operand.type.number)
                except AttributeError:
                    parts.append(self._number(operand.type))
            else:
                parts.append(self._part(operand, values))
        for name, option in options.items():
            parts += (name, self._part(option, values))
        if len(values) == 2 and values[0] is values[1]:
            parts.append((0, 0))
        elif len(values) > 2 and len(set(map(id, values))) < len(values):
            numbers = list(map(id, values))
            parts.append(tuple(map(numbers.index, numbers)))
        return tuple(parts)

    def _part(self, operand: Any, values: list[Any]) -> Any:
        kind = type(operand)
        if kind is self._core.tensor:
            values.append(operand.handle)
            return self._number(operand.type)
        if kind is int or kind is bool or kind is str or operand is None:
            return kind, operand
        if kind is float:
            return kind, operand.hex()
        if kind is self._core.constexpr:
            return kind, self._part(operand.value, values)
        if kind is tuple or kind is list or kind is self._core.tuple:
            return kind, *[self._part(part, values) for part in operand]
        if kind is slice:
            if operand == ALL:
                return kind
            return kind, *(self._part(part, values) for part in (operand.start, operand.stop, operand.step))
        if isinstance(operand, self._core.dtype):
            return kind, self._number(operand)
        raise LookupError

    def _number(self, kind: Any) -> int:
        """Return a number that equal types share."""
        try:
            number: int = kind.number
        except AttributeError:
            element, space = getattr(kind, "element_ty", None), getattr(kind, "address_space", None)
            key = (type(kind), kind.name, space, None if element is None else self._number(element))
            number = kind.number = self._types.setdefault(key, len(self._types))
        return number
