"""What a draft layer keeps of tokens without drafting is what it keeps where it drafts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from strandline.kernels.batch import StepBatch
from strandline.models.layers.protocol import ModelMemory
from strandline.models.model_options import ModelOptions
from strandline.models.weights import load_model
from strandline.text.model_files import DEMO_DIRECTORY
from tests.cpu.models.driver import Driver, Part, Running

VOCAB_SIZE = 32
LENGTHS = [[1, 1, 1], [5, 63, 1, 70], [64, 2]]
"""Tokens of each sequence in a step; the second step goes on with the same sequences, one token each."""


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(DEMO_DIRECTORY, ModelOptions(dtype=torch.float32, with_draft_layer=True))


def kept(model: Any, lengths: list[int], store: Callable[..., object]) -> list[Tensor]:
    """Return the sequences' keys and values, by layer, after two steps of pairs; what was not written is NaN."""
    driver = Driver(model)
    generator = torch.Generator().manual_seed(len(lengths))
    sequences = [Running() for _ in lengths]
    for counts in (lengths, [1] * len(lengths)):
        tokens = [torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist() for count in counts]
        parts = [Part(sequence, part) for sequence, part in zip(sequences, tokens, strict=True)]
        parts.sort(key=lambda part: len(part.tokens) > 1)
        num_decodes = sum(len(part.tokens) == 1 for part in parts)
        batch = driver._batch(parts, num_decodes, [0] * len(parts), [{}] * len(parts))
        hidden_TE = torch.randn(sum(counts), model.decoder.embedding.embed_ZE.shape[1], generator=generator)
        store(batch, hidden_TE, driver._memory)
        for part in parts:
            part.sequence.num_tokens += len(part.tokens)
    blocks = [block for sequence in sequences for block in sequence.blocks]
    return [stream[blocks] for layer in driver.arena.layers for stream in layer.streams.values()]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_kept_keys_and_values_are_those_of_drafting(model: Any, lengths: list[int]) -> None:
    drafted, alone = (kept(model, lengths, store) for store in (model.draft, model.keep_for_drafts))
    for expected, found in zip(drafted, alone, strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)
    # Keys and values of the draft layer; the model's other layers have stored nothing.
    num_written = [int((~stream.isnan()).all(-1).all(-1).sum()) for stream in alone]
    assert num_written == [0] * (len(alone) - 2) + [sum(lengths) + len(lengths)] * 2


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_some_rows_are_drafted_as_all_are(model: Any, lengths: list[int]) -> None:
    drafted, some = list[Tensor](), list[Tensor]()

    def draft_all(batch: StepBatch, hidden_TE: Tensor, memory: ModelMemory) -> None:
        drafted.append(model.draft(batch, hidden_TE, memory))

    def draft_rows(batch: StepBatch, hidden_TE: Tensor, memory: ModelMemory) -> None:
        some.append(model.draft(batch, hidden_TE, memory, batch.attention.query_starts_N1[1:] - 1))

    of_all, of_some = kept(model, lengths, draft_all), kept(model, lengths, draft_rows)
    for stored, expected in zip(of_some, of_all, strict=True):
        torch.testing.assert_close(stored, expected, equal_nan=True, rtol=0, atol=0)
    ends = torch.tensor(sorted(lengths, key=lambda count: count > 1)).cumsum(0) - 1
    for found_NE, all_TE, rows_N in zip(some, drafted, (ends, torch.arange(len(lengths))), strict=True):
        # GEMMs of another number of rows sum in another order.
        torch.testing.assert_close(found_NE, all_TE[rows_N], rtol=1e-4, atol=1e-5)
