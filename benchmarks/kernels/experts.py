"""Mixtures of experts, their routers and the products before them, at the shapes of published models.

Several layers' weights take turns. Tokens are random, so that every token chooses other experts; how many are chosen
in all is noted, and the floor is their bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from case import FLOPS, FLOPS_FP8, Launch, Work, bound, case, parse_launches, random, turns
from operands import (
    FORMATS,
    GROUPS,
    Experts,
    Projected,
    bind_norm,
    mixture_of_experts,
    num_bytes,
    random_weight,
    reference_mixture,
)
from torch import Tensor

from strandline.kernels.experts.few_launches import choose_dense
from strandline.kernels.experts.many_launches import choose_launches
from strandline.kernels.experts.router import Routing, route
from strandline.kernels.gemm.formats.launches import rows_launch
from strandline.kernels.gemm.linear import linear, linear_and_logits
from strandline.kernels.gemm.weights import DenseWeight
from strandline.kernels.launch import Launch as TileLaunch

MODULE = "experts.moe_triton"

TOKENS = (1, 2, 3, 4, 8, 16, 64, 256, 1024, 2048, 8192)


@dataclass(frozen=True)
class Model:
    """The experts of a model."""

    hidden: int
    num_experts: int
    size: int
    shared_size: int
    routing: Routing
    is_gated: bool = True
    is_shared_gated: bool = False

    @property
    def has_bias(self) -> bool:
        return self.routing.scores == "sigmoid"


QWEN = Model(2048, 256, 512, 512, Routing(8, is_normalised=True), is_shared_gated=True)
KIMI = Model(2304, 256, 1024, 1024, Routing(8, True, "sigmoid", 1e-20, 2.446))
NEMOTRON = Model(2688, 128, 1856, 3712, Routing(6, True, "sigmoid", 1e-20, 2.5), is_gated=False)
MODELS = {"qwen3.5-35b-a3b": QWEN, "kimi-linear-48b-a3b": KIMI}
MODELS["nemotron-3-nano-30b-a3b"] = NEMOTRON
TINY = Model(128, 4, 128, 128, Routing(2, is_normalised=True), is_shared_gated=True)

FEW_UPS = "1,512,1 1,1024,1 1,2048,1 2,512,1 2,1024,1 2,2048,1 4,512,1 2,512,2 2,1024,2 4,512,2 4,1024,2 2,1024,4"
FEW_UPS += " 2,2048,4 4,2048,2 8,512,2 8,2048,2 8,512,4 8,1024,4 8,2048,4 16,512,4 4,4096,4"
FEW_DOWNS = "4,4,1 1,1,1 1,2,1 2,1,1 2,2,1 2,4,1 4,2,1 4,8,1 8,4,1 8,8,1 16,8,1 1,4,1"
FEW_DOWNS += " 1,1,2 1,1,4 1,2,4 2,2,2 2,4,2 2,4,4 4,4,2 4,8,2"
"""Outputs, inputs and warps of a program of the first product; outputs, warps and tiles of one of the second."""

DENSE_SMALL = (
    "16,16,128,4,4 16,16,256,4,3 16,32,64,4,5 16,32,128,4,3 16,32,128,4,4 16,32,128,4,6 16,32,256,4,3 16,64,64,4,4 "
    "16,64,128,4,3 16,64,128,8,4",
    "16,32,128,4,4 16,32,256,4,2 16,64,64,4,4 16,64,128,4,3 16,64,128,4,4 16,64,256,4,2 16,128,64,4,4 16,128,128,8,3",
)
DENSE_LARGE = (
    "32,64,64,4,4 64,64,64,4,3 64,64,64,4,4 64,128,64,4,3 64,128,64,8,4 128,64,64,4,3 128,64,64,8,4,2 "
    "128,128,64,8,3,2 128,128,64,8,4 128,128,64,8,4,2 128,128,64,8,4,3 128,128,64,8,4,4",
    "32,128,64,4,4 64,128,64,4,4 64,256,64,8,3 128,128,64,4,3,2 128,128,64,8,4,2 128,256,64,8,3 128,256,64,8,3,2",
)
FP8_SMALL = (
    "16,128,128,4,2 16,128,128,4,3 16,128,128,8,3 16,128,128,4,4 16,128,128,4,5 16,128,128,8,2 16,128,128,8,4 "
    "32,128,128,8,3",
    "16,64,128,4,3 16,64,128,4,4 16,64,128,4,5 16,128,128,4,2 16,128,128,4,3 16,128,128,4,4 16,128,128,4,5 "
    "16,128,128,8,3 16,128,128,8,4 32,128,128,4,4",
)
FP8_LARGE = (
    "64,128,128,8,3 64,128,128,4,3 64,128,128,4,2 64,128,128,8,2 128,128,128,8,2,2 128,128,128,8,3,2 128,128,128,8,4,2",
    "64,128,128,4,4 64,128,128,4,3 64,128,128,4,2 64,128,128,4,3,2 64,128,128,8,3 128,128,128,8,3,2 128,128,128,8,2,2",
)
INT4_TILES = "16,64,128,4,3 16,64,128,4,4 16,64,128,4,6 16,128,128,4,3 16,128,128,8,4 32,64,128,4,4 64,64,128,4,3"
INT4_TILES += " 64,64,128,4,4 64,64,128,4,3,2 64,128,128,8,3"
INT4_TILES += " 64,128,128,8,3,2 128,64,128,8,3 128,64,128,8,3,2 128,128,128,8,2 128,128,128,8,3"
INT4_SIZES = ((INT4_TILES, INT4_TILES), (INT4_TILES, INT4_TILES))
"""Rows, features and inputs of a tile, warps, stages and programs that share an expert's choices."""


