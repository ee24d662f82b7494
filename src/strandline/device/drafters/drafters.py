"""The choice of what drafts after a step."""

from typing import cast

from strandline.device.drafters.block_drafts import BlockDrafts
from strandline.device.drafters.draft_layer import DraftLayer
from strandline.device.steps.drafter import StepDrafter
from strandline.kernels.binding import Kernels
from strandline.kernels.sampling.verification import LastStep
from strandline.models.layers.protocol import DraftingModel, LanguageModel, ModelMemory


def new_step_drafter(model: LanguageModel, memory: ModelMemory, last: LastStep, kernels: Kernels) -> StepDrafter | None:
    """Return what drafts after a step with the model's drafter; None: the model has none.

    Args:
        memory: an arena as bound by the model.
        last: takes what a step samples.
    """
    if model.drafter is None:
        return None
    kind = DraftLayer if model.drafter.block is None else BlockDrafts
    return kind(cast(DraftingModel, model), memory, last, kernels)
