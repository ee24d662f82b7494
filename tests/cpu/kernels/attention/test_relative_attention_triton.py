"""Relative attention in Triton equals its definition, and sees nothing but the sequence's own tokens.

``check`` runs on any device: tests/gpu runs it at a model's shape. Memory that no sequence owns is NaN.

Shape suffixes as in ``kernels/attention/relative_attention.py``.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strandline.ids import BLOCK_TOKENS
from strandline.kernels.attention.attention_splits import DecodePlan
from strandline.kernels.attention.relative_attention import RelativeScores
from strandline.kernels.batch import KVMemory
from strandline.kernels.gpu import GPUS, standing_for
from strandline.kernels.operation import Launches
from tests.cpu.kernels.attention.test_attention import Case, decodes, make_case
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.attention import attention_splits, attention_triton
from tests.cpu.kernels.attention.test_attention_triton import TOLERANCES, attend_prefix, error, to_device

SCALE = 0.3


@dataclass(frozen=True)
class RelativeCase:
    """A step, and what its queries add to their scores."""

    step: Case
    relative: RelativeScores
    window_tokens: int | None = None

    def oracle(self) -> Tensor:
        """Return what a softmax over each row's scores gives, in float64."""
        step, outs, (mix_THC, _, sinks_TH) = self.step, [], self.relative
        if sinks_TH is None:
            sinks_TH = torch.full(mix_THC.shape[:2], -torch.inf)
        rows = iter(zip(self.step.q_THD, mix_THC, sinks_TH, strict=True))
        heads_per_key, profiles_CX = step.q_THD.shape[1] // step.keys[0].shape[1], self.relative.profiles_CX.double()
        for (start, end), *both in zip(step.ranges, step.keys, step.values, strict=True):
            k_LHD, v_LHD = (x.double().repeat_interleave(heads_per_key, 1) for x in both)
            for position in range(start, end):
                first = 0 if self.window_tokens is None else max(0, position - self.window_tokens + 1)
                q_HD, mix_HC, sink_H = (x.double() for x in next(rows))
                score_LH = torch.einsum("hd,lhd->lh", q_HD, k_LHD[first : position + 1]) * SCALE
                added_XH = (mix_HC @ profiles_CX[:, : len(score_LH)]).T
                score_LH[len(score_LH) - len(added_XH) :] += added_XH.flip(0)
                weight_LH = torch.cat((score_LH, sink_H[None])).softmax(0)[:-1]
                outs.append(torch.einsum("lh,lhd->hd", weight_LH, v_LHD[first : position + 1]))
        return torch.stack(outs)

    def run(self, device: str, launches: Launches = Launches.MEASURED) -> Tensor:
        """Return what the kernels give."""
        moved = to_device(self.step, device)
        relative = RelativeScores(*(x if x is None else x.to(device) for x in self.relative))
        with poisoned_memory():
            return attention_triton.relative_attention(
                moved.q_THD, relative, moved.memory, moved.batch, moved.num_decodes,
                scale=SCALE, window_tokens=self.window_tokens, launches=launches,
            )  # fmt: skip


def make_relative(
    step: Case,
    num_distances: int,
    window_tokens: int | None = None,
    num_profiles: int = 3,
    *,
    has_sinks: bool = False,
) -> RelativeCase:
    """Add random factors and maybe sinks, as parts of wider rows, and profiles to a step."""
    num_tokens, num_heads, _ = step.q_THD.shape
    wide = torch.full((num_tokens, num_heads, num_profiles + 2), torch.nan).to(step.q_THD.dtype)
    wide[..., :num_profiles] = torch.randn(num_tokens, num_heads, num_profiles)
    profiles_CX = torch.randn(num_profiles, num_distances).to(step.q_THD.dtype)
    wide_sinks = (2 * torch.randn(num_tokens, num_heads + 3)).to(step.q_THD.dtype)
    sinks_TH = wide_sinks[:, 1 : num_heads + 1] if has_sinks else None
    return RelativeCase(step, RelativeScores(wide[..., :num_profiles], profiles_CX, sinks_TH), window_tokens)


def check(case: RelativeCase, device: str) -> None:
    actual = case.run(device)
    assert actual.dtype == case.step.q_THD.dtype
    assert error(actual, case.oracle()) < TOLERANCES[case.step.q_THD.dtype]


