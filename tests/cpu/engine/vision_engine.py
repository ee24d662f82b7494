"""Engines that answer prompts with pictures, and what transformers would answer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strandline import LLM, SamplingParams
from strandline.ids import RequestId
from strandline.records.account import Account
from strandline.records.events import Submission
from strandline.records.plan import NewRequest
from tests.cpu.device.picture_driver import PICTURES, Prompt, oracle_logits
from tests.cpu.models.families import oracle, save

PREPROCESSOR: dict[str, Any] = {
    "patch_size": PICTURES.patch_size,
    "merge_size": PICTURES.merge_size,
    "size": {"shortest_edge": PICTURES.min_pixels, "longest_edge": PICTURES.max_pixels},
    "image_mean": list(PICTURES.mean),
    "image_std": list(PICTURES.std),
}


def save_vision_model(name: str, directory: Path) -> Path:
    """Write a tiny random model of one of the families with a vision tower."""
    path = save(name, directory)
    (path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return path


class Asked:
    """Prompts that an engine answers greedily, together."""

    def __init__(self, llm: LLM) -> None:
        self.core = llm.engine.core
        self.accounts = dict[str, Account]()
        self.answers = dict[str, list[int]]()

    def add(self, name: str, prompt: Prompt, num_tokens: int = 6, salt: str = "") -> None:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        new = NewRequest(RequestId(name), prompt.token_ids, params, 0, frozenset(), ())
        pixels = {picture.digest: picture for _, picture in prompt.pictures}
        total = len(prompt.token_ids) + num_tokens
        self.core.add(Submission(new, total, salt, pictures=prompt.spans, pixels=pixels))
        self.answers[name] = []

    def step(self) -> None:
        for event in self.core.step().tokens:
            self.answers[event.request_id].append(event.token_id)
            if event.account is not None:
                self.accounts[event.request_id] = event.account

    def run(self) -> None:
        while self.core.has_unfinished:
            self.step()

    def hit_tokens(self, name: str) -> int:
        return self.accounts[name].hit


def ask(llm: LLM, *prompts: Prompt, num_tokens: int = 6) -> list[list[int]]:
    """Return the answers to prompts that come together."""
    asked = Asked(llm)
    for index, prompt in enumerate(prompts):
        asked.add(str(index), prompt, num_tokens)
    asked.run()
    return [asked.answers[str(index)] for index in range(len(prompts))]


def preferred(name: str, prompt: Prompt, answer: Sequence[int]) -> list[int]:
    """Return what transformers prefers in each place of an answer: the answer itself, if it is right."""
    logits = oracle_logits(oracle(name), prompt.followed_by(answer[:-1]))
    return logits[len(prompt.token_ids) - 1 :].argmax(-1).tolist()
