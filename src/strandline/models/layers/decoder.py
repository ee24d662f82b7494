"""The decoder: embedding, layers on a normalised residual stream, final norm and output head.

Parameters need no gradient.

Shape suffixes: T tokens of the step, N rows whose logits are wanted, E hidden size, F frequencies, Z vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strandline.errors import EngineError
from strandline.kernels.arena import ArenaTensors, LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.collectives.rank_sums import bind_sum_add_norm
from strandline.kernels.expert_choices import Summand, added_up
from strandline.kernels.gemm.linear import Linear, bind_linear, linear
from strandline.kernels.gemm.weights import DenseWeight, Layout
from strandline.kernels.operation import Operation
from strandline.kernels.ranks import columns_of
from strandline.kernels.recurrences.recurrence import Recurrence, bind_folds
from strandline.kernels.rowwise.embedding import embed_held
from strandline.kernels.rowwise.norm import (
    add_rms_norm,
    add_rms_norm_zero_centered,
    rms_norm,
    rms_norm_zero_centered,
)
from strandline.kernels.rowwise.quantized_rows import plain_rows
from strandline.kernels.rowwise.quantizing import QUANTIZED, with_quantized
from strandline.kernels.rowwise.rotary import rotary_table
from strandline.models.layers.projection import Projection
from strandline.models.layers.protocol import ModelMemory
from strandline.models.layers.rotary import RotaryFrequencies, RotaryTable
from strandline.models.layers.site import Site, dtype_name
from strandline.models.layers.targets import NamedTargets, spanned, whole
from strandline.specs import LayerSpec, ModelSpec


class Mixer(Protocol):
    """The part of a layer that reads other tokens: attention, a recurrence."""

    @property
    def spec(self) -> LayerSpec:
        """Tensors that it keeps."""

    @property
    def recurrence(self) -> Recurrence[Any, Any] | None:
        """Recurrence that folds its log; None: it keeps no log."""

    def bind(self, memory: LayerMemory) -> Any:
        """Return the layer's memory as a call takes it."""

    def __call__(self, hidden_TE: Any, rotary: RotaryTable | None, batch: StepBatch, memory: Any) -> Tensor:
        """Mix the step's tokens, and advance the memory; takes quantised rows if ``takes_quantized`` is set."""


FeedForward = Callable[[Any], Summand]
"""The part of a layer that works on each token separately; takes quantised rows if ``takes_quantized`` is set."""


