"""The errors that Strandline raises on purpose.

A message says what was asked, what was found, the limit, and the knob that moves it.
"""


def cause_of(error: Exception) -> str:
    """Return what an error of a library says, in one line."""
    return " ".join(str(error).split()) or repr(error)


class StrandlineError(Exception):
    """Root of every error raised on purpose."""


class ConfigError(StrandlineError):
    """The engine cannot start like this: a flag, a model configuration or a weights file is wrong."""


class WeightsError(ConfigError):
    """A weights file is missing, unreadable, or does not match the model's configuration."""


class RequestError(StrandlineError, ValueError):
    """The caller's fault (HTTP 4xx). No other request is affected."""


class EngineError(StrandlineError, RuntimeError):
    """Our fault (HTTP 5xx)."""


class CacheInvariantError(EngineError):
    """The cache contradicts itself. The process must end: a doubtful state is never served."""
