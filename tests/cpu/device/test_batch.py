"""A sequence's parts within blocks: together they compute what it does."""

from strandline.device.batches.batch import split_by_blocks
from strandline.ids import SlotId
from tests.cpu.device.test_padded_step import sequence


def test_parts_of_a_prompt_end_with_its_blocks() -> None:
    whole = sequence(1, 64, 200, cuts=(128, 192))
    parts = list(split_by_blocks(whole))
    assert [(part.start, part.end, part.num_folded) for part in parts] == [(64, 128, 64), (128, 192, 64), (192, 200, 8)]
    assert sum((part.token_ids for part in parts), ()) == whole.token_ids
    assert [part.cuts for part in parts] == [((128, SlotId(14)),), ((192, SlotId(14)),), ()]
    assert [part.state_src for part in parts] == [whole.state_src, whole.state_dst, whole.state_dst]


def test_a_sequence_within_one_block_is_its_own_only_part() -> None:
    for start, end in ((64, 64), (64, 65), (70, 128), (200, 201)):
        assert list(split_by_blocks(sequence(1, start, end))) == [sequence(1, start, end)]