@dataclass(frozen=True, slots=True)
class ResidualNorm:
    """How a family normalises its residual stream."""

    norm: Operation[[Tensor, Tensor, float], Tensor]
    """Normalises the stream, given a weight and ``eps``."""
    add_norm: Operation[[Summand, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    """Adds a part's output to the stream and normalises it, given a weight and ``eps``; also returns the new stream."""
    eps: float
    weight: Callable[..., Tensor]
    """Creates the weight of a norm, given a site and a size: ``gain``, or ``parameter`` if it is added to 1."""


def plain(eps: float) -> ResidualNorm:
    """Return the RMS norm whose weight multiplies the rounded result."""
    return ResidualNorm(rms_norm, add_rms_norm, eps, Site.gain)


def zero_centered(eps: float) -> ResidualNorm:
    """Return the RMS norm whose weight is added to 1."""
    return ResidualNorm(rms_norm_zero_centered, add_rms_norm_zero_centered, eps, Site.parameter)


class ReplayingMixer(Mixer, Protocol):
    """A mixer with states that can be replayed, as described by its spec."""

    def replay(self, batch: StepBatch, memory: Any) -> None:
        """Advance the states over logged tokens alone; the batch has no rows of its own."""


class DecoderLayer(nn.Module):
    """A mixer, a feed-forward part, or one and then the other, each on the normalised residual stream.

    A part's result is a summand, which the norm behind it sums over all ranks, or this layer does (``leaves_sum``).

    Args:
        mixer: a module; None: the layer has none.
        mlp: a module; None: the layer has none.
        multiplier: of what a part adds to the stream.
    """

    def __init__(
        self,
        mixer: Mixer | None,
        mlp: FeedForward | None,
        norm: ResidualNorm,
        hidden_size: int,
        site: Site,
        *,
        multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        self.norm, self.mixer, self.mlp = norm, mixer, mlp
        self.multiplier = multiplier
        if mixer is not None:
            self.mixer_norm_E = norm.weight(site, hidden_size)
        if mlp is not None:
            self.mlp_norm_E = norm.weight(site, hidden_size)

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        return with_quantized(self.norm.add_norm)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._add_norm, mlp_norm = kernels[self.norm.add_norm], _fed_by(self.norm.add_norm, self.mlp)
        self._sum, self._is_left = kernels.ranks.sum, self.leaves_sum
        self._mlp_norm = bind_sum_add_norm(kernels, mlp_norm) if self.leaves_sum else kernels[mlp_norm]

    @property
    def leaves_sum(self) -> bool:
        """Whether the sum over ranks of a part's result is left to what follows: what ``forward`` adds is a summand.

        It is not where a multiplier comes between the sum and the norm.
        """
        return self.multiplier == 1.0 and not (self.mixer is None and self.mlp is None)

    @property
    def spec(self) -> LayerSpec:
        return LayerSpec() if self.mixer is None else self.mixer.spec

    @property
    def recurrence(self) -> Recurrence[Any, Any] | None:
        return None if self.mixer is None else self.mixer.recurrence

    def bind(self, memory: LayerMemory) -> Any:
        """Return the layer's memory as ``forward`` takes it."""
        return None if self.mixer is None else self.mixer.bind(memory)

    def replay(self, batch: StepBatch, memory: Any) -> None:
        """Advance the states over logged tokens alone; only of a layer whose spec says what is logged."""
        cast(ReplayingMixer, self.mixer).replay(batch, memory)

    @property
    def first_norm_E(self) -> Tensor | None:
        """Weight of the norm before the layer's first part; None: that part reads the stream itself."""
        return self.mlp_norm_E if self.mixer is None else self.mixer_norm_E

    @property
    def first_part(self) -> object:
        """What reads the result of that norm alone, quantised if it takes that."""
        return self.mlp if self.mixer is None else self.mixer

    def forward(
        self, normed_TE: Any, residual_TE: Tensor, rotary: RotaryTable | None, batch: StepBatch, memory: Any
    ) -> tuple[Summand, Tensor]:
        """Return the last part's addition to the residual stream, or a summand of it, and the stream without it.

        Args:
            normed_TE: plain, or quantised if ``first_part`` takes that.
        """
        if self.mixer is not None:
            return self.feed(self.mix(normed_TE, rotary, batch, memory), residual_TE)
        if self.mlp is None:
            return plain_rows(normed_TE), residual_TE
        return self._fed(self.mlp, normed_TE), residual_TE

    def mix(self, normed_TE: Any, rotary: RotaryTable | None, batch: StepBatch, memory: Any) -> Tensor:
        """Return the mixer's addition to the residual stream, or a summand of it."""
        if self.mixer is None:
            raise EngineError("the layer has no mixer")
        mixed_TE = self.mixer(normed_TE, rotary, batch, memory)
        return mixed_TE if self._is_left else multiplied(self._sum(mixed_TE), self.multiplier)

    def feed(self, mixed_TE: Tensor, residual_TE: Tensor) -> tuple[Summand, Tensor]:
        """Do as ``forward``, behind the mixer."""
        if self.mlp is None:
            return mixed_TE, residual_TE
        normed_TE, residual_TE = self._mlp_norm(mixed_TE, residual_TE, self.mlp_norm_E, self.norm.eps)
        return self._fed(self.mlp, normed_TE), residual_TE

    def _fed(self, mlp: FeedForward, normed_TE: Any) -> Summand:
        fed = mlp(normed_TE)
        return fed if self._is_left else multiplied(self._sum(fed), self.multiplier)


def _fed_by(operation: Operation[..., Any], part: object) -> Operation[..., Any]:
    """Return the version of a norm whose results a part of a layer takes: quantised or not."""
    return QUANTIZED[operation] if getattr(part, "takes_quantized", False) else operation


def multiplied(x: Tensor, multiplier: float) -> Tensor:
    """Multiply a tensor in place, and return it."""
    return x if multiplier == 1.0 else x.mul_(multiplier)


class PostNormLayer(DecoderLayer):
    """A mixer, then a feed-forward part, on the residual stream itself: their outputs are normalised."""

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        return (self.norm.norm,)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._norm, self._sum = kernels[self.norm.norm], kernels.ranks.sum

    @property
    def leaves_sum(self) -> bool:
        return False

    @property
    def first_norm_E(self) -> None:
        return None

    def forward(
        self, normed_TE: Tensor, residual_TE: Tensor, rotary: RotaryTable | None, batch: StepBatch, memory: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the feed-forward part's addition to the residual stream, and the stream without it."""
        del normed_TE  # the stream itself
        mixer, mlp, eps = self.mixer, self.mlp, self.norm.eps
        assert mixer is not None
        assert mlp is not None
        mixed_TE = self._sum(mixer(residual_TE, rotary, batch, memory))
        residual_TE = self._norm(mixed_TE, self.mixer_norm_E, eps).add_(residual_TE)
        return self._norm(self._sum(mlp(residual_TE)), self.mlp_norm_E, eps), residual_TE


class Decoder(nn.Module):
    """Embedding, layers, final norm and output head.

    Args:
        rotary: of positions, for mixers that take them; None: no mixer does.
        is_tied: whether the output head is the embedding.
        embedding_multiplier: of the tokens' embeddings.
        logits_multiplier: of the logits.
        logits_soft_cap: limit of the logits' size, approached smoothly; None: there is none.
        site: the shard divides the vocabulary, for the embedding and the head.
    """

    inv_freq_F: Tensor | None

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        norm: ResidualNorm,
        rotary: RotaryFrequencies | None,
        shape: tuple[int, int],
        site: Site,
        *,
        is_tied: bool,
        embedding_multiplier: float = 1.0,
        logits_multiplier: float = 1.0,
        logits_soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.norm, self.dtype = norm, site.dtype
        self.shard, self.vocab_size = site.shard, shape[0]
        # Those to spare, at the end, are zeros.
        columns, hidden_size = columns_of(self.vocab_size, site.shard.index, site.shard.count), shape[1]
        num_rows = len(columns)
        self.held_tokens = range(min(columns.start, self.vocab_size), min(columns.stop, self.vocab_size))
        self.embedding_multiplier, self.logits_multiplier = embedding_multiplier, logits_multiplier
        self.logits_soft_cap = logits_soft_cap
        self.embed_ZE = site.parameter(num_rows, hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm_E = norm.weight(site, hidden_size)
        self.head = None if is_tied else Projection(num_rows, hidden_size, site)
        for weight in (self.embed_ZE, None if self.head is None else self.head.weight_OI):
            if weight is not None:
                weight[len(self.held_tokens) :].zero_()
        self.num_draftable: int | None = None
        """The first tokens, which alone are drafted; None: all. To be set before ``use_kernels``."""
        self.attention_factor = 1.0 if rotary is None else rotary.attention_factor
        inv_freq_F = None if rotary is None else rotary.inv_freq_F.to(site.device)
        self.register_buffer("inv_freq_F", inv_freq_F, persistent=False)
        self._layers = tuple(layers)

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        return (*with_quantized(self.norm.norm, self.norm.add_norm), linear, embed_held, rotary_table)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        first, *rest = (layer.first_part for layer in self._layers)
        self._norm = kernels[_fed_by(self.norm.norm, first)]
        add_norms = [_fed_by(self.norm.add_norm, part) for part in (*rest, None)]
        self._add_norms = [
            bind_sum_add_norm(kernels, add_norm) if layer.leaves_sum else kernels[add_norm]
            for layer, add_norm in zip(self._layers, add_norms, strict=True)
        ]
        self._sums = [kernels.ranks.sum if layer.leaves_sum else added_up for layer in self._layers]
        self._ranks = kernels.ranks
        self._embed_held, self._rotary_table = kernels[embed_held], kernels[rotary_table]
        self._tied_head = bind_linear(kernels, DenseWeight(self.embed_ZE))
        head = DenseWeight(self.embed_ZE) if self.head is None else self.head.weight
        self._draft_head: Linear | None = None
        # Rows of other forms cannot be sliced.
        if self.num_draftable is not None and isinstance(head, DenseWeight):
            self._draft_head = bind_linear(kernels, DenseWeight(head.values_OI[: self.num_draftable]))

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(tuple(layer.spec for layer in self._layers), self.embed_ZE.shape[1], dtype_name(self.dtype))

    def bind(self, arena: ArenaTensors) -> ModelMemory:
        """Return the arena as ``forward`` takes it."""
        bound = tuple(layer.bind(memory) for layer, memory in zip(self._layers, arena.layers, strict=False))
        replays = tuple(
            partial(layer.replay, memory=bound[index])
            for index, layer in enumerate(self._layers)
            if arena.layers[index].replay is not None
        )
        folds = bind_folds([layer.recurrence for layer in self._layers], arena.stacks)
        return ModelMemory(bound, folds, replays=replays)

    def embed(self, batch: StepBatch) -> tuple[Tensor, RotaryTable | None]:
        """Return the embeddings of the step's tokens, and the rotary table of its positions."""
        embedded_TE = multiplied(self.embedding(batch.token_ids_T), self.embedding_multiplier)
        if self.inv_freq_F is None:
            return embedded_TE, None
        return embedded_TE, self._rotary_table(batch.positions_T, self.inv_freq_F, self.attention_factor)

    def embedding(self, token_ids_T: Tensor) -> Tensor:
        """Return the embeddings of tokens as they are published."""
        if self.shard.count == 1:
            return F.embedding(token_ids_T, self.embed_ZE)
        held = self.held_tokens
        return self._ranks.sum(self._embed_held(token_ids_T, self.embed_ZE, held.start, len(held)))

    @torch.no_grad()
    def forward(self, batch: StepBatch, memory: ModelMemory) -> Tensor:
        """Return the final, normalised hidden state of every row of the step, and advance the memory."""
        residual_TE, rotary = self.embed(batch)
        layers, eps = self._layers, self.norm.eps
        norms = [*(layer.first_norm_E for layer in layers[1:]), self.norm_E]
        first_norm_E = layers[0].first_norm_E
        normed_TE = residual_TE if first_norm_E is None else self._norm(residual_TE, first_norm_E, eps)
        behind = zip(norms, self._add_norms, self._sums, strict=True)
        for layer, layer_memory, (norm_E, add_norm, add_up) in zip(layers, memory.layers, behind, strict=True):
            added_TE, residual_TE = layer(normed_TE, residual_TE, rotary, batch, layer_memory)
            if norm_E is None:
                normed_TE = residual_TE = add_up(added_TE).add_(residual_TE)
            else:
                normed_TE, residual_TE = add_norm(added_TE, residual_TE, norm_E, eps)
        return normed_TE

    @torch.no_grad()
    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Return logits of the tokens that this rank has, ``columns_of`` the vocabulary, in the activations' dtype.

        They are minus infinity where a column stands for no token.
        """
        logits_NZ = self._tied_head(hidden_NE) if self.head is None else self.head.multiply(hidden_NE)
        logits_NZ, cap = multiplied(logits_NZ, self.logits_multiplier), self.logits_soft_cap
        if cap is not None:
            logits_NZ.div_(cap).tanh_().mul_(cap)
        if logits_NZ.shape[1] > len(self.held_tokens):
            logits_NZ[:, len(self.held_tokens) :] = -torch.inf
        return logits_NZ

    @torch.no_grad()
    def draft_logits(self, hidden_NE: Tensor) -> Tensor:
        """Return logits of the tokens that are drafted, up to a monotonic function."""
        if self._draft_head is not None:
            return self._draft_head(hidden_NE)
        return self.logits(hidden_NE)[:, : self.num_draftable]

    def targets(self, prefix: str, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors, except the layers'.

        A tied head may be published all the same: it is the embedding once more.
        """
        yield f"{prefix}embed_tokens.weight", spanned(self.embed_ZE, self.held_tokens, self.vocab_size)
        yield from self.final_targets(prefix)
        if self.head is not None or "lm_head.weight" in names:
            rows_ZE = self.embed_ZE if self.head is None else self.head.weight_OI
            yield "lm_head.weight", spanned(rows_ZE, self.held_tokens, self.vocab_size)

    def final_targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors behind the last layer, except the head's."""
        yield f"{prefix}norm.weight", whole(self.norm_E)

    def lay_out(self, layout: Layout) -> None:
        """Choose the layout of all GEMM weights; they cannot be loaded or moved afterwards."""
        for module in self.modules():
            if isinstance(module, Projection):
                module.lay_out(layout)
