"""Triton's gates of streams equal the torch versions: in float32 to the sums' order, in bfloat16 to rare roundings.

The ``check_`` functions run on any device; tests/gpu runs them at larger shapes.
"""

import pytest
import torch
from torch import Tensor

from strandline.kernels.expert_choices import added_up
from strandline.kernels.streams import gates
from strandline.kernels.streams.gates import FeatureNorms
from tests.cpu.kernels.rowwise.test_norm_triton import DTYPES, EPS, choices_of, view_of_wider
from tests.cpu.kernels.streams.test_hyper_connections_triton import near
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.streams import gates_triton

Shape = tuple[int, int, int]
"""Tokens, streams, channels."""


def random_streams(shape: Shape, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def check_added_outputs(shape: Shape, dtype: torch.dtype, device: str) -> None:
    num_tokens, num_streams, size = shape
    stream_TSE, norm_SE = random_streams(shape, dtype, device), random_streams(shape, dtype, device)[0]
    gate_TS = view_of_wider((num_tokens, num_streams), dtype, device)
    output_TE = view_of_wider((num_tokens, size), dtype, device)
    with poisoned_memory():
        normed_TSE, next_TSE = gates_triton.add_gated_norm(stream_TSE, gate_TS, output_TE, norm_SE, EPS)
        assert torch.equal(next_TSE, gates_triton.add_gated(stream_TSE, gate_TS, output_TE))
    near(next_TSE, gates.add_gated.reference(stream_TSE, gate_TS, output_TE), 2)
    near(normed_TSE, gates.add_gated_norm.reference(next_TSE, None, None, norm_SE, EPS)[0])
    for is_divided in (False, True):
        choices = choices_of(num_tokens, size, dtype, device, is_divided=is_divided)
        with poisoned_memory():
            added_TSE = gates_triton.add_gated(stream_TSE, gate_TS, added_up(choices))
            assert torch.equal(gates_triton.add_gated(stream_TSE, gate_TS, choices), added_TSE)


def check_first_streams(shape: Shape, dtype: torch.dtype, device: str) -> None:
    """Streams that are one tensor are normalised, and returned as they are."""
    num_tokens, num_streams, size = shape
    stream_TSE = view_of_wider((num_tokens, size), dtype, device).unsqueeze(1).expand(-1, num_streams, -1)
    norm_SE = random_streams((1, num_streams, size), dtype, device)[0]
    with poisoned_memory():
        normed_TSE, next_TSE = gates_triton.add_gated_norm(stream_TSE, None, None, norm_SE, EPS)
    near(normed_TSE, gates.add_gated_norm.reference(stream_TSE, None, None, norm_SE, EPS)[0])
    assert next_TSE is stream_TSE
    assert gates_triton.add_gated(stream_TSE, None, None) is stream_TSE


def check_mixes(shape: Shape, dtype: torch.dtype, device: str) -> None:
    num_tokens, num_streams, size = shape
    gate_TO = view_of_wider((num_tokens, num_streams * size), dtype, device)
    normed_TSE = random_streams(shape, dtype, device)
    low_TR = view_of_wider((num_tokens, 20), dtype, device)
    with poisoned_memory():
        mixed_TE = gates_triton.mix_gated(gate_TO, normed_TSE)
        low_of_share_TR = gates_triton.silu_of_share(low_TR, num_streams)
    near(low_of_share_TR, gates.silu_of_share.reference(low_TR, num_streams))
    # The mean of products of both signs may be near zero.
    tolerance = 1e-6 if dtype == torch.float32 else 2**-6
    expected_TE = gates.mix_gated.reference(gate_TO.clone(), normed_TSE)
    torch.testing.assert_close(mixed_TE, expected_TE, rtol=tolerance, atol=tolerance)


def check_features(shape: Shape, dtype: torch.dtype, device: str) -> None:
    num_tokens, num_streams, size = shape
    both_TO = view_of_wider((num_tokens, (num_streams + 1) * size), dtype, device)
    key_TO, value_TE = both_TO[:, size:], both_TO[:, :size]
    norms = FeatureNorms(*random_streams((3, num_streams, size), dtype, device))
    stream_TSE = random_streams(shape, dtype, device)
    with poisoned_memory():
        gated_TSE, normed_TSE = gates_triton.gate_features(key_TO, value_TE, stream_TSE, norms, EPS)
    key_TO = key_TO.contiguous()
    expected_TSE, _ = gates.gate_features.reference(key_TO, value_TE, stream_TSE, norms, EPS)
    # A score of nearly zero has a steep root.
    tolerance = 1e-4 if dtype == torch.float32 else 2**-4
    torch.testing.assert_close(gated_TSE, expected_TSE, rtol=tolerance, atol=tolerance)
    near(normed_TSE, gates.add_gated_norm.reference(gated_TSE, None, None, norms.gated_SE, EPS)[0])


def check_invariance(shape: Shape, dtype: torch.dtype, device: str) -> None:
    """A token's bits do not depend on the tokens around it."""
    num_tokens, num_streams, size = shape
    stream_TSE, norms = random_streams(shape, dtype, device), random_streams((3, *shape[1:]), dtype, device)
    gate_TS, output_TE = random_streams((1, num_tokens, num_streams + size), dtype, device)[0].split(
        [num_streams, size], dim=-1
    )
    key_TO = random_streams((1, num_tokens, num_streams * size), dtype, device)[0]

    def compute(rows: slice) -> tuple[Tensor, ...]:
        added = gates_triton.add_gated_norm(stream_TSE[rows], gate_TS[rows], output_TE[rows], norms[0], EPS)
        mixed_TE = gates_triton.mix_gated(key_TO[rows], stream_TSE[rows])
        features = (key_TO[rows], output_TE[rows], stream_TSE[rows], FeatureNorms(*norms), EPS)
        return *added, mixed_TE, *gates_triton.gate_features(*features)

    whole = compute(slice(0, num_tokens))
    for rows in (slice(0, 1), slice(5, 6), slice(3, num_tokens)):
        for found, expected in zip(compute(rows), whole, strict=True):
            assert torch.equal(found, expected[rows])


SHAPES = pytest.mark.parametrize("shape", [(1, 4, 64), (5, 3, 40), (3, 2, 600), (2, 8, 24)], ids=str)
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@EACH_DTYPE
@SHAPES
def test_outputs_are_added_as_in_torch(shape: Shape, dtype: torch.dtype) -> None:
    check_added_outputs(shape, dtype, "cpu")
    check_first_streams(shape, dtype, "cpu")


@EACH_DTYPE
@SHAPES
def test_streams_are_mixed_as_in_torch(shape: Shape, dtype: torch.dtype) -> None:
    check_mixes(shape, dtype, "cpu")


@EACH_DTYPE
@SHAPES
def test_features_are_gated_as_in_torch(shape: Shape, dtype: torch.dtype) -> None:
    check_features(shape, dtype, "cpu")


@EACH_DTYPE
def test_token_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    check_invariance((9, 3, 40), dtype, "cpu")


def test_steps_without_tokens_are_computed() -> None:
    stream_TSE, gate_TS, output_TE = torch.empty(0, 4, 16), torch.empty(0, 4), torch.empty(0, 16)
    normed_TSE, next_TSE = gates_triton.add_gated_norm(stream_TSE, gate_TS, output_TE, torch.empty(4, 16), EPS)
    assert normed_TSE.shape == next_TSE.shape == (0, 4, 16)
    assert gates_triton.mix_gated(torch.empty(0, 64), normed_TSE).shape == (0, 16)
    assert gates_triton.silu_of_share(torch.empty(0, 6), 4).shape == (0, 6)
