"""Adapters of a loaded model that its steps can compute with.

A slot holds what one adapter adds to every projection, in memory that stays where it is: CUDA graphs that were captured
before an adapter is put into a slot compute with it. A projection of several published weights has factors of its own
for each of them, so that any fused matrix takes any adapter.

Shape suffixes: S slots, P published weights of a projection (its parts), Q those of all projections, and columns
between them (``ALIGNED_PARTS``), R ranks, I inputs, O outputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from strandline.errors import ConfigError, WeightsError
from strandline.kernels.gemm.low_rank import AdapterRows, Adapters, AdapterWeights
from strandline.kernels.sizes import DIVISOR, round_up
from strandline.models.layers.decoder import Decoder
from strandline.models.layers.parts.projection import Projection
from strandline.models.layers.parts.targets import Piece, Target, base_of
from strandline.models.lora.adapter_files import AdapterFiles
from strandline.models.lora.adapter_names import place_adapter
from strandline.models.lora.low_rank import LowRank, is_matrix
from strandline.models.storage.stored_rows import Rows, rows_and_sources

ALIGNED_PARTS: Final = 4
"""A projection's ranks begin at a multiple, of 16 bytes: kernels are compiled once for all projections."""


class SlotSizes(NamedTuple):
    """How many adapters steps can use at once, up to which rank, and what they may change."""

    num: int
    max_rank: int
    modules: frozenset[str] = frozenset()
    """Last parts of modules' names; empty: all modules."""

    def may_change(self, name: str) -> bool:
        """Return whether adapters may change a published weight."""
        return not self.modules or name.removesuffix(".weight").rpartition(".")[2] in self.modules


class Part(NamedTuple):
    """The rows of a projection that a piece of a published weight goes to."""

    rows: Rows
    sources: Rows
    """Which rows of the piece these are."""
    piece: Piece


class Factors(NamedTuple):
    """What an adapter adds to a projection, on the host, in the dtype of slots."""

    down_PRI: Tensor
    up_OR: Tensor


class AdapterImage(NamedTuple):
    """An adapter as slots take it, in pinned memory where these are on a GPU."""

    factors: Mapping["AdaptedProjection", Factors]
    rank_Q: Tensor
    """int32 ranks of all parts; 0: it does not change the part."""

    @property
    def rank(self) -> int:
        return int(self.rank_Q.max())


@dataclass(eq=False)
class AdaptedProjection:
    """A projection, and the published weights that it consists of."""

    weights: AdapterWeights
    parts: Mapping[str, Sequence[Part]]

    def factors(self, changes: Mapping[str, LowRank]) -> Factors | None:
        """Return what changes of published weights add; None: nothing."""
        rank = max((changes[name].rank for name in self.parts if name in changes), default=0)
        if not rank:
            return None
        _, num_parts, _, num_inputs = self.weights.down_SPRI.shape
        dtype = self.weights.up_SOR.dtype
        down_PRI = torch.zeros(num_parts, rank, num_inputs, dtype=dtype)
        up_OR = torch.zeros(self.weights.up_SOR.shape[1], rank, dtype=dtype)
        for index, (name, parts) in enumerate(self.parts.items()):
            if (change := changes.get(name)) is None:
                continue
            for part in parts:
                rows, columns = (*part.piece.index, slice(None), slice(None))[:2]
                down_PRI[index, : change.rank] = change.down_RI[:, columns].to(dtype)
                up_OR[part.rows, : change.rank] = change.up_OR[rows][part.sources].to(dtype)
        return Factors(down_PRI, up_OR)

    def fill(self, slot: int, factors: Factors) -> None:
        """Write what an adapter adds, without waiting for the device."""
        rank = factors.up_OR.shape[1]
        self.weights.down_SPRI[slot, :, :rank].copy_(factors.down_PRI, non_blocking=True)
        self.weights.up_SOR[slot, :, :rank].copy_(factors.up_OR, non_blocking=True)


