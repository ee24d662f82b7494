"""The decoder: embedding, layers on a residual stream, final norm and output head.

Parameters need no gradient.

Shape suffixes: T tokens of the step, N rows whose logits are wanted, E hidden size, F frequencies, Z vocabulary, X
encoded tokens of pictures.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strandline.ids import FIRST_VIRTUAL_ID
from strandline.kernels.arena import ArenaTensors, LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.expert_choices import Summand
from strandline.kernels.gemm.linear import Linear, bind_linear, linear
from strandline.kernels.gemm.weights import DenseWeight, Layout, ScaledWeight
from strandline.kernels.operation import Operation
from strandline.kernels.ranks import columns_of
from strandline.kernels.recurrences.recurrence import Recurrence, bind_folds
from strandline.kernels.rowwise.embedding import embed_held
from strandline.kernels.rowwise.rotary import interleaved_dimensions, rotary_table, rotary_table_3d
from strandline.models.layers.projection import Projection
from strandline.models.layers.protocol import ModelMemory
from strandline.models.layers.residual import (
    NormedResidual,
    PreNorm,
    ReadableStream,
    Residual,
    ResidualNorm,
    SandwichNorm,
    StreamEnds,
)
from strandline.models.layers.rotary import RotaryFrequencies, RotaryTable
from strandline.models.layers.site import Site, dtype_name
from strandline.models.layers.step import Step
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

    def __call__(self, hidden_TE: Any, step: Step, memory: Any) -> Summand:
        """Mix the step's tokens, and advance the memory; takes quantised rows if ``takes_quantized`` is set."""


FeedForward = Callable[[Any], Summand]
"""The part of a layer that works on each token separately; takes quantised rows if ``takes_quantized`` is set."""


class RerunningMixer(Mixer, Protocol):
    """A mixer with states that can be rerun, as described by its spec."""

    def rerun(self, batch: StepBatch, memory: Any) -> None:
        """Advance the states over logged tokens alone; the batch has no rows of its own."""


class StatefulPart(Protocol):
    """A part of a layer that keeps states besides those of the mixer; a module, which the layer's ``forward`` calls."""

    @property
    def spec(self) -> LayerSpec:
        """States that it keeps, and what is logged of drafts."""

    def bind(self, memory: LayerMemory) -> Any:
        """Return its memory as its functions take it."""

    def rerun(self, batch: StepBatch, memory: Any) -> None:
        """Advance its states over logged tokens alone; the batch has no rows of its own."""


class LayerStates(NamedTuple):
    """Memory of a layer's mixer and of its other stateful part, as each takes its own."""

    mixer: Any
    other: Any


MixerT_co = TypeVar("MixerT_co", bound=Mixer | None, covariant=True)
FeedForwardT_co = TypeVar("FeedForwardT_co", bound=FeedForward | None, covariant=True)
MixerT = TypeVar("MixerT", bound=Mixer | None)
FeedForwardT = TypeVar("FeedForwardT", bound=FeedForward | None)


