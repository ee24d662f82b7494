"""The training forward pass of the demo model: Qwen3.5's dense text architecture in plain, differentiable torch.

Parameters have the names and shapes of the published safetensors layout, so exporting is a cast and a save.
Tokens are flattened: every compiled region sees ``[B * T, hidden]`` and whole chunks of 64 tokens, never a row length,
so that rows of 256 and of 4,096 tokens share one compiled graph as long as ``B * T`` stays the same.

The gated delta rule is the chunked form of Yang et al., "Gated Delta Networks" (2024), section 3.3. Within a chunk
everything that does not depend on the incoming state is prepared for all chunks at once; what is left of the
recurrence is ``S' = M S + D`` per chunk with a 64 x 64 matrix ``M``.

Shape suffixes: N tokens (B * T), M chunks (N / 64), C tokens of a chunk, K key heads, R value heads per key head,
H value heads (K * R), D head size, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK_TOKENS = 64


@dataclass(frozen=True)
class Shape:
    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 8
    full_attention_interval: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 4
    linear_num_value_heads: int = 8
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.25
    rms_norm_eps: float = 1e-6

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.full_attention_interval == 0


class RMSNorm(nn.Module):
    """Zero-centred: the factor is ``1 + weight``."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).to(x.dtype)


class GatedRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = x.float()
        y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return (self.weight.to(x.dtype) * y * F.silu(gate.float())).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class UnitLowerInverse(torch.autograd.Function):
    """The inverse of ``I + strictly lower``; the gradient needs the inverse alone."""

    @staticmethod
    def forward(ctx: Any, strict_CC: Tensor) -> Tensor:
        eye = torch.eye(strict_CC.shape[-1], dtype=strict_CC.dtype, device=strict_CC.device)
        inverse: Tensor = torch.linalg.solve_triangular(
            strict_CC, eye.expand_as(strict_CC), upper=False, unitriangular=True
        )
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        inverse: Tensor
        (inverse,) = ctx.saved_tensors
        inverse_T = inverse.transpose(-1, -2)
        return -(inverse_T @ grad @ inverse_T).tril(-1)


class StateScan(torch.autograd.Function):
    """All states before each chunk of ``S' = M S + D``; ``[B, n, H, D, D]`` in, the same out, zeros first."""

    @staticmethod
    def forward(ctx: Any, factor: Tensor, update: Tensor) -> Tensor:
        states = torch.empty_like(update)
        batch, chunks, heads, dim, _ = update.shape
        factor_n, update_n = (x.transpose(0, 1).reshape(chunks, batch * heads, dim, dim) for x in (factor, update))
        state = torch.zeros_like(update_n[0])
        for n in range(chunks):
            states[:, n] = state.view(batch, heads, dim, dim)
            if n + 1 < chunks:
                state = torch.baddbmm(update_n[n], factor_n[n], state)
        ctx.save_for_backward(factor, states)
        return states

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        factor, states = ctx.saved_tensors
        batch, chunks, heads, dim, _ = states.shape
        factor_T = factor.transpose(0, 1).reshape(chunks, batch * heads, dim, dim).transpose(-1, -2)
        grad_n = grad.transpose(0, 1).reshape(chunks, batch * heads, dim, dim)
        grad_update = torch.empty_like(states)
        flow = torch.zeros_like(grad_n[0])
        for n in range(chunks - 1, -1, -1):
            grad_update[:, n] = flow.view(batch, heads, dim, dim)
            flow = torch.baddbmm(grad_n[n], factor_T[n], flow)
        return grad_update @ states.transpose(-1, -2), grad_update


