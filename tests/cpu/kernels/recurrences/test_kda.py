"""Kimi Delta Attention against transformers, and where decays are strong. Shape suffixes as in ``kda.py``."""

import pytest
import torch
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

from strandline.kernels.batch import Slots
from strandline.kernels.chunk_table import build_chunk_table
from strandline.kernels.recurrences.kda import KimiDeltaInputs, gates, kda_prefill, kda_recurrent_reference

HEADS, KEY_DIM, VALUE_DIM = 3, 8, 12


def random_inputs(num_tokens: int, lower_bound: float | None = None) -> KimiDeltaInputs:
    by_key = (num_tokens, HEADS, KEY_DIM)
    return KimiDeltaInputs(
        torch.randn(by_key),
        torch.randn(by_key),
        torch.randn(num_tokens, HEADS, VALUE_DIM),
        torch.randn(by_key),
        torch.randn(num_tokens, HEADS),
        torch.empty(HEADS).uniform_(0.001, 4).log(),
        torch.randn(HEADS, KEY_DIM),
        lower_bound,
    )


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_prefill_equals_transformers(lower_bound: float | None) -> None:
    inputs = random_inputs(150, lower_bound)
    state_SHKV = torch.randn(3, HEADS, KEY_DIM, VALUE_DIM)
    log_decay_THK, beta_TH = gates(inputs)
    expected_BTHV, expected_BHKV = recurrent_kimi_delta_attention(
        inputs.q_THK[None],
        inputs.k_THK[None],
        inputs.v_THV[None],
        g=log_decay_THK[None],
        beta=beta_TH[None],
        initial_state=state_SHKV[1:2],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    slots, table = Slots(torch.tensor([1]), torch.tensor([2])), build_chunk_table([(0, 150)], [()])
    out_THV = kda_prefill.reference(inputs, state_SHKV, slots, table)
    torch.testing.assert_close(out_THV, expected_BTHV[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state_SHKV[2], expected_BHKV[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("f", [-200.0, 20.0, 3e4, torch.inf])
def test_extreme_gates_keep_the_decay_between_0_and_1(f: float) -> None:
    inputs, slots = random_inputs(150), Slots(torch.tensor([1]), torch.tensor([2]))
    inputs.f_THK[::7, :, ::3] = f
    state_SHKV = torch.randn(3, HEADS, KEY_DIM, VALUE_DIM)
    expected_THV, expected_HKV = kda_recurrent_reference(inputs, state_SHKV[1].clone())
    out_THV = kda_prefill.reference(inputs, state_SHKV, slots, build_chunk_table([(5, 155)], [()]))
    torch.testing.assert_close(out_THV, expected_THV, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state_SHKV[2], expected_HKV, rtol=1e-4, atol=1e-4)


def test_bounded_decays_are_those_of_transformers() -> None:
    inputs = random_inputs(20, -5.0)
    config = Glm5NextTextConfig(linear_num_heads=HEADS, linear_head_dim=KEY_DIM, linear_lower_bound=inputs.lower_bound)
    gate = Glm5NextTextForgetGate(config).requires_grad_(False)
    gate.f_a_proj, gate.f_b_proj = torch.nn.Identity(), torch.nn.Identity()
    gate.A_log.copy_(inputs.A_log_H)
    gate.dt_bias.copy_(inputs.dt_bias_HK.flatten())
    log_decay_THK, _ = gates(inputs)
    torch.testing.assert_close(log_decay_THK, gate(inputs.f_THK.flatten(1)[None])[0], rtol=1e-5, atol=1e-6)
    assert -5 <= float(log_decay_THK.min()) <= float(log_decay_THK.max()) <= 0