class DecoderLayer(nn.Module, Generic[MixerT_co, FeedForwardT_co]):
    """A mixer, a feed-forward part, or one and then the other, each connected to the residual stream.

    Args:
        mixer: a module; None: the layer has none.
        mlp: a module; None: the layer has none.
        mixer_residual: connects the mixer.
        mlp_residual: connects the feed-forward part.
        stateful: another part that keeps states, called by the ``forward`` of a family's own layer; None: only the
            mixer keeps any.
    """

    def __init__(
        self,
        mixer: MixerT_co,
        mlp: FeedForwardT_co,
        mixer_residual: Residual | None,
        mlp_residual: Residual | None,
        *,
        stateful: StatefulPart | None = None,
    ) -> None:
        super().__init__()
        self.mixer, self.mlp, self.stateful = mixer, mlp, stateful
        self.mixer_residual, self.mlp_residual = mixer_residual, mlp_residual

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        residuals = (self.mixer_residual, self.mlp_residual)
        return tuple(operation for residual in residuals if residual is not None for operation in residual.operations)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        if self.mixer_residual is not None:
            self.mixer_residual.connect(kernels, self.mixer)
        if self.mlp_residual is not None:
            self.mlp_residual.connect(kernels, self.mlp)

    @property
    def mixer_norm_E(self) -> Tensor:
        """Weight of the norm that connects the mixer."""
        return norm_of(self.mixer_residual)

    @property
    def mlp_norm_E(self) -> Tensor:
        """Weight of the norm that connects the feed-forward part."""
        return norm_of(self.mlp_residual)

    @property
    def spec(self) -> LayerSpec:
        spec = LayerSpec() if self.mixer is None else self.mixer.spec
        if self.stateful is None:
            return spec
        own = self.stateful.spec
        return replace(spec, states=(*spec.states, *own.states), draft_log=(*spec.draft_log, *own.draft_log))

    @property
    def recurrence(self) -> Recurrence[Any, Any] | None:
        return None if self.mixer is None else self.mixer.recurrence

    def bind(self, memory: LayerMemory) -> Any:
        """Return the layer's memory as ``forward`` takes it."""
        if self.mixer is None or self.stateful is None:
            return None if self.mixer is None else self.mixer.bind(memory)
        logged = {log.name for log in self.mixer.spec.draft_log}
        draft_log = memory.draft_log and {name: log for name, log in memory.draft_log.items() if name in logged}
        return LayerStates(self.mixer.bind(replace(memory, draft_log=draft_log)), self.stateful.bind(memory))

    def rerun(self, batch: StepBatch, memory: Any) -> None:
        """Advance the states over logged tokens alone; only of a layer whose spec says what is logged."""
        if self.stateful is not None:
            memory, other = memory
            self.stateful.rerun(batch, other)
        cast(RerunningMixer, self.mixer).rerun(batch, memory)

    def forward(self, stream: Any, step: Step, memory: Any) -> Any:
        """Return the residual stream after the layer."""
        return self.feed(self.mix(stream, step, memory))

    def mix(self, stream: Any, step: Step, memory: Any) -> Any:
        """Return the residual stream after the mixer."""
        if self.mixer is None or self.mixer_residual is None:
            return stream
        hidden_TE, stream = self.mixer_residual.enter(stream)
        return self.mixer_residual.add(self.mixer(hidden_TE, step, memory), stream)

    def feed(self, stream: Any) -> Any:
        """Return the residual stream after the feed-forward part, given that after the mixer."""
        if self.mlp is None or self.mlp_residual is None:
            return stream
        hidden_TE, stream = self.mlp_residual.enter(stream)
        return self.mlp_residual.add(self.mlp(hidden_TE), stream)


def norm_of(residual: object) -> Tensor:
    """Return the weight of the norm of a residual that has one."""
    assert isinstance(residual, NormedResidual)
    return residual.norm_E


def pre_norm_layer(
    mixer: MixerT, mlp: FeedForwardT, norm: ResidualNorm, hidden_size: int, site: Site, *, multiplier: float = 1.0
) -> DecoderLayer[MixerT, FeedForwardT]:
    """Return a layer whose parts read the normalised stream.

    Args:
        multiplier: scales each part's output before it is added.
    """
    residuals = (
        None if part is None else PreNorm(norm, hidden_size, site, multiplier=multiplier) for part in (mixer, mlp)
    )
    return DecoderLayer(mixer, mlp, *residuals)


def sandwich_layer(
    mixer: MixerT, mlp: FeedForwardT, norm: ResidualNorm, hidden_size: int, site: Site
) -> DecoderLayer[MixerT, FeedForwardT]:
    """Return a layer whose parts read the normalised stream, and whose outputs are normalised, too."""
    return DecoderLayer(mixer, mlp, *(SandwichNorm(norm, hidden_size, site) for _ in range(2)))


