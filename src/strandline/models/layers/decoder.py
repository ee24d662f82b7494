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
from torch import Tensor, nn

from strandline.ids import FIRST_VIRTUAL_ID
from strandline.kernels.arena import ArenaTensors, LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.expert_choices import Summand
from strandline.kernels.gemm.weights import Layout
from strandline.kernels.operation import Operation
from strandline.kernels.recurrences.recurrence import Recurrence, bind_folds
from strandline.kernels.rowwise.rotary import interleaved_dimensions, rotary_table, rotary_table_3d
from strandline.models.layers.embedding import Embedding, EmbeddingConfig
from strandline.models.layers.parts.projection import Projection
from strandline.models.layers.parts.rotary import RotaryFrequencies, RotaryTable
from strandline.models.layers.parts.site import Site, dtype_name
from strandline.models.layers.parts.step import Step
from strandline.models.layers.parts.targets import NamedTargets
from strandline.models.layers.protocol import ModelMemory
from strandline.models.layers.streams.residual import (
    NormedResidual,
    PreNorm,
    ReadableStream,
    Residual,
    ResidualNorm,
    SandwichNorm,
    StreamEnds,
)
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
        site: the shard divides the vocabulary, for the embedding and the head.
        windowed_rotary: frequencies for mixers with a window; None: as for the others.
    """

    inv_freq_F: Tensor | None
    windowed_inv_freq_F: Tensor | None
    dimension_F: Tensor

    def __init__(
        self,
        layers: Sequence[DecoderLayer[Any, Any]],
        ends: StreamEnds,
        embedding: EmbeddingConfig,
        rotary: RotaryFrequencies | None,
        site: Site,
        *,
        windowed_rotary: RotaryFrequencies | None = None,
    ) -> None:
        super().__init__()
        self.ends, self.dtype, self.shard = ends, site.dtype, site.shard
        self.embedding = Embedding(embedding, site)
        self.layers = nn.ModuleList(layers)
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
        return (*self.ends.operations, rotary_table, rotary_table_3d)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self.ends.connect(kernels)
        self._rotary_table, self._rotary_table_3d = kernels[rotary_table], kernels[rotary_table_3d]

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            tuple(layer.spec for layer in self._layers), self.embedding.config.hidden_size, dtype_name(self.dtype)
        )

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
        embedded_TE = self.embedding.inputs(batch.token_ids_T, encoded_XE)
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

    def targets(self, prefix: str, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors, except the layers'."""
        yield from self.embedding.targets(prefix)
        yield from self.ends.targets(prefix)
        yield from self.embedding.head_targets(names)

    def lay_out(self, layout: Layout) -> None:
        """Choose the layout of all GEMM weights; they cannot be loaded or moved afterwards."""
        for module in self.modules():
            if isinstance(module, Projection):
                module.lay_out(layout)
