"""The errors that Strandline raises on purpose.

A message states what was requested, what was found, the limit, and the setting that changes it.
"""


def cause_of(error: Exception) -> str:
    """Return a library error's message in one line."""
    return " ".join(str(error).split()) or repr(error)


class StrandlineError(Exception):
    """Root of every error raised on purpose."""


class ConfigError(StrandlineError):
    """The engine cannot start like this: a flag, a model configuration or a weights file is wrong."""


class WeightsError(ConfigError):
    """A weights file is missing, unreadable, or does not match the model's configuration."""


class RequestError(StrandlineError, ValueError):
    """A fault of the caller (HTTP 4xx). No other request is affected.

    Args:
        param: the field at fault, if it is a single one.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(RequestError):
    """The prompt and one token of output do not fit into ``max_model_len`` tokens.

    Args:
        num_tokens: number of tokens of the prompt; None: they were not counted.
        max_tokens: maximum number of tokens of a prompt.
    """

    def __init__(self, message: str, *, num_tokens: int | None = None, max_tokens: int | None = None) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class EngineError(StrandlineError, RuntimeError):
    """A fault of the engine (HTTP 5xx)."""


class OutOfMemoryError(EngineError):
    """Memory that was given back cannot be taken again now. Nothing of it is held, and what was before is as before."""


class CacheInvariantError(EngineError):
    """The cache contradicts itself. The process must end: a state that may be wrong is never used."""
