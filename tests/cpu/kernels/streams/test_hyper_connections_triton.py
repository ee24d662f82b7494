"""Triton's hyper-connections equal the torch versions: in float32 to the sums' order, in bfloat16 to rare roundings.

The ``check_`` functions run on any device; tests/gpu runs them at larger shapes.
"""

import pytest
import torch
from torch import Tensor

from strandline.kernels.expert_choices import Summand, added_up
from strandline.kernels.operation import Launches
from strandline.kernels.streams import hyper_connections
from strandline.kernels.streams.hyper_connections import HyperMixes, HyperWeights
from tests.cpu.kernels.rowwise.test_norm_triton import DTYPES, EPS, choices_of, view_of_wider
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.streams import hyper_connections_triton


def near(actual: Tensor, expected: Tensor, num_roundings: int = 1) -> None:
    """Compare; a rounding may differ by a unit in the last place, and Triton's interpreter cuts bfloat16 off.

    Sums of all streams are as long as a row: in float32 they differ by more than those of norms.
    """
    if expected.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)
    else:
        scale = 2**-7 if expected.is_cuda else 2**-5
        torch.testing.assert_close(actual, expected, rtol=scale * num_roundings, atol=scale * num_roundings)
        if expected.is_cuda:
            assert (actual != expected).float().mean() < 0.02


def random_weights(num_streams: int, size: int, dtype: torch.dtype, device: str, num_iterations: int) -> HyperWeights:
    """Return weights whose mixes differ from token to token."""
    num_mixes, num_inputs = num_streams * (num_streams + 2), num_streams * size
    mix_OI = torch.randn(num_mixes, num_inputs, device=device) / num_inputs**0.5
    bias_O, scale_3 = torch.randn(num_mixes, device=device), 1 + torch.rand(3, device=device)
    norm_E = 1 + torch.rand(size, device=device).to(dtype)
    return HyperWeights(mix_OI, bias_O, scale_3, norm_E, num_iterations, EPS, 1e-6)


def random_mixes(num_tokens: int, num_streams: int, device: str) -> HyperMixes:
    shares_TSS = torch.rand(num_tokens, num_streams, num_streams, device=device).softmax(dim=-1)
    return HyperMixes(2 * torch.rand(num_tokens, num_streams, device=device), shares_TSS)


def rounded_once(stream_TSE: Tensor, mixes: HyperMixes | None, output: Summand | None) -> Tensor:
    """Return the next streams as kernels round them: mixes first, then the sum of all products."""
    if mixes is None or output is None:
        return stream_TSE
    output_TS, stream_TSS = (mix.to(stream_TSE.dtype).double() for mix in mixes)
    mixed_TSE = stream_TSS.mT @ stream_TSE.double()
    return (mixed_TSE + added_up(output).double().unsqueeze(1) * output_TS.unsqueeze(-1)).to(stream_TSE.dtype)


def check_part(
    stream_TSE: Tensor, mixes: HyperMixes | None, output: Summand | None, weights: HyperWeights, launches: Launches
) -> None:
    expected = hyper_connections.connect_part.reference(stream_TSE, mixes, output, weights)
    norm = weights.norm_E, weights.eps
    with poisoned_memory():
        found = hyper_connections_triton.connect_part(stream_TSE, mixes, output, weights, launches=launches)
        found_mean_TE = hyper_connections_triton.average_streams(stream_TSE, mixes, output, *norm)
    near(found[1], rounded_once(stream_TSE, mixes, output))
    # The reference implementation rounds both products and their sum.
    torch.testing.assert_close(found[1], expected[1], rtol=2**-5, atol=2**-5)
    near(found_mean_TE, hyper_connections.average_streams.reference(found[1], None, None, *norm), 3)
    # What is made of the streams is compared given the same streams: roundings of these make a difference.
    near(found[0], hyper_connections.connect_part.reference(found[1], None, None, weights)[0], 3)
    for mix, expected_mix in zip(
        found[2], hyper_connections.connect_part.reference(found[1], None, None, weights)[2], strict=True
    ):
        near(mix, expected_mix)


