"""The configuration of speculative decoding: names and meanings are vLLM's where vLLM has the field."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from math import inf
from typing import Any, Final

from strandline.errors import ConfigError
from strandline.json_options import read_json_option

DRAFTERS: Final = ("dflash", "dspark", "eagle3", "mtp")
"""Methods whose drafts are computed by layers."""
LOOKUPS: Final = ("ngram", "suffix")
"""Methods whose drafts are found in earlier text."""
METHODS: Final = (*DRAFTERS, *LOOKUPS)
BLOCK_DRAFTERS: Final = ("dflash", "dspark")
"""Methods whose drafter computes all drafts in one pass."""
WITH_OWN_FILES: Final = (*BLOCK_DRAFTERS, "eagle3")
"""Methods whose drafter has its own directory."""
MAX_DRAFT_TOKENS: Final = 16
DEFAULT_MATCH: Final = 5
MIN_TREE_DEPTH: Final = 4
"""Tokens of the shortest match of ``suffix``, and one draft."""
MAX_TREE_DEPTH: Final = 256

SAMPLE_METHODS: Final = ("standard", "synthetic")

FLAG: Final = "--speculative-config"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are generated.

    Raises:
        ConfigError: a value is out of range.
    """

    method: str | tuple[str, ...]
    """``mtp``: drafts come from the layer for multi-token prediction that is published with the model. ``dflash``,
    ``dspark`` and ``eagle3``: from a drafter that is published separately, of blocks or of one token after the other.
    ``ngram``: drafts repeat the tokens that followed an earlier occurrence of the last tokens, in the prompt or the
    output. ``suffix``: those that followed most often, there or in earlier answers under the request's salt. A drafter
    and one of the last two: whichever is likely to have more drafts accepted, for each request."""
    num_speculative_tokens: int
    """Maximum number of drafts of a request per step."""
    model: str | None = None
    """With ``dflash``, ``dspark`` and ``eagle3``: the drafter, a directory or a name on the hub."""
    prompt_lookup_max: int | None = None
    """The longest run of last tokens that ``ngram`` searches for; None: ``prompt_lookup_min``, or 5."""
    prompt_lookup_min: int | None = None
    """The shortest; None: ``prompt_lookup_max``, or 5."""
    suffix_decoding_max_tree_depth: int = 24
    """With ``suffix``: the most tokens of a match and its drafts together."""
    suffix_decoding_max_cached_requests: int = 10_000
    """With ``suffix``: the most earlier answers of a salt; the oldest are evicted first. 0: only the request itself is
    searched."""
    suffix_decoding_max_spec_factor: float = 1.0
    """With ``suffix``: drafts per token of the match, at most."""
    suffix_decoding_min_token_prob: float = 0.1
    """With ``suffix``: the least probability of a draft and those before it, by how often they followed the match."""
    draft_vocab_size: int | None = None
    """With ``mtp``, ``dflash`` and ``dspark``: draft only tokens whose ids are below this, which takes less time; None,
    or the vocabulary's size and more: any token."""
    rejection_sample_method: str = "standard"
    """``standard``, or for benchmarks ``synthetic``: drafts are accepted by chance, whatever the model samples."""
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    """Share of steps in which a draft is accepted, by position; not increasing. Only with ``synthetic``."""
    adaptive: bool = True
    """Draft fewer tokens, or none, where that gives more tokens per second, by the drafts accepted so far and measured
    step times. False: always ``num_speculative_tokens``."""

    def __post_init__(self) -> None:
        self._check_method()
        _require_count("num_speculative_tokens", self.num_speculative_tokens, MAX_DRAFT_TOKENS)
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            if getattr(self, name) is not None:
                self._require_method(name, "ngram")
                _require_count(name, getattr(self, name), None)
        self._check_suffix_fields()
        if (self.model is None) == (self.drafter_method in WITH_OWN_FILES):
            raise ConfigError(
                f"{FLAG}: methods {', '.join(WITH_OWN_FILES)} and model, the drafter, go together; "
                f"got method {self.method!r}, model {self.model!r}"
            )
        if self.model is not None and not isinstance(self.model, str):
            raise ConfigError(f"{FLAG}: model must be a directory or a name on the hub, got {self.model!r}")
        if self.draft_vocab_size is not None:
            _require_count("draft_vocab_size", self.draft_vocab_size, None)
            if self.drafter_method not in ("mtp", *BLOCK_DRAFTERS):
                names = ", ".join(("mtp", *BLOCK_DRAFTERS))
                raise ConfigError(f"{FLAG}: draft_vocab_size is for methods {names}; got method {self.method!r}")
        if self.rejection_sample_method not in SAMPLE_METHODS:
            names = ", ".join(SAMPLE_METHODS)
            raise ConfigError(
                f"{FLAG}: rejection_sample_method must be one of {names}; got {self.rejection_sample_method!r}"
            )
        self._check_rates()
        if type(self.adaptive) is not bool:
            raise ConfigError(f"{FLAG}: adaptive must be true or false, got {self.adaptive!r}")
        if self.min_match > self.max_match:
            raise ConfigError(f"{FLAG}: prompt_lookup_min {self.min_match} is above prompt_lookup_max {self.max_match}")

    def _check_method(self) -> None:
        methods = self.method if isinstance(self.method, tuple) else (self.method,)
        are_known = all(method in METHODS for method in methods)
        are_alike = (
            sum(method in DRAFTERS for method in methods) > 1 or sum(method in LOOKUPS for method in methods) > 1
        )
        if not methods or not are_known or are_alike:
            raise ConfigError(
                f"{FLAG}: method must be one of {', '.join(METHODS)}, or a list of one of {', '.join(DRAFTERS)} and "
                f"one of {', '.join(LOOKUPS)}; got {self.method!r}"
            )

    def _require_method(self, name: str, method: str) -> None:
        if method not in self.methods:
            both = "" if self.drafter_method is None else f'; for both, "method": ["{self.drafter_method}", "{method}"]'
            raise ConfigError(f"{FLAG}: {name} is for method {method}; got method {self.method!r}{both}")

    def _check_suffix_fields(self) -> None:
        prefix = "suffix_decoding_"
        for field in fields(self):
            if field.name.startswith(prefix) and getattr(self, field.name) != field.default:
                self._require_method(field.name, "suffix")
        depth = self.suffix_decoding_max_tree_depth
        _require_count(f"{prefix}max_tree_depth", depth, MAX_TREE_DEPTH, at_least=MIN_TREE_DEPTH)
        _require_count(f"{prefix}max_cached_requests", self.suffix_decoding_max_cached_requests, None, at_least=0)
        factor, probability = self.suffix_decoding_max_spec_factor, self.suffix_decoding_min_token_prob
        if type(factor) not in (int, float) or not 0 < factor < inf:
            raise ConfigError(f"{FLAG}: {prefix}max_spec_factor must be a number above 0, got {factor!r}")
        if type(probability) not in (int, float) or not 0 <= probability <= 1:
            raise ConfigError(f"{FLAG}: {prefix}min_token_prob must be a number from 0 to 1, got {probability!r}")

    def _check_rates(self) -> None:
        rates = self.synthetic_acceptance_rates
        if (rates is None) == (self.rejection_sample_method == "synthetic"):
            raise ConfigError(f"{FLAG}: rejection_sample_method synthetic and synthetic_acceptance_rates go together")
        if rates is not None and not _are_rates(rates, self.num_speculative_tokens):
            raise ConfigError(
                f"{FLAG}: synthetic_acceptance_rates must be {self.num_speculative_tokens} numbers from 0 to 1, none "
                f"above the one before, as many as num_speculative_tokens; got {rates!r}"
            )

    @property
    def methods(self) -> tuple[str, ...]:
        """Return the drafter's method, if there is one, then that of lookups."""
        given = self.method if isinstance(self.method, tuple) else (self.method,)
        return tuple(method for method in METHODS if method in given)

    @property
    def drafter_method(self) -> str | None:
        """The method whose drafts layers compute, after a step for the next one."""
        return next((method for method in self.methods if method in DRAFTERS), None)

    @property
    def lookup_method(self) -> str | None:
        """The method whose drafts are found in earlier text."""
        return next((method for method in self.methods if method in LOOKUPS), None)

    @property
    def has_draft_layer(self) -> bool:
        """Whether drafts come from a layer of the model."""
        return self.drafter_method == "mtp"

    @property
    def has_drafter(self) -> bool:
        """Whether drafts come from layers, which draft after a step for the next one."""
        return self.drafter_method is not None

    @property
    def tokens_kept_ahead(self) -> int:
        """Positions of a drafter's keys and values after a step's last token, beyond one for each draft.

        A block has the newest token and all drafts; what drafts one token after the other keeps nothing of the last
        two.
        """
        return 1 if self.drafter_method in BLOCK_DRAFTERS else -1

    @property
    def max_match(self) -> int:
        return self.prompt_lookup_max or self.prompt_lookup_min or DEFAULT_MATCH

    @property
    def min_match(self) -> int:
        return self.prompt_lookup_min or self.prompt_lookup_max or DEFAULT_MATCH


