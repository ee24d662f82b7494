"""Operations of Triton's interpreter that derive types once for operands of some types, and not for each value.

What an operation of the language does depends on the types of its operands, and not on their values: it calls the
interpreter's builder, which computes with NumPy. The first operands of some types have the builder's calls recorded,
and further ones have them repeated: for blocks as small as those of tests, NumPy takes a fraction of the time that the
interpreter takes to derive types.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

MAX_RECORDINGS = 20_000
"""Most recordings of an operation, which Python's integers among the operands distinguish; then all are dropped."""

CONSTANTS = (bool, int, float, str, type(None))

VARYING = ("create_get_program_id", "create_get_num_programs")
"""Calls whose results differ though they take no value."""


class Slot(int):
    """The number of a value: operands are numbered first, then what calls return."""


class Call(NamedTuple):
    """A call of the builder; ``slots`` has the position of each argument that is a value, and the value's number."""

    name: str
    arguments: list[Any]
    slots: list[tuple[int, Slot]]


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
        self._known = dict[int, Any]()
        self._values = list[Any]()
        self.calls: list[Call] = []
        self.result: Any = None
        self.is_complete = True
        for value in values:
            self._number(value)

    def _number(self, value: Any) -> None:
        self._known[id(value)] = Slot(len(self._values))
        self._values.append(value)

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._interpreter.interpreter_builder, name)
        return partial(self._call, name) if callable(member) else member

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        found = getattr(self._interpreter.interpreter_builder, name)(*arguments, **named)
        if isinstance(found, self._interpreter.tl.dtype):
            return found
        known = [self._find(argument) for argument in arguments]
        slots = [(position, argument) for position, argument in enumerate(known) if type(argument) is Slot]
        self.is_complete &= not named
        if not slots and name not in VARYING and self._is_value(found):
            self._known[id(found)] = found
            return found
        self.calls.append(Call(name, known, slots))
        for value in found if type(found) is tuple else (found,):
            self._number(value)
        return found

    def _is_value(self, found: Any) -> bool:
        return type(found).__module__ == self._interpreter.__name__

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

    def replay(self, values: list[Any]) -> Any:
        """Repeat the calls for other operands; append their results to the operands."""
        builder = self._interpreter.interpreter_builder
        for name, arguments, slots in self.calls:
            filled = arguments.copy()
            for position, slot in slots:
                filled[position] = values[slot]
            found = getattr(builder, name)(*filled)
            if type(found) is tuple:
                values.extend(found)
            else:
                values.append(found)
        return self._fill(self.result, values)

    def _fill(self, pattern: Any, values: list[Any]) -> Any:
        if type(pattern) is Tensor:
            value, attributes = pattern
            result = self._tensor.__new__(self._tensor)
            result.__dict__ = {**attributes, "handle": values[value] if type(value) is Slot else value}
            return result
        return tuple(self._fill(part, values) for part in pattern) if type(pattern) is tuple else pattern


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
            asked = options.pop("_semantic", None)
            if asked is not None:  # an operation that is a part of another
                return member(*operands, **options, _semantic=asked)
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
        parts = [self._part(operand, values) for operand in operands]
        for name, option in options.items():
            parts += (name, self._part(option, values))
        if len(values) > 1 and len(set(map(id, values))) < len(values):
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
            return kind, *(self._part(part, values) for part in operand)
        if kind is slice:
            return kind, *(self._part(part, values) for part in (operand.start, operand.stop, operand.step))
        if isinstance(operand, self._core.dtype):
            return kind, self._number(operand)
        raise LookupError

    def _number(self, kind: Any) -> int:
        """Return a number that equal types share."""
        try:
            return kind.number
        except AttributeError:
            element, space = getattr(kind, "element_ty", None), getattr(kind, "address_space", None)
            key = (type(kind), kind.name, space, None if element is None else self._number(element))
            kind.number = self._types.setdefault(key, len(self._types))
            return kind.number
