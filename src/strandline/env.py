"""All environment variables that Strandline reads."""

import os
from typing import Final

DEBUG_CACHE: Final = "STRANDLINE_DEBUG_CACHE"
API_KEY: Final = "STRANDLINE_API_KEY"
CLIENT_KEY: Final = "OPENAI_API_KEY"
TRITON: Final = "STRANDLINE_TRITON"
NUMBA: Final = "STRANDLINE_NUMBA"
COMPILE_AHEAD: Final = "STRANDLINE_COMPILE_AHEAD"
LOG_FORMAT: Final = "STRANDLINE_LOG_FORMAT"
LOG_LEVEL: Final = "STRANDLINE_LOG_LEVEL"
FUSION: Final = "TRITON_DEFAULT_FP_FUSION"
OTLP_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def is_cache_debugged() -> bool:
    """Whether to check the cache's invariants and poison freed memory with NaN at every step (slow)."""
    return os.environ.get(DEBUG_CACHE, "0") not in ("", "0")


def is_triton_off() -> bool:
    """Whether to run reference implementations on GPUs (slow), to isolate faults of kernels."""
    return os.environ.get(TRITON, "1") == "0"


def fuse_multiply_add() -> None:
    """Let Triton fuse multiplications and additions into one instruction, unless the environment says otherwise.

    Kernels are measured so. It is the default of Triton 3.6 to 3.9; the last of these warns that it will change.
    """
    os.environ.setdefault(FUSION, "1")


def is_numba_off() -> bool:
    """Whether to run reference implementations on CPUs (slower), to isolate faults of kernels."""
    return os.environ.get(NUMBA, "1") == "0"


def is_compiling_late() -> bool:
    """Whether kernels are compiled at their first launch (slow), not by processes while weights load."""
    return os.environ.get(COMPILE_AHEAD, "1") == "0"


def read_api_key() -> str | None:
    """Return the API key that the server accepts in addition to those given by flags."""
    return os.environ.get(API_KEY) or None


def read_client_key() -> str | None:
    """Return the API key that Strandline's clients send: the variable of OpenAI's clients, or the server's."""
    return os.environ.get(CLIENT_KEY) or read_api_key()


def read_log_format() -> str:
    """Return the format of this process's log: ``text`` or ``json``."""
    return os.environ.get(LOG_FORMAT) or "text"


def read_log_level() -> str:
    """Return the least level of messages in this process's log: ``info``, ``warning`` or ``error``."""
    return os.environ.get(LOG_LEVEL) or "info"


def set_log(log_format: str, log_level: str) -> None:
    """Set format and level of the logs of this process and those that it starts."""
    os.environ |= {LOG_FORMAT: log_format, LOG_LEVEL: log_level}


def read_otlp_protocol() -> str | None:
    """Return the protocol of exported traces, by OpenTelemetry's variables; None: not set."""
    return next((value for name in OTLP_PROTOCOLS if (value := os.environ.get(name))), None)
