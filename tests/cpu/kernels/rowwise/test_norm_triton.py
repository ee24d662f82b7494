"""The Triton norms and gates equal the torch versions: in float32 to the sums' order, in bfloat16 to rare roundings.

The ``check_`` functions run on any device; tests/gpu runs them at larger shapes.
"""

import pytest
import torch
from torch import Tensor

from strandline.kernels.expert_choices import ExpertChoices, WeighedSum, added_up, weighed
from strandline.kernels.rowwise import activation, norm
from strandline.kernels.rowwise.quantized_rows import plain_rows
from tests.cpu.kernels.rowwise.test_quantizing_triton import assert_quantized
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.expert_choices_triton import add_choices
from strandline.kernels.rowwise import activation_triton, norm_triton

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16]


def near(actual: Tensor, expected: Tensor, num_roundings: int = 1) -> None:
    """Compare; on a GPU bfloat16 may differ by a unit in the last place, where another order of a sum flips a rounding.

    A product of what is rounded itself, ``num_roundings`` in all, may differ by as many units.

    Triton's interpreter cuts bfloat16 off instead of rounding it: there several units are let pass.
    """
    if expected.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)
    elif not expected.is_cuda:
        torch.testing.assert_close(actual, expected, rtol=2**-5, atol=1e-6)
    else:
        torch.testing.assert_close(actual, expected, rtol=2**-7 * num_roundings, atol=1e-6)
        assert (actual != expected).float().mean() < 0.01


