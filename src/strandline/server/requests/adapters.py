"""LoRA adapters that a server's requests name as models, and the endpoints that load and unload them.

Names, bodies and answers are vLLM's. Adapters are read from below one directory, because requests name paths.
"""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict

from strandline.errors import RequestError
from strandline.lora_config import NAME
from strandline.records.adapters import LoadedAdapter
from strandline.server.engines.engine_client import EngineClient
from strandline.server.http.error_responses import UnknownAdapterError
from strandline.server.requests.paths import resolved

ADAPTER_PATHS: Final = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""What loads an adapter, and what unloads it."""


class LoadBody(BaseModel):
    """The body of ``/v1/load_lora_adapter``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    lora_name: str
    lora_path: str
    load_inplace: bool = False
    """Replace the adapter of that name; requests that have begun go on with the old one."""
    is_3d_lora_weight: bool = False
    """No effect, for compatibility with vLLM: how experts are stored follows from the tensors."""


class UnloadBody(BaseModel):
    """The body of ``/v1/unload_lora_adapter``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    lora_name: str
    lora_int_id: int | None = None
    """No effect, for compatibility with vLLM."""


class Adapters:
    """The adapters that requests can name.

    Args:
        client: client of the engines; None: there are no adapters.
        model_names: names that are taken.
        directory: what adapters are loaded from at runtime; None: none are.
    """

    def __init__(
        self, client: EngineClient | None = None, model_names: Sequence[str] = (), directory: Path | None = None
    ) -> None:
        self._client, self._model_names = client, model_names
        self.directory = None if directory is None else directory.resolve()
        self._changing = asyncio.Lock()
        self._by_name = {adapter.name: adapter for adapter in (() if client is None else client.first_adapters)}

    def __iter__(self) -> Iterator[LoadedAdapter]:
        """Yield all adapters, in the order in which they were loaded."""
        return iter(self._by_name.values())

    def get(self, name: str | None) -> LoadedAdapter | None:
        """Return the adapter of a name; None: there is no such adapter."""
        return None if name is None else self._by_name.get(name)

    async def load(self, body: LoadBody) -> None:
        """Load an adapter in all engines, once those before have been loaded and unloaded.

        Raises:
            RequestError: the name or the path is not allowed, or the adapter cannot be served.
            UnknownAdapterError: there is no adapter at the path.
        """
        name, path = body.lora_name, resolved(body.lora_path)
        if not NAME.fullmatch(name):
            raise RequestError("lora_name must be of 1 to 200 characters, without =", param="lora_name")
        if name in self._model_names:
            raise RequestError(f"{name!r} is the model's own name", param="lora_name")
        is_allowed = path is not None and self.directory is not None and path.is_relative_to(self.directory)
        if self._client is None or path is None or not is_allowed:
            given = repr(body.lora_path[:200])
            raise RequestError(f"adapters are loaded from {self.directory}: not from {given}", param="lora_path")
        if not path.is_dir():
            raise UnknownAdapterError(f"there is no directory {body.lora_path[:200]}", param="lora_path")
        async with self._changing:
            if name in self._by_name and not body.load_inplace:
                raise RequestError(
                    f"the LoRA adapter {name!r} is loaded already; unload it, or set load_inplace", param="lora_name"
                )
            adapter = await self._client.load_adapter(name, str(path))
            replaced = self._by_name.get(name)
            self._by_name[name] = adapter
            self._forget(replaced)

    async def unload(self, name: str) -> None:
        """Let no further request use an adapter; those that have begun go on.

        Raises:
            UnknownAdapterError: no adapter has that name.
        """
        async with self._changing:
            if name not in self._by_name:
                raise UnknownAdapterError(f"the LoRA adapter {name[:200]!r} is not loaded", param="lora_name")
            self._forget(self._by_name.pop(name))

    def _forget(self, adapter: LoadedAdapter | None) -> None:
        """Unload an adapter in all engines, unless another name has the same tensors."""
        if adapter is not None and self._client is not None and all(each.digest != adapter.digest for each in self):
            self._client.unload_adapter(adapter)


def add_adapters(app: FastAPI, adapters: Adapters) -> None:
    """Add the endpoints that load and unload adapters, if they are allowed."""
    if adapters.directory is None:
        return

    load_path, unload_path = ADAPTER_PATHS

    @app.post(load_path, response_class=PlainTextResponse)
    async def load_lora_adapter(body: LoadBody) -> Response:
        await adapters.load(body)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post(unload_path, response_class=PlainTextResponse)
    async def unload_lora_adapter(body: UnloadBody) -> Response:
        await adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
