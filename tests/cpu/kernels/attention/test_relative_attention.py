"""Relative attention over blocks against its definition, in steps of any kind; other memory is NaN.

Shape suffixes as in ``kernels/attention/relative_attention.py``.
"""

import pytest
import torch
from torch import Tensor

from strandline.ids import BLOCK_TOKENS
from strandline.kernels.attention import relative_attention as relative_attention_module
from strandline.kernels.attention.qkv import write_kv
from strandline.kernels.attention.relative_attention import RelativeScores, relative_attention
from strandline.kernels.batch import KVMemory
from tests.cpu.kernels.attention.test_latent_attention import make_batch

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_PROFILES, SCALE = 4, 2, 8, 3, 0.4
TABLES = [[4, 2, 7], [5, 1, 0]]

TOLERANCE = 2e-6
"""Sums of at most some 100 products of numbers around 1, divided by their own scale."""

Tokens = tuple[Tensor, ...]
"""Queries, factors of profiles, keys, values and sinks of some tokens."""


def random_tokens(count: int) -> Tokens:
    shapes = ((NUM_HEADS, HEAD_DIM), (NUM_HEADS, NUM_PROFILES), *[(NUM_KV_HEADS, HEAD_DIM)] * 2, (NUM_HEADS,))
    return tuple(torch.randn(count, *shape) for shape in shapes)


def by_definition(tokens: Tokens, profiles_CX: Tensor, window_tokens: int | None, *, has_sinks: bool) -> Tensor:
    """Return the output of one whole sequence, score by score."""
    q_THD, mix_THC, k_TGD, v_TGD, sinks_TH = tokens
    k_THD, v_THD = (x.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1) for x in (k_TGD, v_TGD))
    out = []
    for t in range(len(q_THD)):
        first = 0 if window_tokens is None else max(0, t - window_tokens + 1)
        score_LH = (q_THD[t] * k_THD[first : t + 1]).sum(-1) * SCALE
        for distance in range(min(t + 1 - first, profiles_CX.shape[1])):
            score_LH[t - distance - first] += mix_THC[t] @ profiles_CX[:, distance]
        if has_sinks:
            score_LH = torch.cat((score_LH, sinks_TH[None, t]))
        out.append((score_LH.softmax(0)[: t + 1 - first].unsqueeze(-1) * v_THD[first : t + 1]).sum(0))
    return torch.stack(out)


@pytest.mark.parametrize("bounds", [[100], [1, 63, 64, 65, 100]])
@pytest.mark.parametrize(("num_distances", "window_tokens"), [(30, None), (200, None), (20, 20), (9, 30)])
def test_steps_of_any_size_equal_the_definition(
    bounds: list[int], num_distances: int, window_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_sinks = num_distances in (20, 30)
    monkeypatch.setattr(relative_attention_module, "MAX_SCORES", 3000)  # a few queries at a time
    both, profiles_CX = (random_tokens(100), random_tokens(70)), torch.randn(NUM_PROFILES, num_distances)
    expected = [by_definition(tokens, profiles_CX, window_tokens, has_sinks=has_sinks) for tokens in both]
    memory = KVMemory(*torch.full((2, 10, BLOCK_TOKENS, NUM_KV_HEADS, HEAD_DIM), torch.nan))
    start = 0
    for end in bounds:
        ranges = [(start, end), (0, 70)]
        q, mix, k, v, sinks = (
            torch.cat([x[slice(*rows)] for x, rows in zip(xs, ranges, strict=True)]) for xs in zip(*both, strict=True)
        )
        batch = make_batch(TABLES, ranges)
        write_kv(k, v, memory, batch)
        options = {"scale": SCALE, "window_tokens": window_tokens}
        relative = RelativeScores(mix, profiles_CX, sinks if has_sinks else None)
        out_THD = relative_attention.reference(q, relative, memory, batch, 0, **options)
        wanted = torch.cat([whole[slice(*rows)] for whole, rows in zip(expected, ranges, strict=True)])
        torch.testing.assert_close(out_THD, wanted, rtol=0, atol=TOLERANCE)
        start = end


def test_scales_multiply_stored_keys_and_values() -> None:
    (q, mix, *_), profiles_CX, batch = random_tokens(70), torch.randn(NUM_PROFILES, 30), make_batch(TABLES, [(0, 70)])
    k, v = torch.randn(2, 10, BLOCK_TOKENS, NUM_KV_HEADS, HEAD_DIM).to(torch.float8_e4m3fn)
    memories = KVMemory(k, v, 0.5, 3.0), KVMemory(k.float() * 0.5, v.float() * 3.0)
    relative = RelativeScores(mix, profiles_CX)
    found, expected = (relative_attention.reference(q, relative, x, batch, 0, scale=SCALE) for x in memories)
    torch.testing.assert_close(found, expected, rtol=0, atol=3 * TOLERANCE)
