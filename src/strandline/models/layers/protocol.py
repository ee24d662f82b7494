"""The interfaces of a model for the engine and the loader.

Shape suffixes: T tokens of the step, N rows whose logits are wanted, E hidden size, Z tokens of this rank's logits.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from strandline.kernels.arena import ArenaTensors, LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.gemm.low_rank import AdapterRows
from strandline.kernels.gemm.weights import Layout
from strandline.kernels.operation import Operation
from strandline.kernels.recurrences.recurrence import Fold
from strandline.kernels.recurrences.rerun import Rerun
from strandline.models.layers.attention.attention_parts import KVScales
from strandline.models.layers.parts.targets import NamedTargets
from strandline.picture_config import PictureConfig
from strandline.specs import LayerSpec, ModelSpec, RoutingShape


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """An arena bound to one model's kernels, once, and used in every step."""

    layers: tuple[Any, ...]
    """Per layer, what its ``bind`` returned."""
    folds: tuple[Fold, ...]
    """Functions that together fold the logs of all layers."""
    draft: Any = None
    """What the drafter's ``bind`` returned; None: there is none."""
    pictures: Tensor | None = None
    """The memory of encoded pictures: an embedding in each row; None without a vision tower."""
    routing: Tensor | None = None
    """The memory of the experts that tokens are routed to; None: they are not recorded."""
    reruns: tuple[Rerun, ...] = ()
    """Functions that together advance the states of all layers over logged drafts; empty: drafts are not logged."""


class PictureEncoder(Protocol):
    """A vision tower."""

    pictures: PictureConfig

    def __call__(self, pictures: Sequence[Tensor], /) -> Tensor:
        """Return the embeddings of the pictures' tokens, one picture after another, ``[N, E]``.

        Args:
            pictures: uint8 ``[height, width, channels]`` each; sides are multiples of a token's.
        """


class AdapterMemory(Protocol):
    """Slots for LoRA adapters (``models/lora/adapter_slots.py``)."""

    num_slots: int
    device: torch.device | str
    rows: AdapterRows
    """Which rows of a step have which adapter."""

    def read(self, adapter: Any) -> Any:
        """Return an adapter (``AdapterFiles``) as slots take it, which has a ``rank``.

        Raises:
            ConfigError: the model cannot serve it.
        """

    def empty(self) -> Any:
        """Return an adapter that changes nothing, as slots take it."""

    def fill(self, slot: int, image: Any) -> None:
        """Put an adapter into a slot. Steps that have been launched compute with the one before."""


class DraftChain(Protocol):
    """Makes a draft of a block depend on the token before it; a module."""

    def logits_after(self, token_N: Tensor, logits_NZ: Tensor, hidden_NE: Tensor) -> Tensor:
        """Return the logits of drafts.

        Args:
            token_N: before each draft.
            logits_NZ: see ``draft_logits``; not overwritten.
            hidden_NE: hidden states that the logits are of.
        """


class DraftBlock(NamedTuple):
    """The blocks of a drafter: of each sequence the newest token, and masks after it."""

    mask_token_id: int
    first_row: int
    """The row that predicts the first draft. 1: each mask's predicts the token in its position; 0: each row predicts
    the next token, so that there is a mask less."""
    chain: DraftChain | None
    """None: drafts do not depend on each other."""


class Drafter(Protocol):
    """Layers that draft tokens from hidden states of the model; a module.

    What they keep of a token are streams in the model's own blocks, which depend on tokens up to it and, in a draft
    layer, on the next one. So a prefix that is resumed, moved or shared brings along what drafts attend to.
    """

    target_layers: tuple[int, ...]
    """Layers of the model whose outputs it reads in every step; empty: it reads the final hidden states."""
    block: "DraftBlock | None"
    """The blocks that it drafts; None: it drafts one token after the other."""

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        """What its layers keep."""

    def bind(self, memories: Sequence[LayerMemory]) -> Any:
        """Return its layers' memory as its functions take it."""

    def lay_out(self, layout: Layout) -> None:
        """Choose the layout of its weights; they cannot be loaded or moved afterwards."""


class LanguageModel(Protocol):
    """A causal language model."""

    spec: ModelSpec
    """One layer spec per layer; every size in the engine follows from it."""
    vocab_size: int
    max_position: int

    @property
    def embedding_size(self) -> int:
        """Features of a token's embedding."""

    @property
    def adapters(self) -> "AdapterMemory | None":
        """Memory for LoRA adapters that requests name; None: the model takes none."""

    @property
    def drafter(self) -> Drafter | None:
        """What drafts tokens; None: the model has none."""

    @property
    def tower(self) -> PictureEncoder | None:
        """What encodes pictures; None: the model reads text alone."""

    @property
    def routing_shape(self) -> RoutingShape | None:
        """What is recorded of the experts that tokens are routed to; None: nothing."""

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        """Operations that it uses."""

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels; called once, before ``bind`` and ``forward``."""

    def bind(self, arena: ArenaTensors) -> ModelMemory:
        """Return the arena as ``forward`` takes it."""

    def computing_distinct_layers(self) -> AbstractContextManager[None]:
        """Until the context ends, let ``forward`` leave out layers that launch the kernels of others."""

    def forward(self, batch: StepBatch, memory: ModelMemory) -> Tensor:
        """Return the final, normalised ``hidden_TE`` of every row of the step, and advance the memory.

        Features that a drafter reads of the same tokens may follow in each row.
        """

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Return logits of this rank's part of the vocabulary (``columns_of``), in the dtype of the activations."""


class DraftingModel(LanguageModel, Protocol):
    """A language model with a drafter."""

    def draft(self, batch: StepBatch, hidden_TE: Tensor, memory: ModelMemory, rows_N: Tensor | None = None) -> Tensor:
        """Return hidden states whose logits predict the token after each of the batch's, by the draft layer.

        Args:
            rows_N: rows of the batch whose hidden states are returned; None: all.
        """

    def draft_logits(self, hidden_NE: Tensor) -> Tensor:
        """Return logits of this rank's part of the tokens that are drafted, up to a monotonic function."""

    def keep_for_drafts(self, batch: StepBatch, hidden_TE: Tensor, memory: ModelMemory) -> None:
        """Store the keys and values that ``draft`` would, without drafting."""

    def draft_block(self, batch: StepBatch, memory: ModelMemory, rows_N: Tensor) -> Tensor:
        """Return normalised hidden states of some rows of blocks, by a drafter of blocks.

        Args:
            batch: each sequence's last known token, and masks after it, whose keys and values are overwritten.
            rows_N: rows of the batch whose hidden states are returned.
        """


class LoadableModel(LanguageModel, Protocol):
    """A language model whose weights come from published files."""

    skipped_prefixes: tuple[str, ...]
    """Prefixes of published tensors that the family has no use for, beside those of all models."""

    @property
    def kv_scales(self) -> Mapping[int, KVScales]:
        """Scales of keys and values, by layer; to be set before ``bind``."""

    def limit_drafts(self, num_tokens: int) -> None:
        """Draft only tokens whose ids are below ``num_tokens``; called before ``use_kernels``."""

    def lay_out(self, layout: Layout) -> None:
        """Choose the layout of the weights; they cannot be loaded or moved afterwards."""

    def round_draft_head(self) -> None:
        """Draft with the output head in FP8, in memory of its own; called after ``lay_out``, before ``use_kernels``."""

    def targets(self, names: frozenset[str]) -> NamedTargets:
        """Yield the required published tensors with their targets, given the published ``names``."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """See ``torch.nn.Module``."""
