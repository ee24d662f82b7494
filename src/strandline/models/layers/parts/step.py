"""What all mixers of a step read besides hidden states and their memory."""

from typing import NamedTuple

from strandline.kernels.batch import StepBatch
from strandline.models.layers.parts.rotary import RotaryTable


class Step(NamedTuple):
    """A step's tokens, as mixers take them."""

    batch: StepBatch
    rotary: RotaryTable | None
    """Rotary table of the step's positions; None: the model embeds none."""
    windowed_rotary: RotaryTable | None = None
    """That of layers with a window; None: as of all layers."""

    def rotary_of(self, window_tokens: int | None) -> RotaryTable | None:
        """Return the rotary table of a layer, given its window."""
        return self.rotary if window_tokens is None or self.windowed_rotary is None else self.windowed_rotary
