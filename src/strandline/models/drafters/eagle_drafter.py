"""EAGLE-3: a drafter that drafts one token after the other, from hidden states of several of the model's layers.

It works on pairs as a draft layer does (``layers/multi_token.py``): of the features of a position, which are a
projection of the model's hidden states there, and the embedding of the token after it. Features are stored after the
final hidden states, so that a sequence that resumes can make its last pair again. The drafter's own hidden state stands
for the features of a draft. It may have its own embedding, and an output head for frequent tokens alone.

Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test";
``LlamaForCausalLMEagle3`` as published.

Shape suffixes: T tokens of the step, N rows that are wanted, X hidden states of the model's layers side by side, E
hidden size of the drafter, F frequencies, Z tokens of its vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strandline.drafter_config import EagleConfig
from strandline.kernels.arena import LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.gemm.weights import Layout
from strandline.kernels.operation import Operation
from strandline.kernels.rowwise.rotary import rotary_table
from strandline.models.drafters.draft_head import DraftHead
from strandline.models.layers.attention.attention import Attention
from strandline.models.layers.attention.attention_parts import AttentionConfig, QueryKeyNorm
from strandline.models.layers.feed_forward.mlp import GatedMlp, GatedMlpConfig
from strandline.models.layers.parts.projection import Projection
from strandline.models.layers.parts.rotary import rotary_frequencies
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.step import Step
from strandline.models.layers.parts.targets import NamedTargets, unused, whole
from strandline.models.layers.streams.residual import PreNorm, Stream, rms
from strandline.specs import LayerSpec


class EagleDrafter(nn.Module):
    """A ``Drafter`` of one token after the other.

    Args:
        target_layers: layers of the model whose outputs it reads.
        shape: shape of the model's embedding.
        has_embedding: whether it has its own.
        has_head: whether it has its own output head.

    Raises:
        ConfigError: a setting is not supported, or does not go with the model.
    """

    block = None
    inv_freq_F: Tensor

    def __init__(
        self,
        config: EagleConfig,
        target_layers: tuple[int, ...],
        shape: tuple[int, int],
        site: Site,
        *,
        has_embedding: bool,
        has_head: bool,
    ) -> None:
        super().__init__()
        fields, (self.vocab_size, target_size) = config.text, shape
        fields.choice("hidden_act", ["silu"])
        norms = QueryKeyNorm.RMS if config.has_head_norms else QueryKeyNorm.NONE
        attention, mlp = AttentionConfig.read(fields, norms), GatedMlpConfig.read(fields)
        self.hidden_size = size = attention.hidden_size
        if size != target_size and not (has_embedding and has_head):
            fields.reject("hidden_size", f"the model's, {target_size}, whose embedding or output head it shares")
        self.target_layers, self.has_norm_before_residual = target_layers, config.has_norm_before_residual
        self.norm = rms(attention.eps)
        self.fc = Projection(size, target_size * len(target_layers), site)
        self.embedding_norm_E, self.hidden_norm_E = (self.norm.weight(site, size) for _ in range(2))
        self.mixer = Attention(replace(attention, input_size=2 * size), site)
        self.mlp = GatedMlp(mlp, site)
        self.mlp_residual, self.final = (PreNorm(self.norm, size, site) for _ in range(2))
        self.embed_ZE = site.parameter(self.vocab_size, size) if has_embedding else None
        num_drafted = self.vocab_size if config.draft_vocab_size is None else config.draft_vocab_size
        self.head = DraftHead(num_drafted, size, self.vocab_size, site) if has_head else None
        rotary = rotary_frequencies(fields)
        self.attention_factor = rotary.attention_factor
        self.register_buffer("inv_freq_F", rotary.inv_freq_F.to(site.device), persistent=False)

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        return (*self.final.operations, self.norm.norm, rotary_table)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._norm, self._rotary_table = kernels[self.norm.norm], kernels[rotary_table]
        self._sum = kernels.ranks.sum
        if self.head is not None:
            self.head.use_kernels(kernels)
        self.mlp_residual.connect(kernels, self.mlp)
        self.final.connect(kernels)

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return (self.mixer.spec,)

    def bind(self, memories: Sequence[LayerMemory]) -> Any:
        """Return the layer's memory as ``forward`` takes it."""
        [memory] = memories
        return self.mixer.bind(memory)

    def features(self, outputs_TX: Tensor) -> Tensor:
        """Return the features of tokens, given the outputs of ``target_layers``."""
        return self.fc.multiply(outputs_TX)

    def embedding(self, token_ids_T: Tensor) -> Tensor | None:
        """Return its own embeddings, of a picture's tokens that of token 0; None: it has none."""
        if self.embed_ZE is None:
            return None
        return F.embedding(torch.where(token_ids_T < self.vocab_size, token_ids_T, 0), self.embed_ZE)

    def step(self, batch: StepBatch) -> Step:
        """Return a step with the drafter's own rotary table: tokens of pictures count as others do."""
        return Step(batch, self._rotary_table(batch.positions_T, self.inv_freq_F, self.attention_factor))

    def forward(
        self, embedded_TE: Tensor, features_TE: Tensor, step: Step, memory: Any, rows_N: Tensor | None = None
    ) -> Tensor:
        """Return hidden states, which are the features of the tokens that they predict.

        Args:
            embedded_TE: embeddings of the tokens after those that the batch gives positions of.
            features_TE: their features.
            rows_N: rows to return; None: all. Of the others, what later tokens read is stored.
        """
        joined_TX, residual_TE = self._joined(embedded_TE, features_TE)
        stream = Stream(residual_TE, self.mixer(joined_TX, step, memory), is_summed=False)
        normed_TE, stream = self.mlp_residual.enter(stream if rows_N is None else stream.rows(rows_N))
        return self.mlp_residual.add(self.mlp(normed_TE), stream).settled(self._sum)

    def keep(self, embedded_TE: Tensor, features_TE: Tensor, step: Step, memory: Any) -> None:
        """Store what ``forward`` would of these tokens, for later ones to read, and draft nothing."""
        self.mixer.keep(self._joined(embedded_TE, features_TE)[0], step, memory)

    def _joined(self, embedded_TE: Tensor, features_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of attention, and the residual stream."""
        features_TE = features_TE.contiguous()
        embedded_TE = self._norm(embedded_TE, self.embedding_norm_E, self.norm.eps)
        normed_TE = self._norm(features_TE, self.hidden_norm_E, self.norm.eps)
        residual_TE = normed_TE if self.has_norm_before_residual else features_TE
        return torch.cat((embedded_TE, normed_TE), dim=-1), residual_TE

    def normed(self, hidden_NE: Tensor) -> Tensor:
        """Return the input of the output head."""
        return self.final.leave(Stream(hidden_NE))

    def lay_out(self, layout: Layout) -> None:
        """Choose the form of its weights; they cannot be loaded or moved afterwards."""
        for module in self.modules():
            if isinstance(module, Projection):
                module.lay_out(layout)

    def targets(self, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors except ``d2t``."""
        layer = "midlayer." if any(name.startswith("midlayer.") for name in names) else "layers.0."
        yield from self.fc.targets("fc.")
        yield "norm.weight", whole(self.final.norm_E)
        yield f"{layer}input_layernorm.weight", whole(self.embedding_norm_E)
        yield f"{layer}hidden_norm.weight", whole(self.hidden_norm_E)
        yield f"{layer}post_attention_layernorm.weight", whole(self.mlp_residual.norm_E)
        yield from self.mixer.targets(f"{layer}self_attn.")
        yield from self.mlp.targets(f"{layer}mlp.", names)
        if self.embed_ZE is not None:
            yield "embed_tokens.weight", whole(self.embed_ZE)
        if self.head is not None:
            yield from self.head.targets()
        if "t2d" in names:
            yield "t2d", unused(self.vocab_size)
