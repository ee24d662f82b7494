"""The options of a run, checked: the flags as typed records."""

import math
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from strandline.bench.serving.flags import SAMPLING_FLAGS
from strandline.errors import ConfigError

METRICS: Final[Mapping[str, tuple[str, str]]] = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
"""Short and long names, in the order of the table."""

GOODPUT_METRICS: Final = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Target:
    """Target of the requests, and their fields in addition to the prompt."""

    base_url: str
    endpoint: str
    is_chat: bool
    headers: Mapping[str, str]
    body: Mapping[str, Any]

    @property
    def url(self) -> str:
        return self.base_url + self.endpoint


@dataclass(frozen=True, slots=True)
class Pace:
    """Arrival process of the requests."""

    request_rate: float = math.inf
    """Per second; infinite: all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution that the gaps follow."""
    ramp: str | None = None
    """``linear`` or ``exponential``: the rate goes from the first to the second of ``ramp_rates``."""
    ramp_rates: tuple[float, float] = (0.0, 0.0)
    max_concurrency: int | None = None
    num_requests: int = 1000
    """Maximum number of requests."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """Metrics to show."""

    metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    percentiles: tuple[float, ...] = (99.0,)
    goodput_ms: Mapping[str, float] | None = None
    """Limits by metric."""


def pace_of(options: Namespace) -> Pace:
    """Return the arrival process.

    Raises:
        ConfigError: a value is out of range, or values contradict each other.
    """
    if options.num_prompts < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {options.num_prompts}")
    for name in ("request_rate", "burstiness", "trace_speed", "max_concurrency"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
    rates = (options.ramp_up_start_rps, options.ramp_up_end_rps)
    if options.ramp_up_strategy is not None:
        if None in rates or not 0 < rates[0] <= rates[1]:
            raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps above 0 and no more than --ramp-up-end-rps")
        if options.request_rate != math.inf:
            raise ConfigError("give either --request-rate or --ramp-up-strategy")
    elif rates != (None, None):
        raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
    return Pace(
        request_rate=options.request_rate,
        burstiness=options.burstiness,
        ramp=options.ramp_up_strategy,
        ramp_rates=(rates[0] or 0.0, rates[1] or 0.0),
        max_concurrency=options.max_concurrency,
        num_requests=options.num_prompts,
        seed=options.seed,
    )


def wanted_of(options: Namespace) -> Wanted:
    """Return which figures to show.

    Raises:
        ConfigError: a metric is unknown, or a number is none.
    """
    metrics = tuple(name.strip() for name in options.percentile_metrics.split(",") if name.strip())
    unknown = [name for name in metrics if name not in METRICS]
    if unknown:
        raise ConfigError(f"--percentile-metrics knows {', '.join(METRICS)}; got {unknown[0]!r}")
    try:
        percentiles = tuple(float(text) for text in options.metric_percentiles.split(","))
    except ValueError:
        percentiles = (-1.0,)
    if not all(0 <= value <= 100 for value in percentiles):
        raise ConfigError(f"--metric-percentiles must be numbers from 0 to 100, got {options.metric_percentiles!r}")
    return Wanted(metrics, percentiles, _goodput(options.goodput))


def _goodput(pairs: Iterable[str]) -> dict[str, float] | None:
    limits = {}
    for name, text in (pair.partition(":")[::2] for pair in pairs):
        try:
            limits[name] = float(text)
        except ValueError:
            limits[name] = -1.0
        if name not in GOODPUT_METRICS or not limits[name] >= 0:
            raise ConfigError(f"--goodput takes {', '.join(GOODPUT_METRICS)} with milliseconds, such as ttft:200; got "
                              f"{name}:{text}")  # fmt: skip
    return limits or None


def key_values(name: str, pairs: Iterable[str]) -> dict[str, str]:
    """Read ``KEY=VALUE`` pairs.

    Raises:
        ConfigError: one has no ``=``.
    """
    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        raise ConfigError(f"--{name} takes KEY=VALUE, got {wrong[0]!r}")
    return {key: value for key, _, value in (pair.partition("=") for pair in pairs)}


def target_of(options: Namespace, key: str | None, salt: str | None) -> Target:
    """Return the target of requests; the caller adds the model's name to the body.

    Args:
        key: key for servers that require one.
        salt: ``cache_salt`` of all requests; None sends none.

    Raises:
        ConfigError: a header is malformed.
    """
    is_chat = options.backend == "openai-chat"
    body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    names = [name.replace("-", "_") for name, _ in SAMPLING_FLAGS]
    body |= {"temperature": 0.0} | {
        name: getattr(options, name) for name in names if getattr(options, name) is not None
    }
    if options.ignore_eos:
        body["ignore_eos"] = True
    if options.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": options.logprobs} if is_chat else {"logprobs": options.logprobs}
    if salt is not None:
        body["cache_salt"] = salt
    if not isinstance(options.extra_body or {}, dict):
        raise ConfigError(f"--extra-body must be a JSON object, got {options.extra_body!r}")
    return Target(
        base_url=base_url(options),
        endpoint=options.endpoint or ("/v1/chat/completions" if is_chat else "/v1/completions"),
        is_chat=is_chat,
        headers=({"Authorization": f"Bearer {key}"} if key else {}) | key_values("header", options.header),
        body=body | (options.extra_body or {}),
    )


def base_url(options: Namespace) -> str:
    """Return the server's address, without the ``/v1`` that endpoints begin with."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    url: str = options.base_url or f"http://{host}:{options.port}"
    return url.rstrip("/").removesuffix("/v1")