class AdapterSlots:
    """The slots of a model. They are to be made while its weights can still be loaded.

    Args:
        targets: targets of the model, whose projections outside the decoder take no adapters.
    """

    def __init__(
        self, decoder: Decoder, targets: Mapping[str, Target], sizes: SlotSizes, device: torch.device | str
    ) -> None:
        self.sizes, self.num_slots, self.device, self.rows = sizes, sizes.num, device, AdapterRows()
        self._targets = targets
        self._shapes = {name: target.shape for name, target in targets.items() if is_matrix(target.shape)}
        # The head multiplies other rows than those of the step.
        projections = (x for x in decoder.modules() if isinstance(x, Projection) and x is not decoder.embedding.head)
        owners = {id(projection.weight_OI): projection for projection in projections}
        by_owner = dict[Projection, dict[str, list[Part]]]()
        for name in filter(sizes.may_change, self._shapes):
            pieces, shape = targets[name].pieces, targets[name].shape
            found = {owners.get(id(base_of(view))) for piece in pieces for view in piece.parts}
            owner = found.pop() if len(found) == 1 else None
            if owner is not None:
                placed = [Part(*rows_and_sources(piece, shape, len(owner.weight_OI)), piece) for piece in pieces]
                by_owner.setdefault(owner, {})[name] = placed
        num_columns = round_up(sum(round_up(len(parts), ALIGNED_PARTS) for parts in by_owner.values()), DIVISOR)
        self._rank_SQ = torch.zeros(self.num_slots, num_columns, dtype=torch.int32, device=device)
        self._columns = dict[str, int]()
        self._projections = list[AdaptedProjection]()
        for owner, parts in by_owner.items():
            self._attach(owner, parts)

    def _attach(self, owner: Projection, parts: Mapping[str, Sequence[Part]]) -> None:
        num_outputs, num_inputs = owner.weight_OI.shape
        num_slots, max_rank, _ = self.sizes
        start, device = round_up(max(self._columns.values(), default=-1) + 1, ALIGNED_PARTS), self.device
        self._columns |= {name: start + index for index, name in enumerate(parts)}
        part_O = torch.full((num_outputs,), -1, dtype=torch.int32)
        for index, placed in enumerate(parts.values()):
            for part in placed:
                part_O[part.rows] = index
        dtype = owner.weight_OI.dtype
        weights = AdapterWeights(
            torch.empty(num_slots, len(parts), max_rank, num_inputs, dtype=dtype, device=device),
            torch.empty(num_slots, num_outputs, max_rank, dtype=dtype, device=device),
            self._rank_SQ[:, start : start + len(parts)],
            part_O.to(device),
        )
        owner.adapters = Adapters(weights, self.rows)
        self._projections.append(AdaptedProjection(weights, parts))

    def read(self, adapter: AdapterFiles) -> AdapterImage:
        """Return an adapter as slots take it.

        Raises:
            WeightsError: as ``place_adapter``, or it changes a weight that adapters can only be merged into.
            ConfigError: its rank is too large, or it changes a weight that adapters may not change.
        """
        changes = place_adapter(adapter, self._targets)
        other = next((name for name in changes if not self.sizes.may_change(name)), None)
        if other is not None:
            raise ConfigError(
                f"{adapter.directory} changes {other}; adapters may change {', '.join(sorted(self.sizes.modules))}: "
                "add it to --lora-target-modules"
            )
        merged = sorted(changes.keys() - self._columns.keys())
        if merged:
            raise WeightsError(
                f"{adapter.directory} changes {merged[0]}"
                + (f" and {len(merged) - 1} more" if merged[1:] else "")
                + ", which adapters can only be merged into (--merge-lora)"
            )
        rank = max(change.rank for change in changes.values())
        if rank > self.sizes.max_rank:
            raise ConfigError(f"{adapter.directory} has rank {rank}, more than --max-lora-rank {self.sizes.max_rank}")
        found = [(projection, projection.factors(changes)) for projection in self._projections]
        if not all(bool(factor.isfinite().all()) for _, factors in found for factor in factors or ()):
            raise WeightsError(f"{adapter.directory} has numbers that are too large for the model's dtype")
        rank_Q = self._no_ranks()
        for name, change in changes.items():
            rank_Q[self._columns[name]] = change.rank
        return AdapterImage(
            {projection: Factors(*map(self._pinned, factors)) for projection, factors in found if factors is not None},
            self._pinned(rank_Q),
        )

    def _pinned(self, values: Tensor) -> Tensor:
        return values.pin_memory() if self._rank_SQ.is_cuda else values

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the published weights that adapters may change, by name."""
        return {name: self._shapes[name] for name in self._columns}

    def empty(self) -> AdapterImage:
        """Return an adapter that changes nothing."""
        return AdapterImage({}, self._no_ranks())

    def _no_ranks(self) -> Tensor:
        return torch.zeros_like(self._rank_SQ[0], device="cpu")

    def fill(self, slot: int, image: AdapterImage) -> None:
        """Put an adapter into a slot. Steps that have been launched compute with the one before."""
        self._rank_SQ[slot].copy_(image.rank_Q, non_blocking=True)
        for projection, factors in image.factors.items():
            projection.fill(slot, factors)
