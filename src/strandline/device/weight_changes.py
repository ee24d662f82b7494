"""The weights of a model that is served: their memory is given back, and others of the same model replace them.

Other weights are read, or received from a trainer, and checked as a whole while those in use stay; only then are they
copied into the memory of the former. So a change that fails half-way changes nothing, and captured graphs stay valid.
On a GPU they are read into the host's memory: next to the cache, the GPU has no room for them.
"""

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from strandline.device.hardware.out_of_memory import allocating
from strandline.device.runner import Runner
from strandline.device.sizing import choose_window_blocks
from strandline.device.weights.model_memory import TensorMemory, can_copy, pair_tensors, tensors_of
from strandline.errors import ConfigError, EngineError
from strandline.models.layers.protocol import LanguageModel

ReadModel = Callable[[str | Mapping[str, Tensor]], LanguageModel]
"""Builds a model with the weights in a directory, or with published tensors by their names."""


class WeightChanges:
    """Changes of the weights of a runner's model.

    Args:
        path: the directory that its weights were read from.
    """

    def __init__(self, runner: Runner, path: str) -> None:
        self._runner = runner
        self._path: str | None = path
        """None: they were received."""
        self._read_model: ReadModel | None = None
        self._prepared: tuple[LanguageModel, str | None] | None = None
        self._is_used = False
        """Whether they are computed with, though that may be undone."""
        self._memory = TensorMemory([])
        self._is_lost = False
        """Whether the memory was given back without its contents."""

    def read_with(self, read_model: ReadModel) -> None:
        """Set what reads weights; without, they do not change."""
        self._read_model = read_model

    def prepare(self, source: str | Mapping[str, Tensor]) -> None:
        """Read and check the weights that ``use`` then computes with.

        Raises:
            ConfigError: they cannot be read, or are not the model's.
            OutOfMemoryError: the host has no memory for them.
        """
        if self._read_model is None:
            raise EngineError("no function reads weights")
        self.drop()
        num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(self._module))
        with allocating("new weights, which are read into host memory first,", num_bytes, torch.device("cpu")):
            model = self._read_model(source)
        path = source if isinstance(source, str) else None
        # As the executor chose for the model that is served, whose spec it changed.
        model.spec, ours = choose_window_blocks(model), self._runner.model
        if model.spec != ours.spec or model.vocab_size != ours.vocab_size:
            raise ConfigError(f"{path or 'what was sent'} is another model than the one that is served")
        model.use_kernels(self._runner.kernels)
        if can_copy(self._module):
            pair_tensors(self._module, cast(nn.Module, model))
        self._prepared = model, path

    def use(self) -> bool:
        """Compute with the weights that ``prepare`` has read, once that is confirmed. No step is in flight.

        Raises:
            OutOfMemoryError: their memory cannot be taken again; the weights are as they were.
        """
        if self._prepared is None:
            raise EngineError("no weights were prepared")
        model, _ = self._prepared
        self._memory.take_again()
        if can_copy(self._module):
            for mine, other in pair_tensors(self._module, cast(nn.Module, model)):
                mine.copy_(other)
        else:
            self._runner.use_model(model)
        self._is_used = True
        return True

    def drop(self) -> None:
        """Forget what ``prepare`` has read."""
        self._prepared, self._is_used = None, False

    def give_back(self, *, keeps: bool) -> None:
        """Give the memory of the weights back.

        Args:
            keeps: keep them in the host's memory, where a CPU's weights are already.
        """
        self._memory = TensorMemory(tensors_of(self._module), "the weights")
        self._memory.give_back(keeps=keeps)
        self._is_lost = not keeps

    def forget_kept(self) -> None:
        """Give up the weights that ``give_back`` has kept: they are read again."""
        self._memory.forget()
        self._is_lost = True

    def take_again(self) -> bool:
        """Take the memory again, with the weights; then confirm or undo it. Lost ones that were received stay lost.

        Returns:
            Whether they are there.

        Raises:
            ConfigError: they cannot be read again.
            OutOfMemoryError: there is too little memory for them.
        """
        if not self._is_lost:
            return self._memory.take_again()
        if self._path is None:
            return False
        self._memory.take_again()  # first: to read them may take minutes
        self.prepare(self._path)
        return self.use()

    def confirm(self) -> None:
        """Give up what was kept of the weights before."""
        self._memory.confirm()
        if self._is_used and self._prepared is not None:
            _, self._path = self._prepared
        self._is_lost = False
        self.drop()

    def undo(self) -> None:
        """Give back what was taken again; the weights are as they were when they were given back."""
        self._memory.undo()
        self.drop()

    @property
    def _module(self) -> nn.Module:
        return cast(nn.Module, self._runner.model)
