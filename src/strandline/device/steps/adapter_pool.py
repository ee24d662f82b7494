"""Adapters in host memory, and which of them the slots of a model hold: those that steps have used last."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from strandline.device.sampling.sampling_state import SamplingState
from strandline.errors import EngineError, RequestError
from strandline.ids import RequestId
from strandline.kernels.gemm.low_rank import NO_SLOT, TiledRows
from strandline.models.layers.protocol import AdapterMemory
from strandline.models.lora.adapter_files import read_adapter
from strandline.records.adapters import LoadedAdapter
from strandline.records.plan import SequencePlan

EMPTY: Final = "empty"
"""Stands for the digest of an adapter that changes nothing."""


class AdapterPool:
    """The adapters of a model, by their digests.

    Args:
        slots: the model's; None: it takes no adapters.
    """

    def __init__(self, slots: AdapterMemory | None) -> None:
        self._slots = slots
        self._images = dict[str, Any]()
        """Loaded adapters as slots take them."""
        self._slot_of = OrderedDict[str, int]()
        """Adapters that slots hold, those used last at the end."""

    def load(self, name: str, path: str) -> LoadedAdapter:
        """Read an adapter; return it with its digest. Reading one that is loaded changes nothing.

        Raises:
            RequestError: the engine takes no adapters.
            ConfigError: the adapter cannot be read, is not the model's, or has too large a rank.
        """
        if self._slots is None:
            raise RequestError("the engine takes no LoRA adapters: start it with --enable-lora")
        files = read_adapter(Path(path).expanduser())
        self._images[files.digest] = image = self._slots.read(files)
        return LoadedAdapter(name, path, files.digest, image.rank)

    def load_empty(self) -> str:
        """Add an adapter that changes nothing, for warm-up requests; return its digest."""
        if self._slots is None:
            raise EngineError("an engine that takes no LoRA adapters was to warm up with one")
        self._images[EMPTY] = self._slots.empty()
        return EMPTY

    def unload(self, digest: str) -> None:
        """Forget an adapter that no request uses. An unknown one is ignored."""
        self._images.pop(digest, None)
        self._slot_of.pop(digest, None)

    def begin_step(
        self, sequences: Sequence[SequencePlan], states: Mapping[RequestId, SamplingState]
    ) -> np.ndarray | None:
        """Put the adapters of a step into slots; return the slot of each sequence, or None: no sequence has one.

        Args:
            states: states of all requests.
        """
        if self._slots is None:
            return None
        adapters = [states[sequence.request_id].new.adapter for sequence in sequences]
        if not any(adapters):
            return None
        slots = {"": NO_SLOT} | {digest: self._slot(digest, adapters) for digest in sorted({*adapters} - {""})}
        return np.array([slots[digest] for digest in adapters], dtype=np.int64)

    def compute_with(self, tiled: TiledRows | None) -> None:
        """Let the model compute with the adapters of these rows; None: no row has one."""
        if self._slots is not None:
            self._slots.rows.tiled = tiled

    def _slot(self, digest: str, used: Sequence[str]) -> int:
        """Return the slot of an adapter, which is filled if it has none, instead of the one that was used first."""
        assert self._slots is not None
        if digest not in self._slot_of:
            if digest not in self._images:
                raise EngineError(f"a request came with the adapter {digest}, which is not loaded")
            free = {*range(self._slots.num_slots)} - {*self._slot_of.values()}
            if free:
                slot = min(free)
            else:
                victim = next((each for each in self._slot_of if each not in used), None)
                if victim is None:
                    raise EngineError(f"a step was planned with more than {self._slots.num_slots} adapters")
                slot = self._slot_of.pop(victim)
            self._slots.fill(slot, self._images[digest])
            self._slot_of[digest] = slot
        self._slot_of.move_to_end(digest)
        return self._slot_of[digest]