@pytest.mark.parametrize(("num_distances", "window_tokens"), [(30, None), (200, None), (1, None), (70, 70), (9, 30)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mixed_steps_equal_the_definition(num_distances: int, window_tokens: int | None, dtype: torch.dtype) -> None:
    ranges = [*decodes(1, 65, 200), (0, 20), (60, 140), (0, 1), (64, 129)]
    step = make_case(ranges, 3, heads=(2, 3, 16), dtype=dtype, window_tokens=window_tokens)
    check(make_relative(step, num_distances, window_tokens, has_sinks=num_distances != 200), "cpu")


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 2.0)])
def test_distances_add_the_same_to_scores_of_e4m3_keys(scales: tuple[float, float]) -> None:
    step = make_case([*decodes(130), (60, 75)], 1, heads=(1, 2, 16), scales=scales)
    check(make_relative(step, 40), "cpu")


@pytest.mark.parametrize("num_splits", [1, 3])
def test_the_result_does_not_depend_on_the_splits(monkeypatch: pytest.MonkeyPatch, num_splits: int) -> None:
    monkeypatch.setattr(attention_triton, "plan_decodes", lambda *_, **__: DecodePlan(num_splits, 0))
    monkeypatch.setattr(attention_splits, "num_prefill_splits", lambda *_: num_splits)
    check(make_relative(make_case([*decodes(200, 3), (60, 75)], 2, heads=(1, 2, 8)), 90, has_sinks=True), "cpu")


@pytest.mark.parametrize("num_distances", [1, 40, 64, 65])
def test_prefixes_beyond_all_distances_are_attended_to_before(
    monkeypatch: pytest.MonkeyPatch, num_distances: int
) -> None:
    monkeypatch.setattr(attention_triton, "supports", lambda *_: True)
    monkeypatch.setattr(attention_triton, "attend_prefix", attend_prefix)
    monkeypatch.setattr(attention_triton, "_is_prefix_kernel_correct", lambda *_: True)
    monkeypatch.setattr(attention_triton, "MIN_PREFIX_QUERIES", 3)
    monkeypatch.setattr(attention_triton, "MIN_PREFIX_BLOCKS", 1)
    step = make_case([(128, 135), (150, 170)], heads=(2, 3, 16))
    check(make_relative(step, num_distances, has_sinks=num_distances > 40), "cpu")


@settings(max_examples=15, deadline=None)
@given(
    ranges=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 9)), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1, 4), (2, 2, 12), (1, 5, 16)]),
    num_distances=st.integers(1, 170),
    most_rows=st.sampled_from([None, 9]),
)
def test_short_prefills_anywhere_equal_the_definition(
    ranges: list[tuple[int, int]], heads: tuple[int, int, int], num_distances: int, most_rows: int | None
) -> None:
    step = make_case([(start, start + count) for start, count in ranges], heads=heads)
    step = replace(step, batch=replace(step.batch, most_rows=most_rows))
    check(make_relative(step, num_distances, num_profiles=17), "cpu")


@pytest.mark.usefixtures("rows_alike")
def test_deterministic_bits_do_not_depend_on_cuts_of_prompts() -> None:
    whole = make_relative(make_case([(0, 150)], heads=(1, 2, 8)), 50, has_sinks=True)
    expected_THD, q_THD, (mix_THC, _, sinks_TH) = whole.run("cpu", Launches.FIXED), whole.step.q_THD, whole.relative
    for start, end in ((0, 37), (37, 101), (101, 150)):
        batch = replace(
            whole.step.batch,
            query_starts=(0, end - start),
            context_lens=(end,),
            query_starts_N1=torch.tensor([0, end - start]),
            context_lens_N=torch.tensor([end]),
        )
        part = RelativeCase(
            replace(whole.step, q_THD=q_THD[start:end], batch=batch),
            whole.relative._replace(mix_THC=mix_THC[start:end], sinks_TH=sinks_TH[start:end]),
        )
        assert torch.equal(part.run("cpu", Launches.FIXED), expected_THD[start:end])


def test_prefills_take_the_tile_that_fits() -> None:
    q_THD = torch.empty(70, 64, 128, dtype=torch.bfloat16, device="meta")
    relative = RelativeScores(q_THD[..., :16], q_THD[0, :16, :100])
    memory = KVMemory(*(torch.empty(3, BLOCK_TOKENS, 8, 128, dtype=torch.bfloat16, device="meta") for _ in range(2)))
    batch = make_case([(0, 70)]).batch
    call = attention_triton._Call(q_THD, memory, batch, torch.empty_like(q_THD), SCALE, None, relative=relative)
    with standing_for(GPUS["sm_90"]):
        assert (call.prefill_tile, call.span(call.prefill_tile)) == (attention_triton.RELATIVE_PREFILL_TILE, 64)
    with standing_for(GPUS["sm_120"]):
        assert call.prefill_tile == attention_triton.RELATIVE_PREFILL_TILE
