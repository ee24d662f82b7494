"""Clips of heads in Triton equal the reference, which leaves short vectors as they are.

``check`` runs on any device: tests/gpu runs it at a model's heads.
"""

import pytest
import torch

from strandline.kernels.rowwise.head_clip import clip_heads

pytest.importorskip("triton")

from strandline.kernels.rowwise import head_clip_triton

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 0.02}
"""Relative; in bfloat16 a result is rounded twice, to either neighbour each."""


def check(num_heads: int, head_dim: int, dtype: torch.dtype, device: str, *, has_scale: bool, has_factor: bool) -> None:
    wide = torch.randn(7, num_heads, head_dim + 3, device=device).to(dtype)
    scale_HD = 1 + 0.3 * torch.randn(num_heads, head_dim, device=device).to(dtype) if has_scale else None
    factor_T = 1 + torch.rand(7, device=device) if has_factor else None
    arguments = (wide[..., 1 : head_dim + 1], 0.9 * head_dim**0.5, scale_HD, factor_T)
    found, expected = head_clip_triton.clip_heads(*arguments), clip_heads.reference(*arguments)
    assert found.dtype == expected.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("has_scale", "has_factor"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 6), (5, 16), (48, 128)])
def test_clips_equal_the_definition(
    num_heads: int, head_dim: int, has_scale: bool, has_factor: bool, dtype: torch.dtype
) -> None:
    check(num_heads, head_dim, dtype, "cpu", has_scale=has_scale, has_factor=has_factor)


def test_only_long_heads_are_shortened() -> None:
    x_THD = torch.tensor([[[3.0, 4.0], [30.0, 40.0], [0.0, 0.0]]])
    for version in (clip_heads.reference, head_clip_triton.clip_heads):
        clipped_THD = version(x_THD, 10.0)
        assert torch.equal(clipped_THD[:, ::2], x_THD[:, ::2])
        torch.testing.assert_close(clipped_THD[0, 1], torch.tensor([6.0, 8.0]))