def make_experts(weight_format: str, model: Model, num_ranks: int, group: int) -> Experts:
    """Return one layer's experts, those of the first rank."""
    num_held = model.num_experts // num_ranks
    weight = partial(random_weight, weight_format, group=group)
    return Experts(
        weight(num_held, (1 + model.is_gated) * model.size, model.hidden),
        weight(num_held, model.hidden, model.size),
        weight(model.hidden, model.shared_size),
        model.routing,
        random(model.num_experts, scale=model.num_experts**-0.5, dtype=torch.float32) if model.has_bias else None,
        model.is_gated,
        None if num_ranks == 1 else range(num_held),
    )


def make_projected(model: Model, tokens: int) -> Projected:
    """Return random products of tokens, columns of one tensor if the router computes in their dtype."""
    sizes = [(1 + model.is_gated) * model.shared_size, model.num_experts, 1, 7]
    if model.has_bias:
        return random(tokens, sizes[0]), random(tokens, sizes[1], dtype=torch.float32), None
    shared_TS, logits_TE, gate_T1, _ = random(tokens, sum(sizes)).split(sizes, dim=-1)
    return shared_TS, logits_TE, gate_T1


def mixture(weight_format: str, model: Model, tokens: int, ranks: int = 1, group: int = 128) -> Work:
    """Return the mixture of experts of one format; of the first rank's experts alone, where there are several."""
    layers = [make_experts(weight_format, model, ranks, group) for _ in range(turns(1, at_most=3))]
    x: Any = random(tokens, model.hidden)
    if weight_format == "fp8":
        x = bind_norm(weight_format, random(model.hidden))(x)
    arguments = [(x, make_projected(model, tokens), layer) for layer in layers]
    experts_TK = bound(route)(arguments[0][1][1], layers[0].bias_E, model.routing)[1]
    held_A = experts_TK[experts_TK < model.num_experts // ranks]
    num_chosen, num_choices = len(held_A.unique()), held_A.numel()
    first = layers[0]
    expert_bytes = (num_bytes(first.up) + num_bytes(first.down)) * ranks / model.num_experts
    variants: dict[str, Any] = {
        "strandline": mixture_of_experts(),
        "deterministic": mixture_of_experts(is_deterministic=True),
    }
    reference = reference_mixture()
    if not model.is_gated:
        # The shared expert's products are overwritten: a copy comes first.
        variants = {name: partial(with_copy, mix) for name, mix in variants.items()}
        reference = partial(with_copy, reference)
    if weight_format == "dense" and model.is_gated and ranks == 1:
        variants["torch grouped_mm"] = partial(grouped_in_torch, model, bound(route))
    num_weights = (2 + model.is_gated) * model.size * num_choices + model.shared_size * tokens
    return Work(
        variants,
        arguments,
        num_bytes=num_chosen * expert_bytes + num_bytes(first.shared_down),
        num_flops=2.0 * model.hidden * num_weights,
        flops_per_s=FLOPS_FP8 if weight_format == "fp8" else FLOPS,
        reference=reference,
        # Hidden features of quantised weights are rounded, some of them in another way.
        limit=3e-2 if weight_format == "fp8" else 1e-2,
        before=None if model.is_gated else lambda _, projected, __: projected[0].clone(),
        peers={"torch grouped_mm"},
        launches=partial(launches, weight_format, model, tokens),
        notes={"experts chosen": num_chosen, "choices": num_choices},
    )


def with_copy(mix: Any, shared_TS: Tensor, x: Any, projected: Projected, layer: Experts) -> Tensor:
    """Compute a mixture with other products of the shared expert."""
    out: Tensor = mix(x, (shared_TS, *projected[1:]), layer)
    return out


def grouped_in_torch(model: Model, choose: Any, x_TD: Tensor, projected: Projected, layer: Experts) -> Tensor:
    """Do the same by torch's grouped product, a sort, and passes between."""
    shared_TS, logits_TE, gate_T1 = projected
    weights_TK, experts_TK = choose(logits_TE, layer.bias_E, model.routing)
    expert_A, order_A = experts_TK.flatten().sort()
    expert_E = torch.arange(model.num_experts, device=x_TD.device)
    ends_E = torch.searchsorted(expert_A, expert_E, right=True).to(torch.int32)
    grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm
    up_EDF, down_EFD = layer.up.values_OI.transpose(1, 2), layer.down.values_OI.transpose(1, 2)
    gate_AF, up_AF = grouped_mm(x_TD[order_A // model.routing.top_k], up_EDF, offs=ends_E).chunk(2, dim=-1)
    out_AD = grouped_mm(F.silu(gate_AF) * up_AF, down_EFD, offs=ends_E)
    choice_AD = torch.empty_like(out_AD)
    choice_AD[order_A] = out_AD
    out_TD = torch.einsum("tk,tkd->td", weights_TK.to(x_TD.dtype), choice_AD.unflatten(0, experts_TK.shape))
    gate, up = shared_TS.chunk(2, dim=-1)
    assert isinstance(layer.shared_down, DenseWeight)
    shared_TD = F.linear(F.silu(gate) * up, layer.shared_down.values_OI)
    return out_TD + (shared_TD if gate_T1 is None else shared_TD * gate_T1.sigmoid())


def launches(weight_format: str, model: Model, tokens: int) -> Iterator[Launch]:
    """Yield the tilings that make sense for a number of tokens."""
    format, sizes = FORMATS[weight_format], {"dense": (DENSE_SMALL, DENSE_LARGE), "fp8": (FP8_SMALL, FP8_LARGE)}
    measured = format.launches.experts
    if tokens <= 16:
        yield from few_launches(weight_format, model, tokens)
    load = tokens * model.routing.top_k // model.num_experts
    ups, downs = (
        [tile._replace(is_halved=weight_format == "dense" and tile.block_m >= 128) for tile in tiles]
        for tiles in (parse_launches(TileLaunch, text) for text in sizes.get(weight_format, INT4_SIZES)[load >= 16])
    )
    in_force = choose_launches(format, torch.bfloat16, load, is_gated=model.is_gated)
    pairs = {"decode": measured.decode, "middle": measured.middle, "prefill": measured.prefill}
    pairs |= {f"up {tuple(up)}": (up, in_force[1]) for up in ups}
    pairs |= {f"down {tuple(down)}": (in_force[0], down) for down in downs}
    for name, pair in pairs.items():
        yield Launch(name, {f"{MODULE}.choose_launches": pair, f"{MODULE}.MAX_TOKENS_FEW": 0})


def sizes_of(*sizes: int | None) -> tuple[Any, ...]:
    return sizes


def few_launches(weight_format: str, model: Model, tokens: int) -> Iterator[Launch]:
    """Yield tilings of the way of few tokens: first products before the second one in force, then second products."""
    if weight_format == "dense":
        sizes = (model.routing.top_k, model.size, model.shared_size)
        chosen = choose_dense(tokens, *sizes, is_gated=model.is_gated)
    else:
        of_format = FORMATS[weight_format].launches.few_experts
        chosen = None if of_format is None else of_format[tokens > 1]
    if chosen is None:
        return
    up, down = chosen
    ups = [(launch, down) for launch in parse_launches(rows_launch, FEW_UPS)]
    downs = [(up, down._replace(block_n=n, warps=w, blocks=b or 1)) for n, w, b in parse_launches(sizes_of, FEW_DOWNS)]
    for pair in [chosen, *ups, *downs]:
        tried = [(launch.block_n, launch.block_k, launch.warps, launch.blocks) for launch in pair]
        yield Launch(f"few {tried}", {f"{MODULE}.choose_few": pair, f"{MODULE}.MAX_TOKENS_FEW": 16})


TINY_SHAPE = {"model": TINY, "tokens": 2}
for _format in FORMATS:
    _axes: dict[str, Any] = {"group": GROUPS} if _format == "int4" else {}
    case(f"experts/{_format}", model=MODELS, tokens=TOKENS, **_axes, tiny=TINY_SHAPE)(partial(mixture, _format))
case(
    "experts-of-2-ranks",
    model={"qwen3.5-35b-a3b": QWEN},
    tokens=TOKENS[:6],
    ranks=(2,),
    tiny={**TINY_SHAPE, "ranks": 2},
)(partial(mixture, "dense"))


@case("router", model=MODELS, tokens=TOKENS, tiny=TINY_SHAPE)
def router(model: Model, tokens: int) -> Work:
    """Return the choice of experts."""
    arguments = []
    for _ in range(turns(1, at_most=3)):
        bias_E = random(model.num_experts, scale=model.num_experts**-0.5, dtype=torch.float32)
        logits_TE = make_projected(model, tokens)[1]
        arguments.append((logits_TE, bias_E if model.has_bias else None, model.routing))
    variants = {"strandline": bound(route), "torch": route.reference}
    return Work(variants, arguments, reference=route.reference, peers={"torch"})


@case("linear-and-logits", model={"nemotron-3-nano-30b-a3b": NEMOTRON}, tokens=TOKENS, tiny=TINY_SHAPE)
def projections(model: Model, tokens: int) -> Work:
    """Return the products with a shared expert's first weight and with a float32 router, in one operation or in two."""
    make = partial(random, scale=model.hidden**-0.5)
    x_TD, count = random(tokens, model.hidden), turns(2.0 * model.hidden * model.shared_size, at_least=3)
    arguments = [
        (
            x_TD,
            DenseWeight(make(model.shared_size, model.hidden)),
            None,
            DenseWeight(make(model.num_experts, model.hidden, dtype=torch.float32)),
            torch.float32,
        )
        for _ in range(count)
    ]
    multiply = bound(linear)
    variants = {
        "strandline": bound(linear_and_logits),
        "deterministic": bound(linear_and_logits, is_deterministic=True),
        "apart": lambda x, up, _, router, __: (multiply(x, up), F.linear(x.float(), router.values_OI)),
        "logits in torch": lambda x, _, __, router, ___: F.linear(x.float(), router.values_OI),
    }
    return Work(
        variants,
        arguments,
        num_bytes=model.hidden * (2.0 * model.shared_size + 4 * model.num_experts),
        num_flops=2.0 * tokens * model.hidden * (model.shared_size + model.num_experts),
        reference=linear_and_logits.reference,
        partial={"logits in torch"},
        peers={"apart"},
        launches=pair_launches,
    )


def pair_launches() -> Iterator[Launch]:
    for launch in parse_launches(rows_launch, "1,512,2 1,1024,2 1,1024,4 2,512,2 2,1024,4 1,4096,4 1,256,1 1,2048,8"):
        pair = {f"gemm.gemms_triton.{name}": launch for name in ("LOGITS_PAIR", "LOGITS")}
        yield Launch(str(tuple(launch)), pair)
