"""Pinned host memory: what a GPU evicts comes back as it was, while steps overlap with the copies."""

import pytest
import torch

from strandline.device.stores.host_store import HostStore, PinnedStore
from strandline.device.stores.snapshot_encoding import slot_encoding
from strandline.device.stores.transfers import Transfers
from strandline.ids import BlockId, SlotId, TransferId
from strandline.kernels.arena import ArenaTensors
from strandline.records.actions import LoadIn, SnapshotCopy, StoreOut
from tests.cpu.device.test_stored_windows import check_windows_return
from tests.cpu.engine.conftest import MakeLLM
from tests.cpu.engine.test_exactness import GREEDY, answers
from tests.cpu.engine.test_host_memory import LENGTHS, PROMPTS, slabs, stats


def test_evicted_prompts_come_back_from_pinned_memory(make_llm: MakeLLM) -> None:
    cold = make_llm(enable_prefix_caching=False)
    expected = answers(cold, PROMPTS)
    llm = make_llm(memory=slabs(cold, 40), host_memory="64MiB", max_model_len=512)
    for _ in range(3):
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            assert answers(llm, [prompt]) == [answer]
    assert answers(llm, PROMPTS) == expected
    for prompt, length in zip(PROMPTS, LENGTHS, strict=True):
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == length
    assert stats(llm).loads.num_failed == 0


def test_stored_bytes_are_those_of_their_moment(make_llm: MakeLLM) -> None:
    """Overwrite what is stored at once, load it elsewhere, and repeat until the staging memory has been reused."""
    spec = make_llm(enable_prefix_caching=False).engine.core.spec
    arena = ArenaTensors(spec, 8, "cuda")
    transfers = Transfers(arena)
    store = PinnedStore(arena, 40 * (spec.blocks_per_slab + 1), transfers.completions)
    block, other = BlockId(spec.blocks_per_slab), BlockId(2 * spec.blocks_per_slab)
    slot, another = SlotId(3), SlotId(4)
    number = 0
    for value in range(20):
        number += 2
        arena.block(block).fill_(value)
        arena.slot(slot).fill_(value + 100)
        addresses = (2 * value + 1, 2 * value + 2)
        stored, loaded = (SnapshotCopy(each, addresses[1]) for each in (slot, another))
        store.store(StoreOut(TransferId(number), "host", ((block, addresses[0]),), (stored,)), arena)
        arena.block(block).fill_(255)
        arena.slot(slot).fill_(255)
        store.load(LoadIn(TransferId(number + 1), "host", ((other, addresses[0]),), (loaded,)), arena)
        ended = list(transfers.wait(60))
        while len(ended) < 2:
            ended += transfers.wait(60)
        assert all(completion.is_done for completion in ended)
        assert bool((arena.block(other) == value).all())
        assert bool((arena.slot(another) == value + 100).all())
        if value % 2:
            store.drop(addresses)
    torch.cuda.synchronize()
    store.close()


def test_full_memories_are_exchanged(make_llm: MakeLLM) -> None:
    """Exchange what arena and host memory hold, without waiting in between, with host memory for one more slab."""
    spec = make_llm(enable_prefix_caching=False).engine.core.spec
    size = spec.blocks_per_slab
    arena = ArenaTensors(spec, 12, "cuda")
    transfers = Transfers(arena)
    blocks = [BlockId(block) for block in range(2 * size, 10 * size)]
    store = PinnedStore(arena, len(blocks) + size, transfers.completions)
    num_transfers = num_addresses = num_ended = 0

    def put_away(some: list[BlockId], *, is_held: bool) -> list[int]:
        nonlocal num_transfers, num_addresses
        num_transfers, first = num_transfers + 1, num_addresses + 1
        num_addresses += len(some)
        addresses = list(range(first, num_addresses + 1))
        pairs = tuple(zip(some, addresses, strict=True))
        store.store(StoreOut(TransferId(num_transfers), "host", pairs, (), is_held=is_held), arena)
        return addresses

    for index, block in enumerate(blocks):
        arena.block(block).fill_(index % 100)
    at_rest, resting = [index % 100 for index in range(len(blocks))], put_away(blocks, is_held=False)
    for index, block in enumerate(blocks):
        arena.block(block).fill_(100 + index % 100)
    for round_number in range(10):
        here = [int(arena.block(block)[0]) for block in blocks]
        new: list[int] = []
        for start in range(0, len(blocks), size):
            some, addresses = blocks[start : start + size], resting[start : start + size]
            new += put_away(some, is_held=round_number % 3 > 0)
            num_transfers += 1
            pairs = tuple(zip(some, addresses, strict=True))
            store.load(LoadIn(TransferId(num_transfers), "host", pairs, ()), arena)
            store.drop(addresses)
        while num_ended < num_transfers:
            num_ended += len(transfers.wait(60))
        for block, value in zip(blocks, at_rest, strict=True):
            assert bool((arena.block(block) == value).all())
        resting, at_rest = new, here
    store.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_states_in_fewer_bits_return_as_on_a_cpu(make_llm: MakeLLM, dtype: str) -> None:
    """Store and load at once, over and over: what is encoded on the side must not be overtaken by what follows."""
    spec = make_llm(enable_prefix_caching=False).engine.core.spec
    arenas = ArenaTensors(spec, 8, "cuda"), ArenaTensors(spec, 8)
    kinds: list[type[PinnedStore | HostStore]] = [PinnedStore, HostStore]
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        for layer in arenas[1].layers:
            for state in layer.states.values():
                state[3] = torch.randn(state[3].shape, generator=generator).to(state.dtype)
        arenas[1].hidden_SE[3] = step
        arenas[0].slot(SlotId(3)).copy_(arenas[1].slot(SlotId(3)))
        for arena, kind in zip(arenas, kinds, strict=True):
            transfers = Transfers(arena)
            num_pages = spec.stored_snapshots(dtype).max_blocks
            store = kind(arena, num_pages, transfers.completions, slot_encoding(spec, dtype))
            arena.slot(SlotId(4)).fill_(0)
            store.store(StoreOut(TransferId(1), "host", (), (SnapshotCopy(SlotId(3), 1),)), arena)
            arena.slot(SlotId(3)).fill_(255)
            store.load(LoadIn(TransferId(2), "host", (), (SnapshotCopy(SlotId(4), 1),)), arena)
            ended = list(transfers.wait(60))
            while len(ended) < 2:
                ended += transfers.wait(60)
            torch.cuda.synchronize()
            store.close()
        for mine, theirs in zip(arenas[0].layers, arenas[1].layers, strict=True):
            for name, state in theirs.states.items():
                # A division may round differently, by one code.
                assert torch.allclose(mine.states[name][4].cpu().float(), state[4].float(), rtol=1e-2, atol=0.04)
                assert bool((state[4] != 0).any())


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_windows_return_from_pinned_memory(dtype: str) -> None:
    check_windows_return(PinnedStore, "cuda", dtype)
