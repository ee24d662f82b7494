"""Convolutions over time of what the parts of a layer add to the residual stream; the layer keeps their windows.

Shape suffixes: T tokens of the step, E hidden size.
"""

from typing import NamedTuple

from torch import Tensor, nn

from strandline.kernels.arena import LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.expert_choices import Summand
from strandline.kernels.recurrences.rerun import DraftLog
from strandline.models.layers.parts.convolution import CausalConvolution, ResidualTaps
from strandline.models.layers.parts.site import Site
from strandline.specs import LayerSpec


class OutputWindows(NamedTuple):
    """Windows and logs of both convolutions, as ``CausalConvolution.convolve`` takes them."""

    mixer: tuple[Tensor, DraftLog]
    mlp: tuple[Tensor, DraftLog]


class OutputConvolutions(nn.Module):
    """A ``StatefulPart``: a convolution of the mixer's output, and one of the feed-forward part's.

    Every rank convolves what all ranks together add.

    Args:
        scale: see ``ResidualTaps``.
    """

    operations = ()

    def __init__(self, hidden_size: int, num_taps: int, site: Site, scale: float = 1.0) -> None:
        super().__init__()
        taps, other_taps = (ResidualTaps(hidden_size, num_taps, site, scale=scale) for _ in range(2))
        self.mixer = CausalConvolution(taps, None, site, "mixer_window")
        self.mlp = CausalConvolution(other_taps, None, site, "mlp_window")

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._sum = kernels.ranks.sum

    @property
    def spec(self) -> LayerSpec:
        return LayerSpec(states=(self.mixer.window, self.mlp.window), draft_log=(self.mixer.logged, self.mlp.logged))

    def bind(self, memory: LayerMemory) -> OutputWindows:
        """Return the windows and logs, out of a layer's memory."""
        return OutputWindows(self.mixer.bind(memory), self.mlp.bind(memory))

    def rerun(self, batch: StepBatch, memory: OutputWindows) -> None:
        """Advance the windows over logged tokens alone."""
        self.mixer.rerun(batch, *memory.mixer)
        self.mlp.rerun(batch, *memory.mlp)

    def of_mixer(self, out: Summand, batch: StepBatch, memory: OutputWindows) -> Tensor:
        """Return the convolved sum over ranks of the mixer's output."""
        return self.mixer.convolve(self._sum(out), batch, *memory.mixer)

    def of_mlp(self, out: Summand, batch: StepBatch, memory: OutputWindows, scale: Tensor | None = None) -> Tensor:
        """Return the convolved sum over ranks of the feed-forward part's output.

        Args:
            scale: multiplies the sum, in place; None: 1.
        """
        out_TE = self._sum(out)
        return self.mlp.convolve(out_TE if scale is None else out_TE.mul_(scale), batch, *memory.mlp)
