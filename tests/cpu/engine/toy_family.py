"""A synthetic model family that shares nothing with published ones but the interfaces.

Its layers keep three streams of different widths and dtypes; a recurrent state, with or without a log, and windows of
two lengths and dtypes; a stream beside a window; and nothing at all. Beside every mixer stands its reference: the same
over a whole sequence, without memory. Both compute in float64 and round where the memory does.

Shape suffixes: T tokens of one sequence or of the step, C its context, E hidden size, K channels of a key, V of a
value, P tokens in a block, B blocks, S slots, R stacked layers, Z vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from strandline.ids import BLOCK_TOKENS, NULL_BLOCK, NULL_LOG, NULL_SLOT
from strandline.kernels.arena import ArenaTensors, LayerMemory
from strandline.kernels.batch import LogBatch, Slots, StepBatch
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.recurrences.recurrence import Recurrence, bind_folds
from strandline.models.layers.protocol import ModelMemory
from strandline.specs import LayerSpec, LogSpec, ModelSpec, TensorSpec

VOCAB_SIZE, HIDDEN_SIZE = 31, 12
KEY_DIM, VALUE_DIM = 3, 5
LOG_TOKENS = 5
NEAR, FAR = 1, 4
"""Inputs that the two windows hold."""


class Random:
    """Makes weights: the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self._generator, dtype=torch.float64) * columns**-0.5


def sequences(batch: StepBatch) -> Iterator[tuple[int, slice]]:
    """Yield the index and the rows of every sequence of the step."""
    starts = batch.attention.query_starts
    for index in range(len(starts) - 1):
        yield index, slice(starts[index], starts[index + 1])


def store_stream(stream_BP: Tensor, values_T: Tensor, batch: StepBatch) -> None:
    """Write the step's tokens into their blocks."""
    blocks_T, offsets_T = batch.attention.write_blocks_T, batch.attention.write_offsets_T
    rows = (blocks_T != NULL_BLOCK).nonzero().squeeze(-1)
    stream_BP[blocks_T[rows], offsets_T[rows]] = values_T[rows].to(stream_BP.dtype)