class Decoder(nn.Module):
    """Embedding, layers, final norm and output head.

    Args:
        ends: begins the residual stream, and ends it with the final norm.
        rotary: rotary frequencies for mixers that take positions; None: no mixer does.
        windowed_rotary: frequencies for mixers with a window; None: as for the others.
        is_tied: whether the output head is the embedding.
        embedding_multiplier: multiplies the tokens' embeddings.
        embedding_norm: norm of the tokens' embeddings; None: they have none.
        num_published: rows of the published embedding and head; those past the vocabulary are not read. None: as many
            as the vocabulary has tokens.
        logits_multiplier: multiplies the logits.
        logits_soft_cap: limit of the logits' size, approached smoothly; None: there is none.
        site: the shard divides the vocabulary, for the embedding and the head.
    """

    inv_freq_F: Tensor | None
    windowed_inv_freq_F: Tensor | None
    dimension_F: Tensor

    def __init__(
        self,
        layers: Sequence[DecoderLayer[Any, Any]],
        ends: StreamEnds,
        rotary: RotaryFrequencies | None,
        shape: tuple[int, int],
        site: Site,
        *,
        is_tied: bool,
        windowed_rotary: RotaryFrequencies | None = None,
        embedding_multiplier: float = 1.0,
        embedding_norm: ResidualNorm | None = None,
        num_published: int | None = None,
        logits_multiplier: float = 1.0,
        logits_soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.ends, self.dtype = ends, site.dtype
        self.shard, self.vocab_size = site.shard, shape[0]
        self.num_published = self.vocab_size if num_published is None else num_published
        # Those to spare, at the end, are zeros.
        columns, hidden_size = columns_of(self.vocab_size, site.shard.index, site.shard.count), shape[1]
        num_rows = len(columns)
        self.held_tokens = range(min(columns.start, self.vocab_size), min(columns.stop, self.vocab_size))
        self.embedding_multiplier, self.logits_multiplier = embedding_multiplier, logits_multiplier
        self.logits_soft_cap = logits_soft_cap
        self.embed_ZE = site.parameter(num_rows, hidden_size)
        self.embedding_norm = embedding_norm
        self.embed_norm_E = None if embedding_norm is None else embedding_norm.weight(site, hidden_size)
        self.layers = nn.ModuleList(layers)
        self.head = None if is_tied else Projection(num_rows, hidden_size, site)
        for weight in (self.embed_ZE, None if self.head is None else self.head.weight_OI):
            if weight is not None:
                weight[len(self.held_tokens) :].zero_()
        self.num_draftable: int | None = None
        """The first tokens, which alone are drafted; None: all. To be set before ``use_kernels``."""
        self.draft_weight: ScaledWeight | None = None
        """The output head of drafts, if it is another one. To be set before ``use_kernels``."""
        self.attention_factor = 1.0 if rotary is None else rotary.attention_factor
        self.windowed_factor = 1.0 if windowed_rotary is None else windowed_rotary.attention_factor
        self.picture_token_id: int | None = None
        """The id that layers read of a picture's token; None: no layer reads token ids."""
        inv_freq_F = dimension_F = None
        if rotary is not None:
            inv_freq_F = rotary.inv_freq_F.to(site.device)
            dimension_F = interleaved_dimensions(len(inv_freq_F), rotary.sections).to(site.device)
        self.register_buffer("inv_freq_F", inv_freq_F, persistent=False)
        windowed_F = None if windowed_rotary is None else windowed_rotary.inv_freq_F.to(site.device)
        self.register_buffer("windowed_inv_freq_F", windowed_F, persistent=False)
        self.register_buffer("dimension_F", dimension_F, persistent=False)
        self._layers = tuple(layers)
        self._computed: Sequence[int] = range(len(layers))
        """The layers that ``forward`` computes, in order."""

    def keep_layers(self, indices: Sequence[int]) -> None:
        """Leave out all layers but these."""
        self._layers = tuple(self._layers[index] for index in indices)
        self.layers = nn.ModuleList(self._layers)
        self._computed = range(len(indices))

    @contextmanager
    def computing(self, indices: Sequence[int]) -> Iterator[None]:
        """Compute these layers alone, which gives other hidden states."""
        before, self._computed = self._computed, indices
        try:
            yield
        finally:
            self._computed = before

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        norms = () if self.embedding_norm is None else (self.embedding_norm.norm,)
        return (*self.ends.operations, *norms, linear, embed_held, rotary_table, rotary_table_3d)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self.ends.connect(kernels)
        self._ranks = kernels.ranks
        self._embed_held = kernels[embed_held]
        if self.embedding_norm is not None:
            self._embed_norm = kernels[self.embedding_norm.norm]
        self._rotary_table, self._rotary_table_3d = kernels[rotary_table], kernels[rotary_table_3d]
        self._tied_head = bind_linear(kernels, DenseWeight(self.embed_ZE))
        self._draft_head: Linear | None = None
        if self.draft_weight is not None:
            self._draft_head = bind_linear(kernels, self.draft_weight)
        elif self.num_draftable is not None and self.draft_rows is not None:
            self._draft_head = bind_linear(kernels, DenseWeight(self.draft_rows))

    @property
    def draft_rows(self) -> Tensor | None:
        """The output head's rows of tokens that are drafted; None: it is in a form whose rows cannot be sliced."""
        head = DenseWeight(self.embed_ZE) if self.head is None else self.head.weight
        return head.values_OI[: self.num_draftable] if isinstance(head, DenseWeight) else None

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(tuple(layer.spec for layer in self._layers), self.embed_ZE.shape[1], dtype_name(self.dtype))

    def bind(self, arena: ArenaTensors) -> ModelMemory:
        """Return the arena as ``forward`` takes it."""
        bound = tuple(layer.bind(memory) for layer, memory in zip(self._layers, arena.layers, strict=False))
        reruns = tuple(
            partial(layer.rerun, memory=bound[index])
            for index, layer in enumerate(self._layers)
            if arena.layers[index].draft_log is not None
        )
        folds = bind_folds([layer.recurrence for layer in self._layers], arena.stacks)
        return ModelMemory(bound, folds, reruns=reruns)

    def embed(self, batch: StepBatch, memory: ModelMemory) -> tuple[Tensor, Step]:
        """Return the embeddings of the step's tokens, and the step with the rotary tables of its positions."""
        encoded_XE = None if batch.picture_offsets is None else memory.pictures
        embedded_TE = multiplied(self.embedding(batch.token_ids_T, encoded_XE), self.embedding_multiplier)
        if self.embedding_norm is not None and self.embed_norm_E is not None:
            embedded_TE = self._embed_norm(embedded_TE, self.embed_norm_E, self.embedding_norm.eps)
        if encoded_XE is not None and self.picture_token_id is not None:
            batch.token_ids_T.masked_fill_(batch.token_ids_T >= FIRST_VIRTUAL_ID, self.picture_token_id)
        rotary = self._rotary(batch, self.inv_freq_F, self.attention_factor)
        return embedded_TE, Step(batch, rotary, self._rotary(batch, self.windowed_inv_freq_F, self.windowed_factor))

    def _rotary(self, batch: StepBatch, inv_freq_F: Tensor | None, factor: float) -> RotaryTable | None:
        if inv_freq_F is None:
            return None
        positions_T = batch.positions_T if batch.rotary is None else batch.rotary
        frequencies = (inv_freq_F, factor)
        if batch.picture_offsets is None:
            return self._rotary_table(positions_T, *frequencies)
        return self._rotary_table_3d(positions_T, batch.picture_offsets, self.dimension_F, *frequencies)

    def embedding(self, token_ids_T: Tensor, encoded_XE: Tensor | None = None) -> Tensor:
        """Return the embeddings of tokens as they are published.

        Args:
            encoded_XE: embeddings of pictures' tokens; None: there are no pictures.
        """
        if self.shard.count == 1 and encoded_XE is None:
            return F.embedding(token_ids_T, self.embed_ZE)
        held = self.held_tokens
        encoded_XE = encoded_XE if self.shard.is_first else None
        embedded_TE = self._embed_held(token_ids_T, self.embed_ZE, held.start, len(held), encoded_XE)
        return embedded_TE if self.shard.count == 1 else self._ranks.sum(embedded_TE)

    @torch.no_grad()
    def forward(
        self, batch: StepBatch, memory: ModelMemory, readers: Mapping[int, Tensor] = MappingProxyType({})
    ) -> Tensor:
        """Return the final, normalised hidden state of every row of the step, and advance the memory.

        Args:
            readers: by layer, a tensor ``[T, E]`` that takes the residual stream after it.
        """
        embedded_TE, step = self.embed(batch, memory)
        stream = self.ends.begin(embedded_TE)
        for index in self._computed:
            stream = self._layers[index](stream, step, memory.layers[index])
            if index in readers:
                stream = cast(ReadableStream, self.ends).read(stream, readers[index])
        return self.ends.leave(stream)

    @torch.no_grad()
    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Return logits of the tokens that this rank has, ``columns_of`` the vocabulary, in the activations' dtype.

        They are minus infinity where a column stands for no token.
        """
        logits_NZ, cap = multiplied(self._head_products(hidden_NE), self.logits_multiplier), self.logits_soft_cap
        if cap is not None:
            logits_NZ.div_(cap).tanh_().mul_(cap)
        return self._without_spare(logits_NZ)

    def _head_products(self, hidden_NE: Tensor) -> Tensor:
        return self._tied_head(hidden_NE) if self.head is None else self.head.multiply(hidden_NE)

    def _without_spare(self, logits_NZ: Tensor) -> Tensor:
        """Make logits minus infinity where a column stands for no token."""
        if logits_NZ.shape[1] > len(self.held_tokens):
            logits_NZ[:, len(self.held_tokens) :] = -torch.inf
        return logits_NZ

    @torch.no_grad()
    def draft_logits(self, hidden_NE: Tensor) -> Tensor:
        """Return logits of the tokens that are drafted, neither scaled nor capped, whose order is the same."""
        if self._draft_head is not None:
            return self._without_spare(self._draft_head(hidden_NE))
        return self._without_spare(self._head_products(hidden_NE))[:, : self.num_draftable]

    def targets(self, prefix: str, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors, except the layers'.

        A tied head may be published all the same: it is the embedding once more.
        """
        yield f"{prefix}embed_tokens.weight", spanned(self.embed_ZE, self.held_tokens, self.num_published)
        if self.embed_norm_E is not None:
            yield f"{prefix}embed_norm.weight", whole(self.embed_norm_E)
        yield from self.ends.targets(prefix)
        if self.head is not None or "lm_head.weight" in names:
            rows_ZE = self.embed_ZE if self.head is None else self.head.weight_OI
            yield "lm_head.weight", spanned(rows_ZE, self.held_tokens, self.num_published)

    def lay_out(self, layout: Layout) -> None:
        """Choose the layout of all GEMM weights; they cannot be loaded or moved afterwards."""
        for module in self.modules():
            if isinstance(module, Projection):
                module.lay_out(layout)


def multiplied(x: Tensor, multiplier: float) -> Tensor:
    """Multiply a tensor in place, and return it."""
    return x if multiplier == 1.0 else x.mul_(multiplier)
