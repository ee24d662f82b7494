"""What all mixers of a step read besides hidden states and their memory."""

from typing import NamedTuple

from strandline.kernels.batch import StepBatch
from strandline.models.layers.rotary import RotaryTable


class Step(NamedTuple):
    """A step's tokens, as mixers take them."""

    batch: StepBatch
    rotary: RotaryTable | None
    """Rotary table of the step's positions; None: the model embeds none."""
