"""What ranks hold of blocks and slots is what the whole model has, for every kind of layer, whole again when joined."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strandline.ids import BLOCK_TOKENS, BlockId, SlotId
from strandline.kernels.arena import ArenaTensors
from strandline.models.layers.parts.shard import Shard
from strandline.models.model_options import ModelOptions
from strandline.models.weights import load_model
from strandline.specs import LayerSpec, ModelSpec, TensorSpec
from strandline.transfer.rank_parts import RankParts
from tests.cpu.models import families
from tests.cpu.models.driver import Driver, Part, Running
from tests.cpu.models.rank_threads import RankThread, RankThreads

CASES = [(name, shards[-1]) for name in families.FAMILIES if (shards := families.CONFIGS[name].shards)]
"""Families with all kinds of layers, and numbers of ranks: four where keys and values or groups are fewer."""
NUM_TOKENS = 70


class Memory(NamedTuple):
    """Two blocks and a slot as bytes."""

    spec: ModelSpec
    blocks: np.ndarray
    slots: np.ndarray

    @property
    def entries(self) -> tuple[np.ndarray, ...]:
        """The blocks, the slots and no window blocks."""
        return self.blocks, self.slots, np.empty((0, 0), np.uint8)

    def tensors(self) -> list[torch.Tensor]:
        """Return every layer's tensors, and the hidden state."""
        spec = self.spec
        arena = ArenaTensors(spec, 4)
        for index, block in enumerate(self.blocks):
            arena.block(BlockId(spec.blocks_per_slab + index)).copy_(torch.from_numpy(block))
        arena.slot(SlotId(3)).copy_(torch.from_numpy(self.slots[0]))
        found = [arena.hidden_SE[3]]
        for layer in arena.layers:
            blocks = (stream[spec.blocks_per_slab :][:2] for stream in layer.streams.values())
            found += [block.flatten(0, 1)[:NUM_TOKENS] for block in blocks]
            found += [state[3] for state in layer.states.values()]
        return found


def computed(directory: Path, ranks: RankThread) -> Memory:
    """Compute some tokens on a rank; return what it then holds."""
    model = load_model(directory, ModelOptions(dtype=torch.float32, shard=Shard(ranks.rank, ranks.size)))
    driver, sequence, tokens = Driver(model, num_slabs=20, ranks=ranks), Running(), families.prompt(NUM_TOKENS)
    for step in (tokens[:66], *([token] for token in tokens[66:])):
        driver.step([Part(sequence, step)])
    arena = driver.arena
    arena.hidden_SE[sequence.slot] = 1.0  # the runner's task
    blocks = torch.stack([arena.block(BlockId(block)) for block in sequence.blocks])
    return Memory(model.spec, blocks.numpy(), arena.slot(SlotId(sequence.slot))[None].numpy())


def joined(parts: list[Memory]) -> Memory:
    spec = parts[0].spec.whole
    whole = filled(spec, len(parts[0].blocks), len(parts[0].slots))
    for rank, part in enumerate(parts):
        copies = RankParts(part.spec, rank, len(parts))
        copies.join(part.entries, whole.entries)
    return whole


def split(whole: Memory, spec: ModelSpec, num_ranks: int) -> list[Memory]:
    parts = [filled(spec, len(whole.blocks), len(whole.slots)) for _ in range(num_ranks)]
    for rank, part in enumerate(parts):
        copies = RankParts(spec, rank, num_ranks)
        copies.split(whole.entries, part.entries)
    return parts


def filled(spec: ModelSpec, num_blocks: int, num_slots: int, byte: int = 0) -> Memory:
    shapes = (num_blocks, spec.raw_block_bytes), (num_slots, spec.raw_slot_bytes)
    return Memory(spec, *(np.full(shape, byte, np.uint8) for shape in shapes))


@pytest.mark.parametrize(("name", "num_ranks"), CASES)
def test_ranks_hold_together_what_the_whole_model_has(name: str, num_ranks: int, tmp_path: Path) -> None:
    directory = families.save(name, tmp_path)
    [alone] = RankThreads(1).run(lambda ranks: computed(directory, ranks))
    parts = RankThreads(num_ranks).run(lambda ranks: computed(directory, ranks))
    whole = joined(parts)
    assert whole.spec == alone.spec
    for found, expected in zip(whole.tensors(), alone.tensors(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for again, part in zip(split(whole, parts[0].spec, num_ranks), parts, strict=True):
        assert all(found.equal(expected) for found, expected in zip(again.tensors(), part.tensors(), strict=True))


@st.composite
def divided(draw: st.DrawFn, num_ranks: int) -> TensorSpec:
    """Any tensor, held by every rank, or divided in several parts along a dimension."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shares = [count for count in (1, 2, 4) if count <= num_ranks]
    parts = draw(st.lists(st.tuples(st.integers(1, 3), st.sampled_from(shares)), max_size=3))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]))
    if not parts:
        return TensorSpec("x", tuple(shape), dtype)
    shape[dim] = sum(size for size, _ in parts)
    return TensorSpec("x", tuple(shape), dtype).divided(*parts, dim=dim)


@given(data=st.data(), num_ranks=st.sampled_from([1, 2, 4]), num=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_what_is_split_is_whole_again_when_joined(data: st.DataObject, num_ranks: int, num: int, seed: int) -> None:
    tensors = st.lists(divided(num_ranks), max_size=3).map(tuple)
    spec = ModelSpec((LayerSpec(data.draw(tensors)), LayerSpec((), data.draw(tensors))), 5, "bfloat16")
    random, whole = np.random.default_rng(seed), filled(spec.whole, num, num)
    for array in whole[1:]:
        array[:] = random.integers(0, 256, array.shape)
    found, is_held = (joined(split(memory, spec, num_ranks)) for memory in (whole, filled(spec.whole, num, num, 1)))
    for array, expected, held in zip(found[1:], whole[1:], is_held[1:], strict=True):
        assert np.array_equal(array, expected * held)
    streams, states = spec.whole.layers[0].streams, spec.whole.layers[1].states
    assert is_held.blocks.sum() == num * BLOCK_TOKENS * sum(stream.num_bytes for stream in streams)
    assert is_held.slots.sum() == num * (sum(state.num_bytes for state in states) + spec.hidden_size * 2)
