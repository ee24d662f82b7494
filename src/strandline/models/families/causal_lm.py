"""A loadable language model around a decoder, as built by all families.

Shape suffixes: T tokens of the step, N rows whose logits are wanted, L layers that a drafter reads, E hidden size; X
encoded tokens of pictures, Z tokens of this rank's logits.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from strandline.errors import ConfigError, EngineError
from strandline.kernels.arena import ArenaTensors
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels, UsesKernels
from strandline.kernels.gemm.weights import Layout
from strandline.kernels.operation import Operation
from strandline.models.drafters.block_drafter import BlockDrafter
from strandline.models.drafters.draft_head import rounded_head
from strandline.models.drafters.eagle_drafter import EagleDrafter
from strandline.models.layers.attention.attention_parts import KeyValues, KVScales
from strandline.models.layers.decoder import Decoder
from strandline.models.layers.distinct_layers import distinct_layers
from strandline.models.layers.feed_forward.routing_record import RoutingRecord
from strandline.models.layers.multi_token import DraftLayer
from strandline.models.layers.parts.step import Step
from strandline.models.layers.parts.targets import NamedTargets
from strandline.models.layers.protocol import ModelMemory
from strandline.models.layers.streams.residual import ReadableStream
from strandline.models.lora.adapter_slots import AdapterSlots
from strandline.models.vision.tower import VISUAL, VisionTower
from strandline.picture_config import PictureConfig
from strandline.specs import ModelSpec, RoutingShape

OwnDrafter = BlockDrafter | EagleDrafter
"""A drafter with its own files."""


class CausalLM(nn.Module):
    """A :class:`strandline.models.layers.protocol.LoadableModel`.

    Args:
        published: yields the targets under the family's names, as ``targets``.
        build_draft_layer: builds the multi-token prediction layer; None: the model has none.
        build_tower: builds the vision tower; None: the model has none.
        skipped_prefixes: prefixes of published tensors that the family does not use, besides those of all models.
    """

    def __init__(
        self,
        decoder: Decoder,
        max_position: int,
        published: Callable[[frozenset[str]], NamedTargets],
        build_draft_layer: Callable[[], DraftLayer] | None = None,
        skipped_prefixes: tuple[str, ...] = (),
        build_tower: Callable[[PictureConfig], VisionTower] | None = None,
    ) -> None:
        super().__init__()
        self.skipped_prefixes = skipped_prefixes
        self.decoder = decoder
        self.spec = decoder.spec
        self.vocab_size = decoder.embedding.config.vocab_size
        self.max_position = max_position
        self._published = published
        self._kernels: Kernels | None = None
        self._distinct: Sequence[int] = range(len(decoder.layers))
        """Layers that launch all kernels."""
        self._build_draft_layer = build_draft_layer
        self._build_tower = build_tower
        self.drafter: DraftLayer | OwnDrafter | None = None
        self.adapters: AdapterSlots | None = None
        """Adapters that requests name; None: the model takes none. To be set before ``use_kernels``."""
        self.tower: VisionTower | None = None
        self.routing: RoutingRecord | None = None
        """Records the experts of tokens; None: they are not recorded."""

    def add_draft_layer(self) -> None:
        """Add the layer that drafts tokens; its keys and values become part of the model's spec.

        Raises:
            ConfigError: the model has none, or one that is not supported.
        """
        if self._build_draft_layer is None:
            raise ConfigError(
                '--speculative-config: this model has no layer for multi-token prediction; try {"method": "ngram"}'
            )
        self.drafter = self._build_draft_layer()
        self.spec = self._whole_spec()

    def add_drafter(self, drafter: OwnDrafter) -> None:
        """Add a drafter that has its own files; its keys and values become part of the model's spec.

        Raises:
            ConfigError: the model's layers pass on several streams, and drafters read one.
        """
        if not isinstance(self.decoder.ends, ReadableStream):
            raise ConfigError("--speculative-config: layers of this model have several outputs, which no drafter reads")
        self.drafter = drafter
        self.spec = self._whole_spec()

    def add_tower(self, pictures: PictureConfig) -> None:
        """Add the vision tower; what layers keep may depend on it.

        Raises:
            ConfigError: the model has none, or one that is not supported.
        """
        if self._build_tower is None:
            raise ConfigError("this model has no vision tower")
        self.tower = self._build_tower(pictures)
        self.spec = self._whole_spec()

    def keep_distinct_layers(self) -> None:
        """Leave out layers that launch the kernels of others: those that are left compute something else."""
        self.decoder.keep_layers(self._distinct_layers())
        self.spec = self._whole_spec()

    def computing_distinct_layers(self) -> AbstractContextManager[None]:
        """Leave out layers that launch the kernels of others until the context ends; after ``use_kernels``."""
        return self.decoder.computing(self._distinct)

    def _distinct_layers(self) -> Sequence[int]:
        """Return the layers that launch all kernels; all of them where others read the outputs of certain layers."""
        layers = self.decoder.layers
        reads_layers = self.drafter is not None and self.drafter.target_layers
        return range(len(layers)) if reads_layers or self.routing is not None else distinct_layers(list(layers))

    def record_routing(self) -> None:
        """Store the experts that tokens are routed to, which become part of the model's spec; after all other changes.

        Raises:
            ConfigError: the model has no experts.
        """
        self.routing = RoutingRecord(list(self.decoder.layers))
        self.spec = self._whole_spec()

    @property
    def routing_shape(self) -> RoutingShape | None:
        """What is recorded of the experts that tokens are routed to; None: nothing."""
        return None if self.routing is None else self.routing.shape

    def limit_drafts(self, num_tokens: int) -> None:
        """Draft only tokens whose ids are below ``num_tokens``; called before ``use_kernels``.

        Raises:
            ConfigError: the drafter has its own output head.
        """
        if isinstance(self.drafter, BlockDrafter) and self.drafter.head is not None:
            raise ConfigError("--speculative-config: draft_vocab_size is not for a drafter with its own output head")
        self.decoder.embedding.num_draftable = min(num_tokens, self.vocab_size)

    def round_draft_head(self) -> None:
        """Draft with the output head in FP8, in memory of its own; called after ``lay_out``, before ``use_kernels``.

        Drafters with a head of their own, and heads that are not dense, stay as they are.
        """
        drafter, embedding = self.drafter, self.decoder.embedding
        head = embedding.draft_rows
        if drafter is not None and (isinstance(drafter, DraftLayer) or drafter.head is None) and head is not None:
            embedding.draft_weight = rounded_head(head)

    def _whole_spec(self) -> ModelSpec:
        spec, drafter = self.decoder.spec, self.drafter
        num_features = drafter.hidden_size if isinstance(drafter, EagleDrafter) else 0
        # A drafter's layers store all tokens: drafts are computed without window blocks.
        own = () if drafter is None else tuple(replace(layer, window_tokens=None) for layer in drafter.specs)
        routing = () if self.routing is None else (self.routing.spec,)
        return replace(spec, layers=(*spec.layers, *own, *routing), hidden_size=spec.hidden_size + num_features)

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        """Operations that its layers use."""
        return tuple({operation: None for user in self._users() for operation in user.operations})

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on.

        Raises:
            EngineError: the model is already used with other kernels, or is the shard of another rank.
        """
        shard, ranks = self.decoder.shard, kernels.ranks
        if (shard.index, shard.count) != (ranks.rank, ranks.size):
            raise EngineError(f"shard {shard.index} of {shard.count} was given to rank {ranks.rank} of {ranks.size}")
        if self._kernels is not None and self._kernels != kernels:
            raise EngineError("the model is already used by another engine; load it again")
        self._kernels, self._distinct = kernels, self._distinct_layers()
        for user in self._users():
            user.use_kernels(kernels)

    def _users(self) -> list[UsesKernels]:
        parts = [module for child in self.children() for module in child.modules()]
        return [module for module in parts if isinstance(module, UsesKernels)]

    def bind(self, arena: ArenaTensors) -> ModelMemory:
        """Return the arena as ``forward`` takes it."""
        memory, others = self.decoder.bind(arena), arena.layers[len(self.decoder.layers) :]
        if self.routing is not None:
            others, memory = others[:-1], replace(memory, routing=self.routing.bind(others[-1]))
        return memory if self.drafter is None else replace(memory, draft=self.drafter.bind(others))

    def forward(self, batch: StepBatch, memory: ModelMemory) -> Tensor:
        """Return the final, normalised ``hidden_TE`` of every row of the step, and advance the memory."""
        hidden_TE = self._forward(batch, memory)
        if self.routing is not None and memory.routing is not None:
            self.routing.store(batch, memory.routing)
        return hidden_TE

    def _forward(self, batch: StepBatch, memory: ModelMemory) -> Tensor:
        drafter = self.drafter
        if drafter is None or not drafter.target_layers:
            hidden_TE: Tensor = self.decoder(batch, memory)
            return hidden_TE
        shape = (len(batch.token_ids_T), len(drafter.target_layers), self.embedding_size)
        outputs_TLE = torch.empty(shape, dtype=self.decoder.dtype, device=batch.token_ids_T.device)
        hidden_TE = self.decoder(batch, memory, dict(zip(drafter.target_layers, outputs_TLE.unbind(1), strict=True)))
        if isinstance(drafter, EagleDrafter):
            return torch.cat((hidden_TE, drafter.features(outputs_TLE.flatten(1))), dim=1)
        if isinstance(drafter, BlockDrafter):
            drafter.keep(outputs_TLE.flatten(1), batch, memory.draft)
        return hidden_TE

    @property
    def embedding_size(self) -> int:
        """Features of a token's embedding, and of its final hidden state. A drafter's features may follow these."""
        return self.decoder.embedding.config.hidden_size

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Return logits of this rank's part of the vocabulary (``columns_of``), in the dtype of the activations."""
        if hidden_NE.shape[1] > self.embedding_size:
            hidden_NE = hidden_NE[:, : self.embedding_size].contiguous()
        return self.decoder.embedding.logits(hidden_NE)

    @torch.no_grad()
    def draft_logits(self, hidden_NE: Tensor) -> Tensor:
        """Return logits of this rank's part of the tokens that are drafted, up to a monotonic function."""
        if isinstance(self.drafter, EagleDrafter):
            hidden_NE = self.drafter.normed(hidden_NE)
        head = None if isinstance(self.drafter, DraftLayer | None) else self.drafter.head
        if head is not None:
            return head.logits(hidden_NE)
        return self.decoder.embedding.draft_logits(hidden_NE)

    @torch.no_grad()
    def draft(self, batch: StepBatch, hidden_TE: Tensor, memory: ModelMemory, rows_N: Tensor | None = None) -> Tensor:
        """Return hidden states whose logits predict the token after each of the batch's, by the draft layer.

        Args:
            batch: tokens, and the positions before them, where the draft layer stores its keys and values.
            hidden_TE: final, normalised hidden states after those positions, from the model or from this function.
            rows_N: rows whose hidden states are returned; None: all.
        """
        drafter, inputs = self._pairs(batch, hidden_TE, memory)
        drafted_NE: Tensor = drafter(*inputs, memory.draft, rows_N)
        return drafted_NE

    @torch.no_grad()
    def keep_for_drafts(self, batch: StepBatch, hidden_TE: Tensor, memory: ModelMemory) -> None:
        """Store the keys and values that ``draft`` would, without drafting. Arguments as in ``draft``."""
        drafter, inputs = self._pairs(batch, hidden_TE, memory)
        drafter.keep(*inputs, memory.draft)

    def _pairs(
        self, batch: StepBatch, hidden_TE: Tensor, memory: ModelMemory
    ) -> tuple[DraftLayer | EagleDrafter, tuple[Tensor, Tensor, Step]]:
        """Return what drafts from pairs, and the pairs as it takes them."""
        drafter = self.drafter
        if isinstance(drafter, DraftLayer):
            embedded_TE, step = self.decoder.embed(batch, memory)
            return drafter, (embedded_TE, hidden_TE, step)
        if not isinstance(drafter, EagleDrafter):
            raise EngineError("the model has no drafter of one token after the other")
        own_TE = drafter.embedding(batch.token_ids_T)
        if own_TE is None:
            encoded_XE = None if batch.picture_offsets is None else memory.pictures
            own_TE = self.decoder.embedding.rows(batch.token_ids_T, encoded_XE)
        return drafter, (own_TE, hidden_TE[:, -drafter.hidden_size :], drafter.step(batch))

    @torch.no_grad()
    def draft_block(self, batch: StepBatch, memory: ModelMemory, rows_N: Tensor) -> Tensor:
        """Return hidden states whose logits predict the token in the position of each row, by a drafter of blocks.

        Args:
            batch: each sequence's last known token, and masks after it, whose keys and values are overwritten.
            rows_N: rows of the batch whose hidden states are returned.
        """
        if not isinstance(self.drafter, BlockDrafter):
            raise EngineError("the model has no drafter of blocks")
        return self.drafter.draft(self.decoder.embedding.rows(batch.token_ids_T), batch, memory.draft, rows_N)

    def use_kv_cache_dtype(self, dtype: str) -> None:
        """Keep keys and values in another dtype than that of activations; called before ``bind``.

        Raises:
            ConfigError: a layer keeps other data per token.
        """
        for module in self.modules():
            if isinstance(module, KeyValues):
                module.dtype = dtype
        self.spec = self._whole_spec()
        routing = () if self.routing is None else (self.routing.spec,)
        kept = {stream.dtype for layer in self.spec.layers if layer not in routing for stream in layer.streams}
        if kept - {dtype}:
            raise ConfigError(
                f"--kv-cache-dtype: this architecture has no keys and values in {dtype}; it keeps tokens in "
                f"{', '.join(sorted(kept - {dtype}))}"
            )

    @property
    def kv_scales(self) -> dict[int, KVScales]:
        """Scales of keys and values, by layer of the decoder; to be set before ``bind``."""
        layers = enumerate(self.decoder.layers)
        parts = ((index, part) for index, layer in layers for part in layer.modules())
        return {index: part.scales for index, part in parts if isinstance(part, KeyValues)}

    def lay_out(self, layout: Layout) -> None:
        """Choose the layout of the weights; they cannot be loaded or moved afterwards."""
        self.decoder.lay_out(layout)
        if self.drafter is not None:
            self.drafter.lay_out(layout)

    def targets(self, names: frozenset[str]) -> NamedTargets:
        """Yield the required published tensors with their targets, given the published ``names``."""
        yield from self._published(names)
        if isinstance(self.drafter, DraftLayer):
            yield from self.drafter.targets(names)
        if self.tower is not None:
            yield from self.tower.targets(VISUAL)
