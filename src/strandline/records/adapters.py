"""Adapters by the digests of their tensors, and how the salt of a request names the one that computes it.

What the cache holds for a salt has therefore been computed with the same adapter: in every tier, and in every engine
that it is sent to. Salts that requests bring cannot name an adapter.
"""

from typing import Final

import msgspec

MARK: Final = "\0"
"""Begins salts that name an adapter, and salts of requests that begin with it themselves."""
NAMES_ADAPTER: Final = "\0lora "
END: Final = "/"


class LoRARequest(msgspec.Struct, frozen=True):
    """The LoRA adapter of a prompt, as in vLLM."""

    lora_name: str
    lora_int_id: int
    """Another number for the same name and path reads the files again."""
    lora_path: str


class LoadedAdapter(msgspec.Struct, frozen=True):
    """An adapter that requests can name."""

    name: str
    path: str
    digest: str
    rank: int


def salt_with(adapter: LoadedAdapter | None, salt: str) -> str:
    """Return the salt of a request that brings ``salt`` and is computed with an adapter, or without."""
    own = MARK + salt if salt.startswith(MARK) else salt
    return own if adapter is None else f"{NAMES_ADAPTER}{adapter.digest}{END}{own}"


def adapter_of(salt: str) -> str:
    """Return the digest of the adapter that a salt names; "": none."""
    return salt.removeprefix(NAMES_ADAPTER).partition(END)[0] if salt.startswith(NAMES_ADAPTER) else ""
