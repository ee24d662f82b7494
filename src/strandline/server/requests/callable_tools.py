"""Schemas of tools without the parts that the grammar compiler refuses, so that one tool never refuses a request.

The compiler itself decides which parts these are, in a search by halves: schemas come from clients, and what it refuses
depends on its release and on combinations of keywords.
"""

import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import blake2s
from typing import Any, Final, TypeVar

from strandline.errors import RequestError
from strandline.text.schema_parts import schema_parts, without_parts

LOGGER: Final = logging.getLogger("strandline.server")
MAX_TRIALS: Final = 64
"""Grammars that are tried in search of what the compiler accepts of a tool, or of a request's tools."""
MAX_SIMPLIFIED: Final = 8
"""Tools of one request whose refused parts are searched for; of further ones, the whole schema is left out."""
MAX_REMEMBERED: Final = 256
MAX_REMEMBERED_CHARACTERS: Final = 64 * 1024
MAX_SHOWN: Final = 10

Item = TypeVar("Item")
Schemas = Mapping[str, Any]
Check = Callable[[Schemas], Awaitable[None]]
"""Compiles a grammar of calls of functions, given their schemas. Raises a RequestError if that is impossible."""


class CallableTools:
    """Finds and remembers what the compiler accepts of tools' schemas."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Any] = OrderedDict()
        """What the compiler accepts of schemas that it refuses."""

    async def accepted(self, schemas: Schemas, check: Check) -> dict[str, Any]:
        """Return the functions that can be called, with schemas that the compiler accepts together.

        Raises:
            RequestError: no function can be called.
        """
        found = {name: self._known.get(_key(name, schema), schema) for name, schema in schemas.items()}
        trials = _Trials(check)
        if await trials.accept(found):
            return found
        whole = await trials.most(list(found), lambda names: {name: found[name] for name in names})
        refused = [name for name in found if name not in whole]
        for name in refused[:MAX_SIMPLIFIED]:
            found[name] = await _simplified(name, schemas[name], _Trials(check))
            self._remember(_key(name, schemas[name]), found[name])
        found.update({name: {} for name in refused[MAX_SIMPLIFIED:]})
        trials = _Trials(check)
        names = await trials.most(list(found), lambda names: {name: found[name] for name in names})
        if not names:
            raise trials.refusal
        for name in found.keys() - set(names):
            LOGGER.warning("the tool %r cannot be called where calls are bound by a grammar", name)
        return {name: found[name] for name in names}

    def _remember(self, key: bytes, simple: Any) -> None:
        if len(json.dumps(simple)) <= MAX_REMEMBERED_CHARACTERS:
            self._known[key] = simple
        if len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)


async def _simplified(name: str, schema: Any, trials: "_Trials") -> Any:
    """Return a tool's schema without what the compiler refuses of it."""
    try:
        parts = schema_parts(schema)
    except RecursionError:
        return {}
    kept = set(await trials.most(parts, lambda some: {name: without_parts(schema, set(parts).difference(some))}))
    left_out = [part for part in parts if part not in kept]
    shown = ["/".join(map(str, part)) for part in left_out if part[:-1] in kept or len(part) == 1]
    text = "the tool %r: left out of its schema, because the grammar compiler refuses it: %s"
    LOGGER.info(text, name, ", ".join(shown[:MAX_SHOWN]) + (", …" if len(shown) > MAX_SHOWN else ""))
    return without_parts(schema, left_out)


class _Trials:
    """A limited number of grammars that are tried."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._num_left = MAX_TRIALS
        self.refusal = RequestError("no tool can be called", param="tools")
        """The last one of a single tool: those of several tools would show the schemas of all."""

    async def accept(self, schemas: Schemas) -> bool:
        """Return whether the compiler accepts schemas together. It is a trial; one must be left."""
        self._num_left -= 1
        try:
            await self._check(schemas)
        except RequestError as error:
            if len(schemas) == 1:
                [name] = schemas
                self.refusal = RequestError(f"the tool {name!r:.100} cannot be called: {error}", param="tools")
            return False
        return True

    async def most(self, items: Sequence[Item], schemas_of: Callable[[Sequence[Item]], Schemas]) -> list[Item]:
        """Return items that are accepted together: each one unless it is refused with those before it.

        Items that no trial is left for are not among them.
        """
        kept: list[Item] = []
        pending = [list(items)] if items else []
        while pending and self._num_left:
            chunk = pending.pop()
            if await self.accept(schemas_of([*kept, *chunk])):
                kept += chunk
            elif len(chunk) > 1:
                half = len(chunk) // 2
                pending += [chunk[half:], chunk[:half]]
        return kept


def _key(name: str, schema: Any) -> bytes:
    return blake2s(json.dumps([name, schema]).encode()).digest()