def load_stream(stream_BP: Tensor, batch: StepBatch, index: int) -> Tensor:
    """Return a stream of one sequence's whole context, in float64."""
    num_tokens = batch.attention.context_lens[index]
    num_blocks = -(-num_tokens // BLOCK_TOKENS)
    blocks = batch.attention.block_table_NM[index, :num_blocks].long()
    return stream_BP[blocks].flatten(0, 1)[:num_tokens].double()


class ThreeStreams:
    """Attention by a narrow key to a wider value, beside the mean of a number that belongs to the token."""

    recurrence = None

    def __init__(self, random: Random) -> None:
        self.query_KE, self.key_KE = random.matrix(KEY_DIM, HIDDEN_SIZE), random.matrix(KEY_DIM, HIDDEN_SIZE)
        self.value_VE = random.matrix(2 * VALUE_DIM, HIDDEN_SIZE)
        self.out_EV = random.matrix(HIDDEN_SIZE, 2 * VALUE_DIM + 1)

    @property
    def spec(self) -> LayerSpec:
        return LayerSpec(
            streams=(
                TensorSpec("key", (KEY_DIM,), "float32"),
                TensorSpec("value", (2, VALUE_DIM), "float16"),
                TensorSpec("label", (1,), "uint8"),
            )
        )

    def bind(self, memory: LayerMemory) -> tuple[Tensor, ...]:
        return tuple(memory.streams[name] for name in ("key", "value", "label"))

    def __call__(self, hidden_TE: Tensor, batch: StepBatch, memory: tuple[Tensor, ...]) -> Tensor:
        query_TK, *kept = self._project(hidden_TE, batch.token_ids_T)
        for stream, values in zip(memory, kept, strict=True):
            store_stream(stream, values, batch)
        outs = []
        for index, rows in sequences(batch):
            context = (load_stream(stream, batch, index) for stream in memory)
            outs.append(self._attend(query_TK[rows], *context))
        return torch.cat(outs) @ self.out_EV.T

    def reference(self, hidden_TE: Tensor, token_ids_T: Tensor) -> Tensor:
        query_TK, key_TK, value_TGV, label_T1 = self._project(hidden_TE, token_ids_T)
        return self._attend(query_TK, key_TK.double(), value_TGV.double(), label_T1.double()) @ self.out_EV.T

    def _project(self, hidden_TE: Tensor, token_ids_T: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        value_TGV = (hidden_TE @ self.value_VE.T).view(-1, 2, VALUE_DIM)
        label_T1 = (token_ids_T % 5).to(torch.uint8)[:, None]
        return hidden_TE @ self.query_KE.T, (hidden_TE @ self.key_KE.T).float(), value_TGV.half(), label_T1

    def _attend(self, query_TK: Tensor, key_CK: Tensor, value_CGV: Tensor, label_C1: Tensor) -> Tensor:
        num_queries, num_tokens = len(query_TK), len(key_CK)
        is_hidden_TC = torch.ones(num_queries, num_tokens).triu(num_tokens - num_queries + 1).bool()
        weight_TC = (query_TK @ key_CK.T).masked_fill(is_hidden_TC, -torch.inf).softmax(-1)
        mean_TC = (~is_hidden_TC).double() / (~is_hidden_TC).sum(-1, keepdim=True)
        return torch.cat((weight_TC @ value_CGV.flatten(1), mean_TC @ label_C1), dim=-1)


class DecayedInputs(NamedTuple):
    """What some tokens read and write, and how much each leaves of what was there."""

    query_TK: Tensor
    key_TK: Tensor
    value_TV: Tensor
    decay_T: Tensor


class DecayedMemory(NamedTuple):
    """The recurrence's share of slots and logs."""

    sum_SKV: Tensor
    log: tuple[Tensor, Tensor, Tensor] | None


@dataclass(frozen=True)
class DecayedSum:
    """``S <- decay S + key value^T; out = S^T query``, a recurrence; its log keeps key, value and decay."""

    keeps_log: bool

    @property
    def states(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("sum", (KEY_DIM, VALUE_DIM), "float32", is_recurrent=True),)

    @property
    def log(self) -> LogSpec | None:
        widths = {"logged_key": (KEY_DIM,), "logged_value": (VALUE_DIM,), "logged_decay": ()}
        tensors = tuple(TensorSpec(name, (LOG_TOKENS, *width), "float32") for name, width in widths.items())
        return LogSpec(LOG_TOKENS, tensors) if self.keeps_log else None

    def bind(self, states: Mapping[str, Tensor], log: Mapping[str, Tensor] | None) -> DecayedMemory:
        names = ("logged_key", "logged_value", "logged_decay")
        key, value, decay = (log[name] for name in names) if log else (None, None, None)
        return DecayedMemory(states["sum"], None if key is None else (key, value, decay))

    def prefill(self, inputs: DecayedInputs, memory: DecayedMemory, slots: Slots, chunks: ChunkTable) -> Tensor:
        states = [self._committed(memory, src) for src in slots.src_N.tolist()]
        outs = []
        for index, dst in enumerate(slots.dst_N.tolist()):
            for chunk in range(chunks.first_chunks[index], chunks.first_chunks[index + 1]):
                start = chunks.starts[chunk]
                for row in range(start, start + chunks.lengths[chunk]):
                    states[index], out_V = advance(states[index], *(x[row] for x in inputs))
                    outs.append(out_V)
                store_slot(memory.sum_SKV, chunks.cut_slots[chunk], states[index])
            store_slot(memory.sum_SKV, dst, states[index])
        return torch.stack(outs)

    def decode(self, inputs: DecayedInputs, memory: DecayedMemory, slots: Slots, log: LogBatch | None) -> Tensor:
        states = [self._committed(memory, src) for src in slots.src_N.tolist()]
        outs = []
        for index, (state_KV, dst) in enumerate(zip(states, slots.dst_N.tolist(), strict=True)):
            log_id, num_logged = (int(log.log_N[index]), log.lens[index]) if log else (NULL_LOG, 0)
            current_KV = self._unlogged(state_KV, memory, log_id, num_logged)
            new_KV, out_V = advance(current_KV, *(x[index] for x in inputs))
            outs.append(out_V)
            if log is None or log.num_folded[index]:
                store_slot(memory.sum_SKV, dst, new_KV)
            elif dst != NULL_SLOT and memory.log is not None:
                for kept, values in zip(memory.log, inputs[1:], strict=True):
                    kept[log_id, num_logged] = values[index]
        return torch.stack(outs)

    def fold(self, memory: DecayedMemory, slot_N: Tensor, log_N: Tensor, len_N: Tensor) -> None:
        assert memory.log is not None
        for layer, sum_SKV in enumerate(memory.sum_SKV):
            own = DecayedMemory(sum_SKV, tuple(kept[layer] for kept in memory.log))  # type: ignore[arg-type]
            for slot, log, num_tokens in zip(slot_N.tolist(), log_N.tolist(), len_N.tolist(), strict=True):
                sum_SKV[slot] = self._unlogged(sum_SKV[slot].double(), own, log, num_tokens)

    def _committed(self, memory: DecayedMemory, slot: int) -> Tensor:
        return memory.sum_SKV[slot].double() if slot != NULL_SLOT else torch.zeros(KEY_DIM, VALUE_DIM).double()

    def _unlogged(self, state_KV: Tensor, memory: DecayedMemory, log: int, num_tokens: int) -> Tensor:
        """Return the state after the tokens in a log."""
        for index in range(num_tokens):
            assert memory.log is not None
            key_K, value_V, decay = (kept[log, index].double() for kept in memory.log)
            state_KV = decay * state_KV + torch.outer(key_K, value_V)
        return state_KV


def advance(state_KV: Tensor, query_K: Tensor, key_K: Tensor, value_V: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state after one token, and its output."""
    state_KV = decay * state_KV + torch.outer(key_K, value_V)
    return state_KV, state_KV.T @ query_K


def store_slot(state_S: Tensor, slot: int, value: Tensor) -> None:
    """Write a state to a slot; drop it if that is the null slot."""
    if slot != NULL_SLOT:
        state_S[slot] = value.to(state_S.dtype)


class Windows:
    """The last inputs of a layer, kept in slots: token-major, oldest first."""

    def __init__(self, name: str, num_inputs: int, dtype: torch.dtype) -> None:
        self.spec = TensorSpec(name, (num_inputs, HIDDEN_SIZE), str(dtype).removeprefix("torch."))
        self._num_inputs, self._dtype = num_inputs, dtype

    def delayed(self, hidden_TE: Tensor, batch: StepBatch, window_SE: Tensor) -> Tensor:
        """Return, per token, the input ``num_inputs`` tokens before, and keep the last ones in slots and cuts."""
        slots, chunks, num_decodes = batch.recurrent, batch.recurrent.chunks, batch.num_decodes
        rounded_TE = hidden_TE.to(self._dtype)
        windows = [
            window_SE[src].clone() if src != NULL_SLOT else torch.zeros_like(window_SE[0])
            for src in slots.src_N.tolist()
        ]
        outs = []
        for index, rows in sequences(batch):
            inputs_XE = torch.cat((windows[index], rounded_TE[rows]))
            outs.append(inputs_XE[: -self._num_inputs])
            store_slot(window_SE, int(slots.dst_N[index]), inputs_XE[-self._num_inputs :])
            if index >= num_decodes:
                first, last = chunks.first_chunks[index - num_decodes :][:2]
                end = 0
                for chunk in range(first, last):
                    end += chunks.lengths[chunk]
                    store_slot(window_SE, chunks.cut_slots[chunk], inputs_XE[end : end + self._num_inputs])
        return torch.cat(outs).double()

    def reference(self, hidden_TE: Tensor) -> Tensor:
        zeros = torch.zeros(self._num_inputs, HIDDEN_SIZE, dtype=self._dtype)
        return torch.cat((zeros, hidden_TE.to(self._dtype)))[: -self._num_inputs].double()


class RecurrentWithWindows:
    """Two delayed copies of the input, added to it, then a decayed sum; no streams."""

    def __init__(self, random: Random, *, keeps_log: bool) -> None:
        self.recurrence = DecayedSum(keeps_log)
        self.near, self.far = Windows("near", NEAR, torch.float32), Windows("far", FAR, torch.float16)
        self.sizes = [KEY_DIM, KEY_DIM, VALUE_DIM, 1]
        self.in_proj_OE = random.matrix(sum(self.sizes), HIDDEN_SIZE)
        self.out_EV = random.matrix(HIDDEN_SIZE, VALUE_DIM)

    @property
    def spec(self) -> LayerSpec:
        return LayerSpec(
            states=(self.near.spec, *self.recurrence.states, self.far.spec),
            log=self.recurrence.log,
        )

    def bind(self, memory: LayerMemory) -> tuple[DecayedMemory, Tensor, Tensor]:
        return self.recurrence.bind(memory.states, memory.log), memory.states["near"], memory.states["far"]

    def __call__(self, hidden_TE: Tensor, batch: StepBatch, memory: tuple[DecayedMemory, Tensor, Tensor]) -> Tensor:
        recurrent, near_SE, far_SE = memory
        delayed_TE = 0.5 * self.near.delayed(hidden_TE, batch, near_SE) - self.far.delayed(hidden_TE, batch, far_SE)
        inputs = self._project(hidden_TE + delayed_TE)
        num_decodes, outs = batch.num_decodes, []
        if num_decodes:
            decoded = DecayedInputs(*(x[:num_decodes] for x in inputs))
            outs.append(self.recurrence.decode(decoded, recurrent, batch.decode_slots, batch.recurrent.log))
        if num_decodes < len(hidden_TE):
            prefilled = DecayedInputs(*(x[num_decodes:] for x in inputs))
            outs.append(self.recurrence.prefill(prefilled, recurrent, batch.prefill_slots, batch.recurrent.chunks))
        return torch.cat(outs) @ self.out_EV.T

    def reference(self, hidden_TE: Tensor, token_ids_T: Tensor) -> Tensor:
        del token_ids_T
        delayed_TE = 0.5 * self.near.reference(hidden_TE) - self.far.reference(hidden_TE)
        state_KV, outs = torch.zeros(KEY_DIM, VALUE_DIM).double(), []
        for row in zip(*self._project(hidden_TE + delayed_TE), strict=True):
            state_KV, out_V = advance(state_KV, *row)
            outs.append(out_V)
        return torch.stack(outs) @ self.out_EV.T

    def _project(self, hidden_TE: Tensor) -> DecayedInputs:
        query_TK, key_TK, value_TV, decay_T1 = (hidden_TE @ self.in_proj_OE.T).split(self.sizes, dim=-1)
        return DecayedInputs(query_TK, key_TK, value_TV, 1 - 0.1 * decay_T1.squeeze(-1).sigmoid())


class StreamAndWindow:
    """The mean of a stream over the context, beside the input of some tokens before: memory of both kinds, no log."""

    recurrence = None

    def __init__(self, random: Random) -> None:
        self.window = Windows("behind", FAR - 1, torch.bfloat16)
        self.mean_VE, self.out_EV = random.matrix(VALUE_DIM, HIDDEN_SIZE), random.matrix(HIDDEN_SIZE, VALUE_DIM)

    @property
    def spec(self) -> LayerSpec:
        return LayerSpec((TensorSpec("summand", (1, VALUE_DIM), "bfloat16"),), (self.window.spec,))

    def bind(self, memory: LayerMemory) -> tuple[Tensor, Tensor]:
        return memory.streams["summand"], memory.states["behind"]

    def __call__(self, hidden_TE: Tensor, batch: StepBatch, memory: tuple[Tensor, Tensor]) -> Tensor:
        stream_BP1V, window_SE = memory
        delayed_TE = self.window.delayed(hidden_TE, batch, window_SE)
        store_stream(stream_BP1V, (hidden_TE @ self.mean_VE.T)[:, None], batch)
        outs = [
            self._means(load_stream(stream_BP1V, batch, index), rows.stop - rows.start)
            for index, rows in sequences(batch)
        ]
        return torch.cat(outs) @ self.out_EV.T + delayed_TE

    def reference(self, hidden_TE: Tensor, token_ids_T: Tensor) -> Tensor:
        del token_ids_T
        summand_C1V = (hidden_TE @ self.mean_VE.T)[:, None].bfloat16().double()
        return self._means(summand_C1V, len(hidden_TE)) @ self.out_EV.T + self.window.reference(hidden_TE)

    def _means(self, summand_C1V: Tensor, num_tokens: int) -> Tensor:
        counts_C1 = torch.arange(1, len(summand_C1V) + 1)[:, None]
        return (summand_C1V.squeeze(1).cumsum(0) / counts_C1)[-num_tokens:]


class Feedforward:
    """A layer that keeps nothing."""

    recurrence = None
    spec = LayerSpec()

    def __init__(self, random: Random) -> None:
        self.up_FE, self.down_EF = random.matrix(20, HIDDEN_SIZE), random.matrix(HIDDEN_SIZE, 20)

    def bind(self, memory: LayerMemory) -> None:
        """Keep nothing."""

    def __call__(self, hidden_TE: Tensor, batch: StepBatch, memory: None) -> Tensor:
        return self.reference(hidden_TE, batch.token_ids_T)

    def reference(self, hidden_TE: Tensor, token_ids_T: Tensor) -> Tensor:
        del token_ids_T
        return (hidden_TE @ self.up_FE.T).relu() ** 2 @ self.down_EF.T


Layer = ThreeStreams | RecurrentWithWindows | StreamAndWindow | Feedforward


class ToyModel:
    """A ``LanguageModel`` of all kinds of layers, some of them twice."""

    vocab_size, max_position, embedding_size = VOCAB_SIZE, 4096, HIDDEN_SIZE
    operations = ()
    adapters = drafter = tower = routing_shape = None

    def __init__(self, *, keeps_logs: bool, seed: int = 0) -> None:
        random = Random(seed)
        self.embed_ZE = random.matrix(VOCAB_SIZE, HIDDEN_SIZE) * HIDDEN_SIZE**0.5
        self.head_ZE = 3 * random.matrix(VOCAB_SIZE, HIDDEN_SIZE)
        self.layers: Sequence[Layer] = (
            ThreeStreams(random),
            RecurrentWithWindows(random, keeps_log=keeps_logs),
            Feedforward(random),
            RecurrentWithWindows(random, keeps_log=keeps_logs),
            StreamAndWindow(random),
            RecurrentWithWindows(random, keeps_log=keeps_logs),
            ThreeStreams(random),
            Feedforward(random),
        )
        self.spec = ModelSpec(tuple(layer.spec for layer in self.layers), HIDDEN_SIZE, "float32")

    def use_kernels(self, kernels: object) -> None:
        """Compute without the package's operations."""

    def bind(self, arena: ArenaTensors) -> ModelMemory:
        """Return the arena as ``forward`` takes it."""
        bound = tuple(layer.bind(memory) for layer, memory in zip(self.layers, arena.layers, strict=True))
        recurrences: list[Recurrence[Any, Any] | None] = [layer.recurrence for layer in self.layers]
        return ModelMemory(bound, bind_folds(recurrences, arena.stacks))

    def forward(self, batch: StepBatch, memory: ModelMemory) -> Tensor:
        """Return ``hidden_TE`` of every row of the step."""
        hidden_TE = self.embed_ZE[batch.token_ids_T]
        for layer, bound in zip(self.layers, memory.layers, strict=True):
            hidden_TE = hidden_TE + layer(normed(hidden_TE), batch, bound)
        return normed(hidden_TE).float()

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Return float32 logits."""
        return (hidden_NE.double() @ self.head_ZE.T).float()

    def reference_logits(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits after every token of a sequence, computed whole and without memory."""
        tokens_T = torch.tensor(token_ids)
        hidden_TE = self.embed_ZE[tokens_T]
        for layer in self.layers:
            hidden_TE = hidden_TE + layer.reference(normed(hidden_TE), tokens_T)
        return self.logits(normed(hidden_TE).float())

    def reference_tokens(self, prompt_ids: Sequence[int], count: int) -> list[int]:
        """Return the likeliest next tokens, recomputing everything for every token."""
        token_ids = list(prompt_ids)
        for _ in range(count):
            token_ids.append(int(self.reference_logits(token_ids)[-1].argmax()))
        return token_ids[len(prompt_ids) :]


def normed(hidden_TE: Tensor) -> Tensor:
    return nn.functional.normalize(hidden_TE, dim=-1) * HIDDEN_SIZE**0.5
