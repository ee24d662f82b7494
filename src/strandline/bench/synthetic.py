"""Small synthetic workloads by name, each with one pattern of sharing."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from strandline.bench.traces import Call, Lane, random_tokens
from strandline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Conversations:
    """Conversations that share a system prompt; each turn repeats all before it and what was generated."""

    num_conversations: int
    num_turns: int
    system_tokens: int
    user_tokens: int
    output_tokens: int
    think_s: float = 10.0

    def lanes(self) -> Iterator[Lane]:
        """Yield one lane per conversation."""
        for index in range(self.num_conversations):
            yield Lane(index * self.think_s / self.num_conversations, partial(self._calls, index))

    def _calls(self, index: int) -> Iterator[Call]:
        history = random_tokens("system", self.system_tokens)
        for turn in range(self.num_turns):
            history += random_tokens(f"user {index} {turn}", self.user_tokens)
            output = random_tokens(f"output {index} {turn}", self.output_tokens)
            yield Call(0.0, self.think_s, bytearray(history), output)
            history += output


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Requests one after another; those of a group share a prefix, groups take turns."""

    num_requests: int
    prefix_tokens: int
    suffix_tokens: int
    num_prefixes: int = 1
    output_tokens: int = 16

    def lanes(self) -> Iterator[Lane]:
        """Yield a single lane."""
        yield Lane(0.0, self._calls)

    def _calls(self) -> Iterator[Call]:
        for index in range(self.num_requests):
            prefix = random_tokens(f"prefix {index % self.num_prefixes}", self.prefix_tokens)
            suffix = random_tokens(f"suffix {index}", self.suffix_tokens)
            yield Call(0.0, 1.0, bytearray(prefix + suffix), random_tokens(f"output {index}", self.output_tokens))


@dataclass(frozen=True, slots=True)
class Resends:
    """The same prompt again and again."""

    num_requests: int
    prompt_tokens: int

    def lanes(self) -> Iterator[Lane]:
        """Yield a single lane."""
        yield Lane(0.0, self._calls)

    def _calls(self) -> Iterator[Call]:
        prompt = random_tokens("prompt", self.prompt_tokens)
        for index in range(self.num_requests):
            yield Call(0.0, 1.0, bytearray(prompt), random_tokens(f"output {index}", 16))


Workload = Conversations | SharedPrefixes | Resends

SYNTHETIC: Final[Mapping[str, Workload]] = {
    "prefix-4096": SharedPrefixes(32, 4096, 128),
    "prefix-6000": SharedPrefixes(64, 6000, 2000, num_prefixes=8),
    "prefix-256": SharedPrefixes(100, 256, 256, num_prefixes=10),
    "prefix-1500": SharedPrefixes(64, 1500, 700),
    "prefix-240": SharedPrefixes(64, 240, 120),
    "chat": Conversations(8, 8, 600, 150, 400),
    "tool-agent": Conversations(1, 16, 6000, 800, 300),
    "reasoning-agent": Conversations(1, 10, 2000, 300, 3000),
    "forks": SharedPrefixes(8, 12_000, 80),
    "resend": Resends(4, 3000),
    "edit-last": SharedPrefixes(6, 5000, 200),
    "sessions-48": Conversations(48, 8, 600, 150, 400),
}


def synthetic_lanes(name: str) -> list[Lane]:
    """Return the lanes of a named workload.

    Raises:
        ConfigError: no workload is called so.
    """
    workload = SYNTHETIC.get(name)
    if workload is None:
        raise ConfigError(f"no workload or file named {name!r}; workloads are {', '.join(SYNTHETIC)}")
    return list(workload.lanes())
