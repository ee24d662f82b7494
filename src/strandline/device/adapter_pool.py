"""Adapters in host memory, and which of them the slots of a model hold: those that steps have used last."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strandline.device.sampler import SamplingState
from strandline.errors import EngineError, RequestError
from strandline.ids import RequestId
from strandline.kernels.gemm.low_rank import NO_SLOT
from strandline.models.layers.protocol import AdapterMemory
from strandline.models.storage.adapter_files import read_adapter
from strandline.records.adapters import LoadedAdapter
from strandline.records.plan import SequencePlan


class AdapterPool:
    """The adapters of a model, by their digests.

    Args:
        slots: the model's; None: it takes no adapters.
    """

    def __init__(self, slots: AdapterMemory | None) -> None:
        self._slots = slots
        self._changes = dict[str, Mapping[str, Any]]()
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
        changes = self._slots.changes(files)
        self._changes[files.digest] = changes
        return LoadedAdapter(name, path, files.digest, max(change.rank for change in changes.values()))

    def unload(self, digest: str) -> None:
        """Forget an adapter that no request uses. An unknown one is ignored."""
        self._changes.pop(digest, None)
        self._slot_of.pop(digest, None)

    def begin_step(self, sequences: Sequence[SequencePlan], states: Mapping[RequestId, SamplingState]) -> bool:
        """Put the adapters of a step into slots, and note which rows have which; return whether there are any.

        Args:
            sequences: in the order of their rows.
            states: of all requests.
        """
        if self._slots is None:
            return False
        adapters = [states[sequence.request_id].new.adapter for sequence in sequences]
        num_rows = [sequence.end - sequence.start for sequence in sequences]
        slots = {"": NO_SLOT} | {digest: self._slot(digest, adapters) for digest in sorted({*adapters} - {""})}
        self._slots.rows.begin_step([slots[digest] for digest in adapters], num_rows, self._slots.device)
        return any(adapters)

    def _slot(self, digest: str, used: Sequence[str]) -> int:
        """Return the slot of an adapter, which is filled if it has none, instead of the one that was used first."""
        assert self._slots is not None
        if digest not in self._slot_of:
            if digest not in self._changes:
                raise EngineError(f"a request came with the adapter {digest}, which is not loaded")
            slot = len(self._slot_of)
            if slot >= self._slots.num_slots:
                victim = next((each for each in self._slot_of if each not in used), None)
                if victim is None:
                    raise EngineError(f"a step was planned with more than {self._slots.num_slots} adapters")
                slot = self._slot_of.pop(victim)
            self._slots.fill(slot, self._changes[digest])
            self._slot_of[digest] = slot
        self._slot_of.move_to_end(digest)
        return self._slot_of[digest]