def read_speculative_config(value: str | Mapping[str, Any]) -> SpeculativeConfig:
    """Read the configuration from a mapping, or from JSON.

    Raises:
        ConfigError: the value is not a mapping, a field is unknown or missing, or a value is out of range.
    """
    known = (field.name for field in fields(SpeculativeConfig))
    value = read_json_option(FLAG, value, known=known, example=EXAMPLE)
    for name in ("method", "num_speculative_tokens"):
        if name not in value:
            raise ConfigError(f"{FLAG}: {name} is missing, as in {EXAMPLE}")
    given: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in value.items()}
    return SpeculativeConfig(**given)


EXAMPLE: Final = '{"method": "ngram", "num_speculative_tokens": 3}'


def _are_rates(rates: Any, count: int) -> bool:
    if not isinstance(rates, tuple) or len(rates) != count:
        return False
    are_shares = all(type(rate) in (int, float) and 0 <= rate <= 1 for rate in rates)
    return are_shares and all(after <= before for before, after in pairwise(rates))


def _require_count(name: str, value: object, at_most: int | None, *, at_least: int = 1) -> None:
    if type(value) is not int or value < at_least or (at_most is not None and value > at_most):
        limit = "" if at_most is None else f" and at most {at_most}"
        raise ConfigError(f"{FLAG}: {name} must be a whole number of at least {at_least}{limit}, got {value!r}")