class GatedDeltaNet(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        key_dim = shape.linear_num_key_heads * shape.linear_key_head_dim
        value_dim = shape.linear_num_value_heads * shape.linear_value_head_dim
        heads = shape.linear_num_value_heads
        conv_dim = 2 * key_dim + value_dim
        self.split = [key_dim, key_dim, value_dim]
        self.in_proj_qkv = nn.Linear(shape.hidden_size, conv_dim, bias=False)
        self.in_proj_z = nn.Linear(shape.hidden_size, value_dim, bias=False)
        self.in_proj_b = nn.Linear(shape.hidden_size, heads, bias=False)
        self.in_proj_a = nn.Linear(shape.hidden_size, heads, bias=False)
        self.conv1d = nn.Conv1d(conv_dim, conv_dim, shape.linear_conv_kernel_dim, groups=conv_dim, bias=False)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.norm = GatedRMSNorm(shape.linear_value_head_dim, shape.rms_norm_eps)
        self.out_proj = nn.Linear(value_dim, shape.hidden_size, bias=False)

    def convolve(self, x_NC: Tensor, positions_N: Tensor) -> Tensor:
        weight = self.conv1d.weight.to(x_NC.dtype)
        taps = weight.shape[-1]
        out = x_NC * weight[:, 0, taps - 1]
        for back in range(1, taps):
            shifted = F.pad(x_NC[:-back], (0, 0, back, 0)).masked_fill((positions_N < back)[:, None], 0.0)
            out = out + shifted * weight[:, 0, taps - 1 - back]
        return F.silu(out)

    def prepare(self, h_NE: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Everything that needs no state: ``o = out + query @ S`` and ``S' = factor @ S + update``, and the gate z."""
        s = self.shape
        mixed = self.convolve(self.in_proj_qkv(h_NE), positions_N)
        z = self.in_proj_z(h_NE)
        beta_NH = self.in_proj_b(h_NE).float().sigmoid()
        decay_NH = -self.A_log.float().exp() * F.softplus(self.in_proj_a(h_NE).float() + self.dt_bias.float())
        with torch.autocast(h_NE.device.type, enabled=False):
            q, k, v = mixed.float().split(self.split, dim=-1)
            kh, dim, rep = (
                s.linear_num_key_heads,
                s.linear_key_head_dim,
                s.linear_num_value_heads // s.linear_num_key_heads,
            )
            q_MKCD = l2norm(q.view(-1, CHUNK_TOKENS, kh, dim)).transpose(1, 2) * dim**-0.5
            k_MKCD = l2norm(k.view(-1, CHUNK_TOKENS, kh, dim)).transpose(1, 2)
            v_MKRCD = v.view(-1, CHUNK_TOKENS, kh, rep, s.linear_value_head_dim).permute(0, 2, 3, 1, 4)
            beta = beta_NH.view(-1, CHUNK_TOKENS, kh, rep).permute(0, 2, 3, 1)[..., None]
            total = decay_NH.view(-1, CHUNK_TOKENS, kh, rep).permute(0, 2, 3, 1).cumsum(-1)
            pair = total[..., :, None] - total[..., None, :]
            ones = torch.ones(CHUNK_TOKENS, CHUNK_TOKENS, dtype=torch.bool, device=h_NE.device)
            pair = pair.masked_fill(ones.triu(1), float("-inf")).exp()
            system = ((k_MKCD @ k_MKCD.transpose(-1, -2))[:, :, None] * pair * beta).tril(-1)
            inverse: Tensor = UnitLowerInverse.apply(system)  # type: ignore[no-untyped-call]
            grown = total.exp()[..., None]
            value = inverse @ (v_MKRCD * beta)
            read = inverse @ (k_MKCD[:, :, None] * (beta * grown))
            scores = (q_MKCD @ k_MKCD.transpose(-1, -2))[:, :, None] * pair
            query = q_MKCD[:, :, None] * grown - scores @ read
            out = scores @ value
            late_T = (k_MKCD[:, :, None] * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
            eye = torch.eye(dim, device=h_NE.device)
            factor = eye * total[..., -1].exp()[..., None, None] - late_T @ read
            update = late_T @ value
        return out.flatten(1, 2), query.flatten(1, 2), factor.flatten(1, 2), update.flatten(1, 2), z

    def finish(self, out: Tensor, query: Tensor, states: Tensor, z: Tensor) -> Tensor:
        with torch.autocast(z.device.type, enabled=False):
            out = out + query @ states
        o_NHD = out.transpose(1, 2).reshape(z.shape[0], -1, self.shape.linear_value_head_dim).to(z.dtype)
        projected: Tensor = self.out_proj(self.norm(o_NHD, z.view_as(o_NHD)).flatten(1))
        return projected


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        d, q, kv = shape.head_dim, shape.num_attention_heads, shape.num_key_value_heads
        self.q_proj = nn.Linear(shape.hidden_size, q * d * 2, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv * d, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv * d, bias=False)
        self.o_proj = nn.Linear(q * d, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(d, shape.rms_norm_eps)
        self.k_norm = RMSNorm(d, shape.rms_norm_eps)

    def rotate(self, x_NHD: Tensor, positions_N: Tensor) -> Tensor:
        rot = self.shape.rotary_dim
        steps = torch.arange(0, rot, 2, dtype=torch.float32, device=x_NHD.device)
        angle = positions_N.float()[:, None] * self.shape.rope_theta ** (-steps / rot)
        cos, sin = (torch.cat([f, f], dim=-1)[:, None].to(x_NHD.dtype) for f in (angle.cos(), angle.sin()))
        head, rest = x_NHD[..., :rot], x_NHD[..., rot:]
        rotated = torch.cat([-head[..., rot // 2 :], head[..., : rot // 2]], dim=-1)
        return torch.cat([head * cos + rotated * sin, rest], dim=-1)

    def prepare(self, h_NE: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        d = self.shape.head_dim
        q, gate = self.q_proj(h_NE).view(h_NE.shape[0], -1, 2 * d).chunk(2, dim=-1)
        k = self.k_norm(self.k_proj(h_NE).view(h_NE.shape[0], -1, d))
        v = self.v_proj(h_NE).view(h_NE.shape[0], -1, d)
        return self.rotate(self.q_norm(q), positions_N), self.rotate(k, positions_N), v, gate

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: int) -> Tensor:
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        q, k, v = (x.view(batch, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)


class Layer(nn.Module):
    def __init__(self, shape: Shape, attention: bool) -> None:
        super().__init__()
        self.shape = shape
        if attention:
            self.self_attn = Attention(shape)
        else:
            self.linear_attn = GatedDeltaNet(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def add_mlp(self, x_NE: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.post_attention_layernorm(x_NE))
        return x_NE + out


class DeltaLayer(Layer):
    def before(self, x_NE: Tensor, positions_N: Tensor) -> tuple[Tensor, ...]:
        return self.linear_attn.prepare(self.input_layernorm(x_NE), positions_N)

    def after(self, x_NE: Tensor, out: Tensor, query: Tensor, states: Tensor, z: Tensor) -> Tensor:
        return self.add_mlp(x_NE + self.linear_attn.finish(out, query, states, z))

    def forward(self, x_NE: Tensor, positions_N: Tensor, batch: int) -> Tensor:
        out, query, factor, update, z = self.before(x_NE, positions_N)
        rows = (batch, -1, *factor.shape[1:])
        with torch.autocast(x_NE.device.type, enabled=False):
            states = StateScan.apply(factor.view(rows), update.view(rows))  # type: ignore[no-untyped-call]
        return self.after(x_NE, out, query, states.flatten(0, 1), z)


class AttentionLayer(Layer):
    def before(self, x_NE: Tensor, positions_N: Tensor) -> tuple[Tensor, ...]:
        return self.self_attn.prepare(self.input_layernorm(x_NE), positions_N)

    def after(self, x_NE: Tensor, mixed_NHD: Tensor, gate: Tensor) -> Tensor:
        return self.add_mlp(x_NE + self.self_attn.o_proj((mixed_NHD * gate.sigmoid()).flatten(1)))

    def forward(self, x_NE: Tensor, positions_N: Tensor, batch: int) -> Tensor:
        q, k, v, gate = self.before(x_NE, positions_N)
        return self.after(x_NE, self.self_attn.attend(q, k, v, batch), gate)


class MTP(nn.Module):
    """Predicts token t + 2 from the final hidden state of t and the embedding of token t + 1."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList([AttentionLayer(shape, attention=True)])
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.pre_fc_norm_embedding = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.pre_fc_norm_hidden = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, hidden_NE: Tensor, next_NE: Tensor, positions_N: Tensor, batch: int) -> Tensor:
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(next_NE), self.pre_fc_norm_hidden(hidden_NE)], dim=-1))
        out: Tensor = self.norm(self.layers[0](x, positions_N, batch))
        return out


class Trunk(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        kinds = [shape.is_attention(i) for i in range(shape.num_hidden_layers)]
        self.layers = nn.ModuleList([(AttentionLayer if a else DeltaLayer)(shape, attention=a) for a in kinds])
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class DemoModel(nn.Module):
    """Maps ids ``[B, T]`` (T a multiple of 64) to final hidden states ``[B * T, E]``; the head is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.mtp = MTP(shape)

    def forward(self, ids_BT: Tensor) -> Tensor:
        batch, length = ids_BT.shape
        if length % CHUNK_TOKENS:
            raise ValueError(f"rows of {length} tokens; pad them to a multiple of {CHUNK_TOKENS}")
        positions_N = torch.arange(length, device=ids_BT.device).repeat(batch)
        x: Tensor = self.model.embed_tokens(ids_BT.flatten())
        for layer in self.model.layers:
            x = layer(x, positions_N, batch)
        out: Tensor = self.model.norm(x)
        return out

    def draft(self, hidden_NE: Tensor, next_ids_BT: Tensor) -> Tensor:
        """The MTP layer's hidden states; gradients stop at the trunk and the embedding."""
        batch, length = next_ids_BT.shape
        positions_N = torch.arange(length, device=next_ids_BT.device).repeat(batch)
        embedded = F.embedding(next_ids_BT.flatten(), self.model.embed_tokens.weight.detach())
        out: Tensor = self.mtp(hidden_NE.detach(), embedded, positions_N, batch)
        return out


def initialise(model: DemoModel, seed: int) -> None:
    """Draw weights: decay rates log-spaced from one token to a thousand, residual outputs small."""
    generator = torch.Generator().manual_seed(seed)
    residual = (2 * model.shape.num_hidden_layers) ** -0.5
    for name, p in model.named_parameters():
        if name.endswith("A_log"):
            p.data = torch.empty(p.shape).uniform_(1.0, 16.0, generator=generator).log()
        elif name.endswith("dt_bias"):
            dt = torch.exp(torch.empty(p.shape).uniform_(-6.9, -2.3, generator=generator))
            p.data = dt + torch.log(-torch.expm1(-dt))
        elif name.endswith("embed_tokens.weight"):
            p.data = torch.empty(p.shape).normal_(0.0, 0.02, generator=generator)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            p.data.fill_(0.5)
        elif "conv1d" in name:
            p.data = torch.empty(p.shape).uniform_(-0.5, 0.5, generator=generator)
        elif p.ndim == 2:
            scale = residual if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")) else 1.0
            p.data = torch.empty(p.shape).normal_(0.0, scale * 0.5 * p.shape[1] ** -0.5, generator=generator)
