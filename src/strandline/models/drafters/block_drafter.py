"""DFlash, DFlash2 and DSpark: drafters that compute a whole block of tokens in one pass, from masks.

Of every token that the model computes, the drafter's layers keep keys and values: projections of the outputs of some of
the model's layers at that token, in the token's own position. They depend on no other token of the drafter, so they are
stored in the model's own pass. A block is the last known token, whose outputs are not known yet, and a mask for each
draft: their queries attend to what is kept of all tokens before them, and to each other. DFlash2 also convolves the
tokens of a block. DFlash2 and DSpark choose each draft by the token before it (``draft_chain.py``). In a block of
DSpark each row predicts the next token, so that it has a mask less.

Source: ``DFlashDraftModel`` as published ("DFlash: Block Diffusion for Flash Speculative Decoding"),
``DFlash2DraftModel`` and ``DSparkDraftModel``.

Shape suffixes: T tokens of the step, N rows that are wanted, X features of the model's layers side by side, E hidden
size, F frequencies.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from strandline.drafter_config import BlockDrafterConfig
from strandline.errors import ConfigError
from strandline.kernels.arena import LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.gemm.weights import Layout
from strandline.kernels.operation import Operation
from strandline.kernels.rowwise.rotary import rotary_table
from strandline.models.drafters.block_convolution import LayerConvolutions, index_in_blocks
from strandline.models.drafters.draft_chain import MarkovHead, new_chain
from strandline.models.drafters.draft_head import DraftHead
from strandline.models.layers.attention.attention import Attention
from strandline.models.layers.attention.attention_parts import AttentionConfig, QueryKeyNorm
from strandline.models.layers.decoder import pre_norm_layer
from strandline.models.layers.embedding import multiplied
from strandline.models.layers.feed_forward.mlp import GatedMlp, GatedMlpConfig
from strandline.models.layers.parts.projection import Projection
from strandline.models.layers.parts.rotary import rotary_frequencies
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.step import Step
from strandline.models.layers.parts.targets import NamedTargets, unused, whole
from strandline.models.layers.protocol import DraftBlock
from strandline.models.layers.streams.residual import PreNorm, Stream, rms
from strandline.specs import LayerSpec


class BlockDrafter(nn.Module):
    """A ``Drafter`` of blocks.

    Args:
        shape: shape of the embedding of the model that it drafts for.
        has_head: whether it has its own output head.

    Raises:
        ConfigError: a setting is not supported, or does not go with the model.
    """

    inv_freq_F: Tensor

    def __init__(self, config: BlockDrafterConfig, shape: tuple[int, int], site: Site, *, has_head: bool) -> None:
        super().__init__()
        fields, (self.vocab_size, hidden_size) = config.text, shape
        fields.choice("hidden_act", ["silu"])
        attention, mlp = AttentionConfig.read(fields, QueryKeyNorm.RMS), GatedMlpConfig.read(fields)
        if attention.hidden_size != hidden_size:
            fields.reject("hidden_size", f"the model's, {hidden_size}, whose embedding it shares")
        self.may_copy_embedding = config.may_copy_embedding
        self.target_layers, self.embedding_scale = config.target_layers, config.embedding_scale
        self._confidence_inputs = config.confidence_inputs
        self.norm = norm = rms(attention.eps)
        self.fc = Projection(hidden_size, hidden_size * len(config.target_layers), site)
        """Columns: outputs of the model's layers, in the configuration's order."""
        self.hidden_norm_E = norm.weight(site, hidden_size)
        self._layers = tuple(
            pre_norm_layer(
                Attention(replace(attention, window_tokens=window, is_causal=is_causal), site),
                GatedMlp(mlp, site),
                norm,
                hidden_size,
                site,
            )
            for window, is_causal in zip(config.windows, config.is_causal, strict=True)
        )
        self.layers = nn.ModuleList(self._layers)
        self._convolutions: tuple[LayerConvolutions, ...] = ()
        if config.convolution is not None:
            self._convolutions = tuple(LayerConvolutions(*config.convolution, hidden_size, site) for _ in self._layers)
        self.convolutions = nn.ModuleList(self._convolutions)
        self.final = PreNorm(norm, hidden_size, site)
        num_drafted = self.vocab_size if config.draft_vocab_size is None else config.draft_vocab_size
        self.head = DraftHead(num_drafted, hidden_size, self.vocab_size, site) if has_head else None
        self.chain = new_chain(config.chain, shape, self.head, site)
        self.block = DraftBlock(config.mask_token_id, config.first_draft_row, self.chain)
        rotary = rotary_frequencies(fields)
        self.attention_factor = rotary.attention_factor
        self.register_buffer("inv_freq_F", rotary.inv_freq_F.to(site.device), persistent=False)

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        return (*self.final.operations, self.norm.norm, rotary_table)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._norm, self._rotary_table = kernels[self.norm.norm], kernels[rotary_table]
        self.final.connect(kernels)
        if self.head is not None:
            self.head.use_kernels(kernels)

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return tuple(layer.spec for layer in self._layers)

    def bind(self, memories: Sequence[LayerMemory]) -> tuple[Any, ...]:
        """Return the layers' memory as ``keep`` and ``draft`` take it."""
        return tuple(layer.bind(memory) for layer, memory in zip(self._layers, memories, strict=True))

    def keep(self, features_TX: Tensor, batch: StepBatch, memory: tuple[Any, ...]) -> None:
        """Store keys and values of the tokens of the model's step.

        Args:
            features_TX: outputs of ``target_layers``.
        """
        step = self._step(batch)
        normed_TE = self._norm(self.fc.multiply(features_TX), self.hidden_norm_E, self.norm.eps)
        for layer, layer_memory in zip(self._layers, memory, strict=True):
            layer.mixer.keep(normed_TE, step, layer_memory)

    def draft(self, embedded_TE: Tensor, batch: StepBatch, memory: tuple[Any, ...], rows_N: Tensor) -> Tensor:
        """Return normalised hidden states of some rows of blocks."""
        stream, step = Stream(multiplied(embedded_TE, self.embedding_scale)), self._step(batch)
        if not self._convolutions:
            for layer, layer_memory in zip(self._layers, memory, strict=True):
                stream = layer(stream, step, layer_memory)
        else:
            index_T = index_in_blocks(batch.attention.query_starts_N1, len(embedded_TE))
            for layer, layer_memory, convolved in zip(self._layers, memory, self._convolutions, strict=True):
                stream = convolved(layer, stream, step, layer_memory, index_T)
        return self.final.leave(stream.rows(rows_N))

    def _step(self, batch: StepBatch) -> Step:
        """Return a step with the drafter's own rotary table: tokens of pictures count as others do."""
        return Step(batch, self._rotary_table(batch.positions_T, self.inv_freq_F, self.attention_factor))

    def lay_out(self, layout: Layout) -> None:
        """Choose the form of its weights; they cannot be loaded or moved afterwards."""
        for module in self.modules():
            if isinstance(module, Projection):
                module.lay_out(layout)

    def targets(self, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors except ``d2t``."""
        yield from self.fc.targets("fc.")
        yield "hidden_norm.weight", whole(self.hidden_norm_E)
        yield "norm.weight", whole(self.final.norm_E)
        for index, layer in enumerate(self._layers):
            prefix = f"layers.{index}."
            yield f"{prefix}input_layernorm.weight", whole(layer.mixer_norm_E)
            yield f"{prefix}post_attention_layernorm.weight", whole(layer.mlp_norm_E)
            yield from layer.mixer.targets(f"{prefix}self_attn.")
            yield from layer.mlp.targets(f"{prefix}mlp.", names)
        for index, convolutions in enumerate(self._convolutions):
            yield from convolutions.targets(f"layers.{index}.")
        if self.head is not None:
            yield from self.head.targets()
        if self.chain is not None:
            yield from self.chain.targets()
        for name, shape in self._unused.items():
            if name in names:
                yield name, unused(*shape)

    @property
    def _unused(self) -> dict[str, tuple[int, ...]]:
        """Published tensors that it has no use for; the depth of drafts follows from measured acceptance."""
        shapes: dict[str, tuple[int, ...]] = {"t2d": (self.vocab_size,)}
        if isinstance(self.chain, MarkovHead):
            shapes |= {"confidence_head.proj.weight": (1, self._confidence_inputs), "confidence_head.proj.bias": (1,)}
        if self.may_copy_embedding:
            shapes["embed_tokens.weight"] = (self.vocab_size, self.hidden_norm_E.numel())
        return shapes


def check_target(config: BlockDrafterConfig, num_layers: int, vocab_size: int) -> None:
    """Check that a drafter was made for a model of this size.

    Raises:
        ConfigError: it was made for another one.
    """
    where = f"{config.directory}: config.json: "
    if config.num_target_layers not in (None, num_layers):
        raise ConfigError(f"{where}num_target_layers is {config.num_target_layers}; the model has {num_layers} layers")
    if max(config.target_layers) >= num_layers:
        raise ConfigError(
            f"{where}dflash_config.target_layer_ids are {[*config.target_layers]}; the model has {num_layers} layers"
        )
    if config.mask_token_id >= vocab_size:
        raise ConfigError(
            f"{where}dflash_config.mask_token_id is {config.mask_token_id}; the model has {vocab_size} tokens"
        )
