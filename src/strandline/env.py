"""The environment variables that Strandline reads, all of them."""

import os
from typing import Final

DEBUG_CACHE: Final = "STRANDLINE_DEBUG_CACHE"
API_KEY: Final = "STRANDLINE_API_KEY"
CLIENT_KEY: Final = "OPENAI_API_KEY"
TRITON: Final = "STRANDLINE_TRITON"
NUMBA: Final = "STRANDLINE_NUMBA"


def is_cache_debugged() -> bool:
    """Whether to check the cache's invariants and poison freed memory with NaN at every step (slow)."""
    return os.environ.get(DEBUG_CACHE, "0") not in ("", "0")


def is_triton_off() -> bool:
    """Whether to run the torch versions of all operations on GPUs too (slow): to tell a kernel's fault from others."""
    return os.environ.get(TRITON, "1") == "0"


def is_numba_off() -> bool:
    """Whether to run the torch versions of all operations on CPUs (slower): to tell a kernel's fault from others."""
    return os.environ.get(NUMBA, "1") == "0"


def read_api_key() -> str | None:
    """Return the key that clients of the server must bring, besides those that its flags name."""
    return os.environ.get(API_KEY) or None


def read_client_key() -> str | None:
    """Return the key that our own clients bring to a server: the one that OpenAI's clients take, or the server's."""
    return os.environ.get(CLIENT_KEY) or read_api_key()
