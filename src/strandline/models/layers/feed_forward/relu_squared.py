"""Feed-forward layers without a gate, whose activation is a squared ReLU: dense, and a mixture of experts.

Source: ``transformers`` (``nemotron_h``); NVIDIA, "Nemotron 3 Nano" (the router is that of DeepSeek-V3).

Shape suffixes: T tokens of the step, E hidden size, L latent size, S intermediate size of the shared expert, X experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from strandline.kernels.binding import Kernels
from strandline.kernels.expert_choices import Summand, added_up
from strandline.kernels.experts.moe import RELU_SQUARED, SharedExpert
from strandline.kernels.experts.router import Routing
from strandline.kernels.gemm.linear import LINEAR_OPERATIONS, bind_linear_and_logits, linear_and_logits
from strandline.kernels.rowwise.activation import relu_squared
from strandline.kernels.rowwise.quantized_rows import Rows, plain_rows
from strandline.models.layers.feed_forward.experts import Experts, ExpertsConfig
from strandline.models.layers.parts.projection import Projection, SummedProjection
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, unused, whole


class ReluSquaredMlp(nn.Module):
    """A feed-forward layer without a gate, whose channels are divided among shards."""

    operations = (relu_squared,)

    def __init__(self, hidden_size: int, size: int, site: Site, *, has_bias: bool) -> None:
        super().__init__()
        size = site.shard.part_of(size, "channels between a feed-forward part's projections")
        self.up = Projection(size, hidden_size, site, has_bias=has_bias, shard=site.shard)
        self.down = SummedProjection(hidden_size, size, site, has_bias=has_bias)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._relu_squared = kernels[relu_squared]

    @property
    def takes_quantized(self) -> bool:
        """Whether it takes quantised rows."""
        return self.up.takes_quantized

    def forward(self, hidden_TE: Rows) -> Tensor:
        return self.down.multiply(self._relu_squared(self.up.multiply(hidden_TE)))

    def targets(self, prefix: str, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors."""
        del names  # always the same
        yield from self.up.targets(f"{prefix}up_proj.")
        yield from self.down.targets(f"{prefix}down_proj.")


@dataclass(frozen=True, slots=True)
class ReluSquaredMoeConfig:
    """Sizes of a mixture of experts, and its router."""

    hidden_size: int
    latent_size: int | None
    """Channels that experts read and write; None: the hidden state's."""
    size: int
    shared_size: int
    has_bias: bool
    """Whether all projections but those of experts and the router have a bias."""
    num_experts: int
    routing: Routing


class ReluSquaredMoe(nn.Module):
    """A mixture of experts without gates, beside one that every token takes.

    The router computes in float32. Where there is a latent, the experts read a projection of the hidden state, and
    their sum is projected back.

    Experts are divided among shards, and so are the shared expert's channels; all route every token.
    """

    operations = (relu_squared, linear_and_logits, *LINEAR_OPERATIONS)

    def __init__(self, config: ReluSquaredMoeConfig, site: Site) -> None:
        super().__init__()
        self.config = config
        hidden_size, num_experts, has_bias = config.hidden_size, config.num_experts, config.has_bias
        self.router = Projection(num_experts, hidden_size, site.in_dtype(torch.float32))
        self.bias_X = site.parameter(num_experts, dtype=torch.float32)
        latent_size = hidden_size if config.latent_size is None else config.latent_size
        self.to_latent = self.from_latent = None
        if config.latent_size is not None:
            self.to_latent = Projection(latent_size, hidden_size, site, has_bias=has_bias)
            is_added_here = has_bias and site.shard.is_first
            self.from_latent = Projection(hidden_size, latent_size, site, has_bias=is_added_here)
        sizes = (num_experts, latent_size, config.size)
        experts = ExpertsConfig(*sizes, config.routing, RELU_SQUARED)
        self.experts = Experts(experts, site)
        self.shared = ReluSquaredMlp(hidden_size, config.shared_size, site, has_bias=has_bias)

    @property
    def takes_quantized(self) -> bool:
        """Whether it takes quantised rows."""
        reader = self.experts if self.to_latent is None else self.to_latent
        return self.shared.takes_quantized or reader.takes_quantized

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._relu_squared, up, down = kernels[relu_squared], self.shared.up, self.shared.down
        self._project = bind_linear_and_logits(kernels, up.weight, up.bias_O, self.router.weight, torch.float32)
        self._down = down.weight

    def forward(self, hidden_TE: Rows) -> Summand:
        router, up, down = self.router, self.shared.up, self.shared.down
        if up.term is None and router.term is None:
            up_TS, logits_TX = self._project(hidden_TE)
        else:
            up_TS, logits_TX = up.multiply(hidden_TE), router.multiply(plain_rows(hidden_TE).float())
        if self.to_latent is None or self.from_latent is None:
            shared = SharedExpert(up_TS, self._down, None, down.term)
            out = self.experts.mix(hidden_TE, logits_TX, self.bias_X, shared)
            return out if down.bias_O is None else added_up(out).add_(down.bias_O)
        latent_TL = self.to_latent.multiply(hidden_TE)
        out_TE = self.from_latent.multiply(added_up(self.experts.mix(latent_TL, logits_TX, self.bias_X)))
        return out_TE.add_(down.multiply(self._relu_squared(up_TS)))

    def targets(self, prefix: str, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors; the experts come as one tensor, or as one each, whichever is in ``names``."""
        yield f"{prefix}gate.weight", whole(self.router.weight_OI)
        yield f"{prefix}gate.e_score_correction_bias", whole(self.bias_X)
        if self.to_latent is not None and self.from_latent is not None:
            yield from self.to_latent.targets(f"{prefix}fc1_latent_proj.")
            yield from self.from_latent.targets(f"{prefix}fc2_latent_proj.")
            if self.config.has_bias and self.from_latent.bias_O is None:
                yield f"{prefix}fc2_latent_proj.bias", unused(self.config.hidden_size)
        yield from self.shared.targets(f"{prefix}shared_experts.", names)
        yield from self.experts.targets(f"{prefix}experts.", names)
