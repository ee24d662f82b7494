"""Prompts with pictures for a runner, step by step, without a scheduler; and transformers' answer to them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strandline import SamplingParams
from strandline.device.runner import Capacity, Runner
from strandline.device.uni_executor import choose_kernels
from strandline.ids import (
    BLOCK_TOKENS,
    FIRST_VIRTUAL_ID,
    NO_TOKEN,
    NULL_LOG,
    NULL_SLOT,
    BlockId,
    PendingToken,
    RequestId,
    SlotId,
)
from strandline.models.model_options import ModelOptions
from strandline.models.weights import load_model
from strandline.picture_config import PictureConfig
from strandline.records.pictures import Picture, PictureSpan, picture_digest, rotary_delta
from strandline.records.plan import NewRequest, PictureToEncode, SequencePlan, StepPlan, StepResult
from tests.cpu.models.families import PICTURE_TOKENS, VISION, VOCAB_SIZE

PATCH: int = VISION["patch_size"]
SIDE = 2 * PATCH
PICTURES = PictureConfig(
    patch_size=PATCH,
    merge_size=2,
    min_pixels=SIDE**2,
    max_pixels=100 * SIDE**2,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    image_token_id=PICTURE_TOKENS["image_token_id"],
    start_token_id=PICTURE_TOKENS["vision_start_token_id"],
    end_token_id=PICTURE_TOKENS["vision_end_token_id"],
)
PAD = PICTURES.image_token_id
NUM_SLABS = 60
ENCODED_ROWS = 400


def random_picture(rows: int, columns: int, seed: int = 0) -> Picture:
    height, width = rows * SIDE, columns * SIDE
    rng = np.random.default_rng((rows, columns, seed))
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8).tobytes()
    return Picture(picture_digest(pixels, height, width), pixels, height, width, (width, height))


@dataclass(frozen=True)
class Prompt:
    """Tokens with pads for pictures, and these."""

    token_ids: tuple[int, ...]
    pictures: tuple[tuple[PictureSpan, Picture], ...]

    @classmethod
    def of(cls, *parts: Sequence[int] | Picture) -> "Prompt":
        token_ids, pictures = list[int](), list[tuple[PictureSpan, Picture]]()
        for part in parts:
            if isinstance(part, Picture):
                rows, columns = part.height // SIDE, part.width // SIDE
                pictures.append((PictureSpan(len(token_ids), rows, columns, part.digest), part))
                token_ids += [PAD] * (rows * columns)
            else:
                token_ids += part
        return cls(tuple(token_ids), tuple(pictures))

    @property
    def spans(self) -> tuple[PictureSpan, ...]:
        return tuple(span for span, _ in self.pictures)

    def and_then(self, *parts: Sequence[int] | Picture) -> "Prompt":
        more, length = Prompt.of(*parts), len(self.token_ids)
        moved = [(span._replace(start=span.start + length), picture) for span, picture in more.pictures]
        return Prompt((*self.token_ids, *more.token_ids), (*self.pictures, *moved))

    def followed_by(self, token_ids: Sequence[int]) -> "Prompt":
        return Prompt((*self.token_ids, *token_ids), self.pictures)


def patches_of(picture: Picture) -> Tensor:
    pixels = torch.from_numpy(np.frombuffer(picture.pixels, np.uint8).reshape(picture.height, picture.width, 3).copy())
    normed = (pixels.float() / 255 - 0.5) / 0.5
    sides = (picture.height // SIDE, 2, PATCH, picture.width // SIDE, 2, PATCH, 3)
    values = normed.reshape(sides).permute(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, 1, PATCH * PATCH)
    return values.expand(-1, -1, 2, -1).flatten(1)


def oracle_logits(oracle: Any, prompt: Prompt) -> Tensor:
    """Return transformers' logits of every token."""
    token_ids = torch.tensor([prompt.token_ids])
    is_picture = torch.zeros_like(token_ids)
    for span in prompt.spans:
        is_picture[0, span.start : span.end] = 1
    inputs: dict[str, Any] = {}
    if prompt.pictures:
        grids = [[1, picture.height // PATCH, picture.width // PATCH] for _, picture in prompt.pictures]
        inputs["pixel_values"] = torch.cat([patches_of(picture) for _, picture in prompt.pictures])
        inputs["image_grid_thw"] = torch.tensor(grids)
    oracle.model.rope_deltas = None
    logits: Tensor = oracle(token_ids, mm_token_type_ids=is_picture, use_cache=False, **inputs).logits[0]
    return logits


@dataclass
class Running:
    """A sequence that is being computed."""

    prompt: Prompt
    request_id: RequestId
    blocks: list[int] = field(default_factory=list)
    slot: int = NULL_SLOT
    num_tokens: int = 0
    is_resumed: bool = False
    """Whether ``slot`` is a snapshot, which stays as it is."""
    rows: dict[int, int] = field(default_factory=dict)
    """Row of the encoded pictures for every token of a picture."""


class PictureDriver:
    """A runner, and what a scheduler would remember of its sequences."""

    def __init__(self, directory: Path, *, draft_tokens: int = 0, deterministic: bool = False) -> None:
        model = load_model(
            directory, ModelOptions(dtype=torch.float32, pictures=PICTURES, with_draft_layer=draft_tokens > 0)
        )
        kernels = choose_kernels(model, "cpu", is_deterministic=deterministic)
        model.use_kernels(kernels)
        capacity = Capacity(NUM_SLABS, 8, False, draft_tokens, ENCODED_ROWS)
        self.runner = Runner(model, kernels, torch.device("cpu"), capacity, poison=True)
        half = NUM_SLABS // 2
        self._blocks = list(range(half * model.spec.blocks_per_slab - 1, 0, -1))
        self._slots = list(range(half, NUM_SLABS))
        self._has_draft_layer = draft_tokens > 0
        self._num_requests = self._num_rows = 0
        self._new = list[NewRequest]()
        self.num_encoded = 0

    def start(self, prompt: Prompt, params: SamplingParams | None = None) -> Running:
        self._num_requests += 1
        request_id = RequestId(str(self._num_requests))
        params = params or SamplingParams(temperature=0, prompt_logprobs=0, logprobs=0)
        self._new.append(NewRequest(request_id, prompt.token_ids, params, 0, frozenset(), ()))
        return Running(prompt, request_id)

    def fork(self, parent: Running, prompt: Prompt, position: int, slot: int) -> Running:
        """Return a sequence that resumes at ``position`` from a snapshot, with its own copy of the last block."""
        running = self.start(prompt)
        full, rest = divmod(position, BLOCK_TOKENS)
        running.blocks, running.num_tokens, running.slot = parent.blocks[:full], position, slot
        running.is_resumed = True
        if rest:
            running.blocks.append(self._blocks.pop())
            self.runner.arena.copy_block(BlockId(parent.blocks[full]), BlockId(running.blocks[-1]), rest)
        return running

    def step(
        self, *parts: tuple[Running, int], cuts: Sequence[int] = (), next_drafts: int = 0
    ) -> tuple[StepResult, list[int]]:
        """Compute sequences up to positions; also return the slots of snapshots of the first."""
        slots = [self._slots.pop() for _ in cuts]
        to_encode = [each for running, end in parts for each in self._new_pictures(running, end + 1)]
        self.num_encoded += len(to_encode)
        plans = [
            self._plan(running, end, tuple(zip(cuts, map(SlotId, slots), strict=True)) if index == 0 else ())
            for index, (running, end) in enumerate(parts)
        ]
        plans = [plan._replace(next_drafts=next_drafts if plan.is_sampled else 0) for plan in plans]
        new, self._new = tuple(self._new), []
        return self.runner.run(StepPlan(tuple(plans), (), new, (), tuple(to_encode))), slots

    def _new_pictures(self, running: Running, end: int) -> list[PictureToEncode]:
        found = []
        for span, picture in running.prompt.pictures:
            if span.start < end and span.end > running.num_tokens and span.start not in running.rows:
                found.append(PictureToEncode(picture, self._num_rows))
                for index in range(span.num_tokens):
                    running.rows[span.start + index] = self._num_rows + index
                self._num_rows += span.num_tokens
        return found

    def _plan(self, running: Running, end: int, cuts: tuple[tuple[int, SlotId], ...]) -> SequencePlan:
        start, prompt = running.num_tokens, running.prompt
        while len(running.blocks) * BLOCK_TOKENS < end + 8:
            running.blocks.append(self._blocks.pop())
        source, kv_start = running.slot, 0
        if running.slot == NULL_SLOT or running.is_resumed:
            running.slot = self._slots.pop()
            kv_start = start
        running.is_resumed = False
        token_ids = [
            FIRST_VIRTUAL_ID + running.rows[position] if position in running.rows else token
            for position, token in enumerate(prompt.token_ids[: end + 1])
        ]
        is_sampled = end == len(prompt.token_ids)
        near = tuple(span for span in prompt.spans if span.end >= start and span.start <= end)
        running.num_tokens = end
        return SequencePlan(
            running.request_id,
            start,
            end,
            tuple(token_ids[start:end]),
            np.array(running.blocks, np.int32).tobytes(),
            kv_start,
            SlotId(source),
            SlotId(running.slot),
            cuts,
            is_sampled,
            PendingToken.NONE,
            False,
            NULL_LOG,
            0,
            end - start,
            0,
            next_id=NO_TOKEN if is_sampled or not self._has_draft_layer else token_ids[end],
            rotary_delta=rotary_delta([span for span in prompt.spans if span.end < start]),
            pictures=near,
        )


def logprobs_of(driver: PictureDriver, running: Running, ends: Sequence[int]) -> list[float]:
    """Return the log-probabilities of a prompt's tokens from the second on, and of the sampled one."""
    found = list[float]()
    for end in ends:
        result, _ = driver.step((running, end))
        found += [each.logprob for each in result.prompt_logprobs.get(0, ())]
        found += [each.logprob for each in result.logprobs.get(0, ())]
    return found


def generate(driver: PictureDriver, running: Running, num_tokens: int) -> list[int]:
    """Compute the rest of a prompt, and generate greedily."""
    found = list[int]()
    for _ in range(num_tokens):
        result, _ = driver.step((running, len(running.prompt.token_ids)))
        found += result.token_ids[0]
        running.prompt = running.prompt.followed_by(result.token_ids[0])
    return found


def expected_logprobs(oracle: Any, prompt: Prompt) -> tuple[list[float], int]:
    """Return what ``logprobs_of`` should, and the greedy token."""
    logprobs = oracle_logits(oracle, prompt).log_softmax(-1)
    greedy = int(logprobs[-1].argmax())
    following = torch.tensor([*prompt.token_ids[1:], greedy])
    return logprobs.gather(1, following[:, None])[:, 0].tolist(), greedy


def text(length: int, seed: int = 0) -> list[int]:
    """Return tokens without those about pictures."""
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE - 3, length).tolist()
