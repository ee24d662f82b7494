"""Adapters of a loaded model that its steps can compute with.

A slot holds what one adapter adds to every projection. A projection of several published weights has ranks of its own
for each of them, so that any fused matrix takes any adapter.

Shape suffixes: S slots, R ranks of all parts of a projection, I inputs, O outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from strandline.errors import ConfigError, WeightsError
from strandline.kernels.gemm.low_rank import AdapterRows, AdapterWeights
from strandline.models.layers.projection import Projection
from strandline.models.layers.targets import Piece, Target
from strandline.models.storage.adapter_files import AdapterFiles
from strandline.models.storage.adapter_names import place_adapter
from strandline.models.storage.low_rank import LowRank, is_matrix
from strandline.models.storage.stored_rows import Rows, base_of, rows_and_sources


class SlotSizes(NamedTuple):
    """How many adapters steps can use at once, and up to which rank."""

    num: int
    max_rank: int


class Part(NamedTuple):
    """The rows of a projection that a piece of a published weight goes to."""

    rows: Rows
    sources: Rows
    """Which rows of the piece these are."""
    piece: Piece


@dataclass(eq=False)
class AdaptedProjection:
    """A projection, and the published weights that it consists of."""

    weights: AdapterWeights
    max_rank: int
    parts: dict[str, list[Part]] = field(default_factory=dict)

    def fill(self, slot: int, changes: Mapping[str, LowRank]) -> None:
        """Write the changes of an adapter."""
        down_RI, up_OR = self.weights.down_SRI[slot], self.weights.up_SOR[slot]
        down_RI.zero_()
        up_OR.zero_()
        for index, (name, parts) in enumerate(self.parts.items()):
            change = changes.get(name)
            if change is None:
                continue
            ranks = slice(index * self.max_rank, index * self.max_rank + change.rank)
            for part in parts:
                rows, columns = (*part.piece.index, slice(None), slice(None))[:2]
                down_RI[ranks] = change.down_RI[:, columns].to(down_RI)
                up_OR[part.rows, ranks] = change.up_OR[rows][part.sources].to(up_OR)


class AdapterSlots:
    """The slots of a model. They are to be made while its weights can still be loaded.

    Args:
        targets: of the model, whose projections outside the decoder take no adapters.
    """

    def __init__(
        self, decoder: nn.Module, targets: Mapping[str, Target], sizes: SlotSizes, device: torch.device | str
    ) -> None:
        self.sizes, self.num_slots, self.device, self.rows = sizes, sizes.num, device, AdapterRows()
        self._shapes = {name: target.shape for name, target in targets.items() if is_matrix(target.shape)}
        fused = {id(inner) for module in decoder.modules() for inner in getattr(module, "fused_projections", ())}
        owners = {
            id(module.weight_OI): module
            for module in decoder.modules()
            if isinstance(module, Projection) and id(module) not in fused
        }
        by_owner = dict[Projection, dict[str, list[Part]]]()
        for name in self._shapes:
            pieces, shape = targets[name].pieces, targets[name].shape
            found = {owners.get(id(base_of(view))) for piece in pieces for view in piece.parts}
            owner = found.pop() if len(found) == 1 else None
            if owner is not None:
                placed = [Part(*rows_and_sources(piece, shape, len(owner.weight_OI)), piece) for piece in pieces]
                by_owner.setdefault(owner, {})[name] = placed
        self._projections = [self._attach(owner, parts) for owner, parts in by_owner.items()]
        self._served = {name for projection in self._projections for name in projection.parts}

    def _attach(self, owner: Projection, parts: dict[str, list[Part]]) -> AdaptedProjection:
        num_outputs, num_inputs = owner.weight_OI.shape
        num_slots, num_ranks, dtype = self.sizes.num, len(parts) * self.sizes.max_rank, owner.weight_OI.dtype
        down_SRI = torch.zeros(num_slots, num_ranks, num_inputs, dtype=dtype, device=self.device)
        up_SOR = torch.zeros(num_slots, num_outputs, num_ranks, dtype=dtype, device=self.device)
        weights = AdapterWeights(down_SRI, up_SOR)
        owner.take_adapters(weights, self.rows)
        return AdaptedProjection(weights, self.sizes.max_rank, parts)

    def changes(self, adapter: AdapterFiles) -> dict[str, LowRank]:
        """Return what an adapter adds to published weights.

        Raises:
            WeightsError: as ``place_adapter``, or it changes a weight that adapters can only be merged into.
            ConfigError: its rank is too large.
        """
        changes = place_adapter(adapter, self._shapes)
        merged = sorted(changes.keys() - self._served)
        if merged:
            raise WeightsError(
                f"{adapter.directory} changes {merged[0]}"
                + (f" and {len(merged) - 1} more" if merged[1:] else "")
                + ", which adapters can only be merged into (--merge-lora)"
            )
        rank = max(change.rank for change in changes.values())
        if rank > self.sizes.max_rank:
            raise ConfigError(f"{adapter.directory} has rank {rank}, more than --max-lora-rank {self.sizes.max_rank}")
        return changes

    def fill(self, slot: int, changes: Mapping[str, LowRank]) -> None:
        """Write an adapter's changes to a slot."""
        for projection in self._projections:
            projection.fill(slot, changes)
