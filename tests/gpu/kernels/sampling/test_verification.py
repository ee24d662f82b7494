"""Triton's tables of steps that verify drafts, and what it accepts, on a GPU; also in replayed CUDA graphs."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.kernels.sampling import verification
from strandline.kernels.sampling.verification_triton import accept_drafts, resolve_pending
from tests.cpu.kernels.sampling.test_verification import (
    Step,
    assert_equal_steps,
    assert_equal_tables,
    check_accepted,
    check_tables,
    steps,
)

SIZES = st.tuples(st.integers(1, 512), st.integers(0, 5), st.integers(0, 3)).map(lambda x: (x[0], x[1], x[1] + x[2]))


@given(steps(SIZES))
def test_tables_and_corrections_are_torchs(step: Step) -> None:
    check_tables(step, "cuda")


@given(steps(SIZES))
def test_accepted_drafts_are_torchs(step: Step) -> None:
    check_accepted(step, "cuda")


@given(st.lists(steps(st.just((4, 2, 3)), st.just([3, 5])), min_size=4, max_size=4))
@settings(max_examples=5)
def test_replayed_graphs_read_what_lies_at_their_addresses(drawn: list[Step]) -> None:
    captured = drawn[0].to("cuda")

    def run() -> tuple[verification.VerificationTables | None, verification.AcceptedDrafts]:
        return resolve_pending(*captured[:3]), accept_drafts(*captured.outcome)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tables, accepted = run()
    for step in drawn[1:]:
        for own, other in zip(captured.tensors, step.tensors, strict=True):
            own.copy_(other)
        expected_of = step.to("cpu")
        expected_tables = verification.resolve_pending.reference(*expected_of[:3])
        expected = verification.accept_drafts.reference(*expected_of.outcome)
        graph.replay()
        assert_equal_steps(captured, expected_of)
        assert_equal_tables(tables, expected_tables)
        assert all(torch.equal(own.cpu(), other) for own, other in zip(accepted, expected, strict=True))