def view_of_wider(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return random values, a part of the rows of a wider tensor whose other columns are NaN."""
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    wide = torch.full((rows, columns + 24), torch.nan, dtype=dtype, device=device)
    part = wide[:, 8 : 8 + columns]
    part.normal_()
    return part.unflatten(1, shape[1:]) if len(shape) > 2 else part


def check_norms(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x, residual = view_of_wider(shape, dtype, device), view_of_wider(shape, dtype, device)
    weight_D = torch.randn(shape[-1], device=device).to(dtype)
    with poisoned_memory():
        for suffix, num_roundings in (("", 2), ("_zero_centered", 1)):
            norm_alone, add_norm = getattr(norm, f"rms_norm{suffix}"), getattr(norm, f"add_rms_norm{suffix}")
            actual = getattr(norm_triton, norm_alone.name)(x, weight_D, EPS)
            near(actual, norm_alone.reference(x, weight_D, EPS), num_roundings)
            for added in (residual, torch.randn(shape, device=device).to(dtype)):
                expected, total = add_norm.reference(x.clone(), added, weight_D, EPS)
                x_in = x.clone()
                actual, actual_total = getattr(norm_triton, add_norm.name)(x_in, added, weight_D, EPS)
                near(actual, expected, num_roundings)
                near(actual_total, total)
                assert actual_total.data_ptr() == x_in.data_ptr()


def choices_of(num_tokens: int, size: int, dtype: torch.dtype, device: str, *, is_divided: bool) -> ExpertChoices:
    """Return random choices among 8 experts; rows of experts that are not held are NaN."""
    top_k, held = 3, range(2, 6)
    experts_TK = torch.rand(num_tokens, 8, device=device).topk(top_k).indices
    out_AD = torch.randn(num_tokens * top_k, size, device=device).to(dtype)
    if is_divided:
        out_AD[((experts_TK < held.start) | (experts_TK >= held.stop)).flatten()] = torch.nan
    weights_TK, gate_T1 = torch.rand(num_tokens, top_k, device=device), view_of_wider((num_tokens, 1), dtype, device)
    shared = (view_of_wider((num_tokens, size), dtype, device), gate_T1)
    return ExpertChoices(out_AD, weights_TK, experts_TK, *shared, held if is_divided else None, add_choices)


def check_norms_of_choices(num_tokens: int, size: int, dtype: torch.dtype, device: str) -> None:
    """Norms add up choices of experts as a launch before them does, and leave them as they are."""
    residual, weight_D = view_of_wider((num_tokens, size), dtype, device), torch.randn(size, device=device).to(dtype)
    for is_divided in (False, True):
        choices = choices_of(num_tokens, size, dtype, device, is_divided=is_divided)
        for name in ("add_rms_norm", "add_rms_norm_zero_centered"):
            for end in ("", "_quantized"):
                function = getattr(norm_triton, f"{name}{end}")
                with poisoned_memory():
                    expected, total = function(added_up(choices), residual, weight_D, EPS)
                    actual, actual_total = function(choices, residual, weight_D, EPS)
                near(actual_total, total)
                near(plain_rows(actual), plain_rows(expected))
                if end:
                    assert_quantized(actual, plain_rows(actual))


def check_norms_of_weighed_sums(num_tokens: int, size: int, dtype: torch.dtype, device: str) -> None:
    """Norms apply factors of one part, tensor or choices, and of two, and add these up, as the reference does."""
    first_TD, second_TD, residual_TD = (view_of_wider((num_tokens, size), dtype, device) for _ in range(3))
    weight_D = torch.randn(size, device=device).to(dtype)
    choices = choices_of(num_tokens, size, dtype, device, is_divided=True)
    for kind in ("", "_zero_centered"):
        for end in ("", "_quantized"):
            for first, *second in ((first_TD,), (choices,), (first_TD, second_TD, 1.5)):
                sums = (
                    weighed(WeighedSum(first if first is choices else first_TD.clone(), 0.6, *second), 0.5)
                    for _ in range(2)
                )
                with poisoned_memory():
                    actual, total = getattr(norm_triton, f"add_rms_norm{kind}{end}")(
                        next(sums), residual_TD, weight_D, EPS
                    )
                reference = getattr(norm, f"add_rms_norm{kind}").reference
                expected, expected_total = reference(added_up(next(sums)), residual_TD, weight_D, EPS)
                # The interpreter cuts bfloat16 off, which counts for more where summands cancel out.
                tolerance = 1e-6 if dtype == torch.float32 else 2**-6
                for found_TD, wanted_TD in ((total, expected_total), (plain_rows(actual), expected)):
                    error = (found_TD.float() - wanted_TD.float()).norm()
                    assert error <= tolerance * wanted_TD.float().norm()


def check_gated_norm(shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype, device: str) -> None:
    x, gate = torch.randn(shape, device=device).to(dtype), view_of_wider(shape, dtype, device)
    weight_D = torch.randn(shape[-1], device=device).to(weight_dtype)
    for name, num_roundings in (("rms_norm_gated", 3), ("rms_norm_sigmoid_gated", 1)):
        with poisoned_memory():
            actual = getattr(norm_triton, name)(x, gate, weight_D, EPS)
        near(actual, getattr(norm, name).reference(x, gate, weight_D, EPS), num_roundings)


def check_norm_of_gated(num_rows: int, size: int, num_groups: int, dtype: torch.dtype, device: str) -> None:
    x_TD, gate_TD = (view_of_wider((num_rows, size), dtype, device) for _ in range(2))
    weight_D = torch.randn(size, device=device).to(dtype)
    for gate_factor in (1.0, 0.6):
        options = (weight_D, EPS, num_groups, gate_factor)
        with poisoned_memory():
            actual = norm_triton.rms_norm_of_gated(x_TD, gate_TD, *options)
        near(actual, norm.rms_norm_of_gated.reference(x_TD, gate_TD, *options), 2)


def check_quantized_norms(num_rows: int, size: int, dtype: torch.dtype, device: str) -> None:
    """Compare norms that quantise with quantising afterwards, bit by bit."""
    x, residual = (view_of_wider((num_rows, size), dtype, device) for _ in range(2))
    weight_D = torch.randn(size, device=device).to(dtype)
    for suffix in ("", "_zero_centered"):
        norm_alone, add_norm = (
            [getattr(norm_triton, f"{name}{suffix}{end}") for end in ("", "_quantized")]
            for name in ("rms_norm", "add_rms_norm")
        )
        with poisoned_memory():
            plain, rows = (function(x, weight_D, EPS) for function in norm_alone)
            added, total = add_norm[0](x.clone(), residual, weight_D, EPS)
            added_rows, total_of_rows = add_norm[1](x.clone(), residual, weight_D, EPS)
        assert torch.equal(total_of_rows, total)
        for expected, found in ((plain, rows), (added, added_rows)):
            # A compiler may round float32 in another order.
            tolerance = 1e-6 if device == "cuda" and dtype == torch.float32 else 0
            torch.testing.assert_close(plain_rows(found), expected, rtol=tolerance, atol=tolerance)
            assert_quantized(found, plain_rows(found))


def check_quantized_gated_norm(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    x, gate = (view_of_wider(shape, dtype, device) for _ in range(2))
    weight_D = torch.randn(shape[-1], device=device)
    with poisoned_memory():
        expected = norm_triton.rms_norm_gated(x, gate, weight_D, EPS)
        found = norm_triton.rms_norm_gated_quantized(x, gate, weight_D, EPS)
    assert_quantized(found, expected.flatten(1))


def check_gates(num_rows: int, size: int, dtype: torch.dtype, device: str) -> None:
    gate_up = view_of_wider((num_rows, 2 * size), dtype, device)
    with poisoned_memory():
        for options in ((), (None, 0.6)):
            near(activation_triton.swiglu(gate_up, *options), activation.swiglu.reference(gate_up, *options), 2)
        for is_tanh in (False, True):
            near(activation_triton.geglu(gate_up, is_tanh), activation.geglu.reference(gate_up, is_tanh), 2)
    for name, factors in (("sigmoid_gate", ()), ("silu_gate", ()), ("silu_gate", (0.6,))):
        x_TO, gate_TO = (view_of_wider((num_rows, size), dtype, device) for _ in range(2))
        expected_TO = getattr(activation, name).reference(x_TO.clone(), gate_TO, *factors)
        actual_TO = getattr(activation_triton, name)(x_TO, gate_TO, *factors)
        near(actual_TO, expected_TO, 1 + len(factors))
        assert actual_TO.data_ptr() == x_TO.data_ptr()
    x_TO = torch.randn(num_rows, size, device=device).to(dtype)
    expected_TO = activation.relu_squared.reference(x_TO.clone())
    near(activation_triton.relu_squared(x_TO), expected_TO)
    near(x_TO, expected_TO)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 8), (5, 130), (3, 2048)])
def test_norms_add_up_choices_of_experts(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    check_norms_of_choices(num_tokens, size, dtype, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 8), (5, 130)])
def test_norms_add_up_parts_with_factors(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    check_norms_of_weighed_sums(num_tokens, size, dtype, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (3, 63), (2, 4, 16), (65, 130), (5, 2560), (130, 3, 32)], ids=str)
def test_norms_equal_the_torch_versions(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_norms(shape, dtype, "cpu")


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 128), (63, 3, 16), (5, 33), (65, 1, 24)], ids=str)
def test_the_gated_norm_equals_the_torch_version(
    shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    check_gated_norm(shape, dtype, weight_dtype, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "size", "num_groups"), [(1, 8, 1), (33, 63, 3), (5, 1024, 8), (2, 2050, 1)])
def test_norm_of_gated_rows_equals_the_torch_version(
    num_rows: int, size: int, num_groups: int, dtype: torch.dtype
) -> None:
    check_norm_of_gated(num_rows, size, num_groups, dtype, "cpu")


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_nan_stays_nan_behind_a_squared_relu() -> None:
    x_TO = torch.tensor([[torch.nan, torch.inf, -torch.inf, -3.0, 3.0]])
    expected_TO = torch.tensor([[torch.nan, torch.inf, 0.0, 0.0, 9.0]])
    torch.testing.assert_close(activation_triton.relu_squared(x_TO), expected_TO, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 7), (63, 64), (3, 1025), (130, 16)])
def test_gates_equal_the_torch_versions(num_rows: int, size: int, dtype: torch.dtype) -> None:
    check_gates(num_rows, size, dtype, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "size"), [(0, 128), (1, 40), (3, 300), (5, 1024), (2, 2100)])
def test_quantising_norms_equal_quantising_afterwards(num_rows: int, size: int, dtype: torch.dtype) -> None:
    check_quantized_norms(num_rows, size, dtype, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 128), (2, 3, 256), (5, 4, 96), (1, 1, 1024)], ids=str)
def test_quantising_gated_norm_equals_quantising_afterwards(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_quantized_gated_norm(shape, dtype, "cpu")


def test_inputs_of_more_dimensions_or_with_strided_features_are_taken() -> None:
    x = torch.randn(2, 3, 4, 16)
    weight_D = torch.randn(16)
    near(norm_triton.rms_norm_zero_centered(x, weight_D, EPS), norm.rms_norm_zero_centered.reference(x, weight_D, EPS))
    near(activation_triton.swiglu(x), activation.swiglu.reference(x))
    x_TD = torch.randn(16, 5).t()
    expected_TD = norm.rms_norm_zero_centered.reference(x_TD, weight_D, EPS)
    near(norm_triton.rms_norm_zero_centered(x_TD, weight_D, EPS), expected_TD)


def test_norm_of_row_does_not_depend_on_other_rows() -> None:
    x, weight_D = torch.randn(9, 77).bfloat16(), torch.randn(77).bfloat16()
    all_TD = norm_triton.rms_norm_zero_centered(x, weight_D, EPS)
    assert torch.equal(all_TD[5:6], norm_triton.rms_norm_zero_centered(x[5:6], weight_D, EPS))
