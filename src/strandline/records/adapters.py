"""Adapters by the digests of their tensors, and how the salt of a request names the one that computes it.

What the cache holds for a salt has therefore been computed with the same adapter: in every tier, and in every engine
that it is sent to. Salts that requests bring cannot name an adapter.
"""

from typing import Final

import msgspec

MARK: Final = "\0"
"""Begins salts that name an adapter or an epoch, and salts of requests that begin with it themselves."""
NAMES_ADAPTER: Final = "\0lora "
NAMES_EPOCH: Final = "\0epoch "
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


def with_epoch(salt: str, epoch: str) -> str:
    """Return the salt of another epoch, with the same adapter: nothing is cached under it yet.

    Args:
        epoch: a name that was never used before; "": salts are as requests bring them.
    """
    head, end, own = salt.partition(END) if salt.startswith(NAMES_ADAPTER) else ("", "", salt)
    if own.startswith(NAMES_EPOCH):
        own = own.partition(END)[2]
    return f"{head}{end}{NAMES_EPOCH}{epoch}{END}{own}" if epoch else f"{head}{end}{own}"


def adapter_of(salt: str) -> str:
    """Return the digest of the adapter that a salt names; "": none."""
    return salt.removeprefix(NAMES_ADAPTER).partition(END)[0] if salt.startswith(NAMES_ADAPTER) else ""