def check_parts(
    num_tokens: int, num_streams: int, size: int, dtype: torch.dtype, device: str, launches: Launches
) -> None:
    """Check the first part, whose streams are one tensor, a later one, and one whose output is choices of experts."""
    weights = random_weights(num_streams, size, dtype, device, num_iterations=5)
    embedded_TE = view_of_wider((num_tokens, size), dtype, device)
    check_part(embedded_TE.unsqueeze(1).expand(-1, num_streams, -1), None, None, weights, launches)
    stream_TSE = torch.randn(num_tokens, num_streams, size, device=device).to(dtype)
    mixes = random_mixes(num_tokens, num_streams, device)
    check_part(stream_TSE, mixes, view_of_wider((num_tokens, size), dtype, device), weights, launches)
    for is_divided in (False, True):
        choices = choices_of(num_tokens, size, dtype, device, is_divided=is_divided)
        with poisoned_memory():
            expected = hyper_connections_triton.connect_part(stream_TSE, mixes, added_up(choices), weights)
            found = hyper_connections_triton.connect_part(stream_TSE, mixes, choices, weights)
        assert torch.equal(found[1], expected[1])


def check_invariance(num_tokens: int, num_streams: int, size: int, dtype: torch.dtype, device: str) -> None:
    """A token's bits do not depend on the tokens around it, with fixed launches."""
    weights = random_weights(num_streams, size, dtype, device, num_iterations=20)
    stream_TSE = torch.randn(num_tokens, num_streams, size, device=device).to(dtype)
    mixes, output_TE = random_mixes(num_tokens, num_streams, device), torch.randn(num_tokens, size, device=device)
    output_TE = output_TE.to(dtype)

    def connect(rows: slice) -> tuple[Tensor, ...]:
        part = HyperMixes(*(mix[rows] for mix in mixes))
        arguments = (stream_TSE[rows], part, output_TE[rows])
        input_TE, next_TSE, next_mixes = hyper_connections_triton.connect_part(
            *arguments, weights, launches=Launches.FIXED
        )
        mean_TE = hyper_connections_triton.average_streams(*arguments, weights.norm_E, EPS)
        return input_TE, next_TSE, mean_TE, *next_mixes

    whole = connect(slice(0, num_tokens))
    for rows in (slice(0, 1), slice(5, 6), slice(3, 20), slice(16, num_tokens)):
        for found, expected in zip(connect(rows), whole, strict=True):
            assert torch.equal(found, expected[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "num_streams", "size"), [(1, 4, 64), (17, 3, 40), (3, 2, 300), (2, 1, 9)])
def test_parts_are_connected_as_in_torch(num_tokens: int, num_streams: int, size: int, dtype: torch.dtype) -> None:
    check_parts(num_tokens, num_streams, size, dtype, "cpu", Launches.MEASURED)


def test_parts_with_many_tokens_are_connected_as_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program then multiplies several blocks of channels, one after the other."""
    monkeypatch.setattr(hyper_connections_triton, "MAX_TOKENS_FEW", 4)
    monkeypatch.setattr(hyper_connections_triton, "MANY", hyper_connections_triton.MixLaunch(16, 64, 3, 4))
    check_parts(20, 4, 130, torch.bfloat16, "cpu", Launches.MEASURED)


@pytest.mark.usefixtures("rows_alike")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_token_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    check_invariance(24, 3, 40, dtype, "cpu")


def test_steps_without_tokens_are_connected() -> None:
    weights = random_weights(4, 16, torch.float32, "cpu", num_iterations=2)
    stream_TSE, output_TE = torch.empty(0, 4, 16), torch.empty(0, 16)
    mixes = random_mixes(0, 4, "cpu")
    input_TE, next_TSE, _ = hyper_connections_triton.connect_part(stream_TSE, mixes, output_TE, weights)
    assert (input_TE.shape, next_TSE.shape) == ((0, 16), (0, 4, 16))


def test_streams_are_mixed_by_nearly_doubly_stochastic_matrices() -> None:
    weights = random_weights(4, 64, torch.float32, "cpu", num_iterations=20)
    _, _, mixes = hyper_connections_triton.connect_part(torch.randn(5, 4, 64), None, None, weights)
    for dim in (1, 2):
        torch.testing.assert_close(mixes.stream_TSS.sum(dim), torch.ones(5, 4), rtol=1e-3, atol=1e-3)
