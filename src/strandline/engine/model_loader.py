"""Loads an engine's model, and other weights of it later."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from strandline.drafter_config import DrafterConfig
from strandline.kernels.gemm.weights import DenseWeight, Layout
from strandline.model_config import ModelConfig
from strandline.models.drafter_weights import load_drafter
from strandline.models.families.causal_lm import CausalLM
from strandline.models.model_options import ModelOptions
from strandline.models.weights import FillOptions, LoadedModel, load_model
from strandline.text.model_files import find_model


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoader:
    """Loads an engine's model; each time, also the drafter, if it has files of its own."""

    name: str
    """Its directory, or its name on a hub."""
    config: ModelConfig
    options: ModelOptions
    filling: FillOptions
    layout: Layout
    drafter: DrafterConfig | None
    """A drafter that has its own files."""
    draft_vocab_size: int | None
    """Most tokens that are drafted; None: all."""
    has_rounded_head: bool
    """Whether drafts take an output head in FP8."""

    def load(self) -> LoadedModel:
        """Load the model with its own weights."""
        return self.load_other(self.name)

    def load_other(self, source: str | Mapping[str, Tensor]) -> LoadedModel:
        """Load the model with the weights in a directory, or with published tensors."""
        # Random weights stand for the model's own alone.
        filling = self.filling if source == self.name else replace(self.filling, load_format="auto")
        path, tensors = (source, None) if isinstance(source, str) else (self.name, source)
        return self._complete(load_model(find_model(path), self.options, filling, config=self.config, tensors=tensors))

    def for_changes_of(self, model: LoadedModel) -> "ModelLoader":
        """Return what loads other weights of a model for it: quantised as its own, and into the host's memory."""
        loader = replace(self, filling=replace(self.filling, quantized_as=model.weights_report.stored))
        if torch.device(self.options.device).type == "cpu":
            return loader
        # Loaded on the host, but laid out as on the GPU, so that weights are copied there as they are.
        return replace(loader, options=replace(self.options, device=torch.device("cpu")), layout=DenseWeight)

    def _complete(self, model: LoadedModel) -> LoadedModel:
        """Load the drafter, limit what is drafted, and lay out the weights."""
        if self.drafter is not None:
            load_drafter(cast(CausalLM, model), self.drafter, self.options, self.filling)
        if self.draft_vocab_size is not None:
            model.limit_drafts(self.draft_vocab_size)
        if torch.device(self.options.device).type == "meta":
            cast(CausalLM, model).keep_distinct_layers()
        model.lay_out(self.layout)
        if self.has_rounded_head:
            model.round_draft_head()
        return model
