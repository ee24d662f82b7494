"""Features of the n-grams that end at a token, added to the residual streams of a layer (Qwen4-Exp).

For every n from 2 on, hashes of the last n tokens choose rows of a table. Side by side these are the token's features:
a value for all streams, and a key for each, which is multiplied with the stream to a gate of the value. The gated
values are also convolved over time, with distances between the taps.

N-grams do not reach over the end token: what lies before it, and before the sequence, reads as the end token. A layer
keeps the last tokens as their distance from it, in float32, so that a fresh window of zeros means end tokens. A
convolution with a single tap per channel delays them. So tokens are a state like any other: a snapshot resumes them,
and drafts are logged.

Source: ``transformers`` (``qwen4_exp``, its per-layer embedding).

Shape suffixes: T tokens of the step, S streams, E hidden size, A hash heads, Z rows of the table, D channels of a row,
N tokens of the longest n-gram, C channels of a convolution, K taps, W inputs from the first tap to the last, R rows of
a window's memory, O rows of a fused projection; of a window's memory S are the slots.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strandline.config_fields import Fields, read_eps, read_vocab_size
from strandline.kernels.arena import LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.recurrences.rerun import DraftLog
from strandline.kernels.streams.gates import FeatureNorms, add_gated, gate_features
from strandline.models.layers.decoder import DecoderLayer, FeedForwardT_co, LayerStates, MixerT_co
from strandline.models.layers.parts.convolution import CausalConvolution, Delays, unfilled_filter
from strandline.models.layers.parts.projection import FusedProjection
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.step import Step
from strandline.models.layers.parts.targets import NamedTargets, Piece, Target, unused, whole
from strandline.models.layers.streams.streams import Streams, StreamsResidual
from strandline.specs import LayerSpec

MAX_NGRAM: Final = 4
MAX_SPAN: Final = 10
"""Maximum inputs from the first tap of the convolution to the last: the most that kernels are tested with."""

MAX_HASH_HEADS: Final = 256
MAX_TABLE: Final = 2**32

MASK: Final = 2**64 - 1
GOLDEN_GAMMA: Final = 0x9E3779B97F4A7C15

TOKENS, INPUTS = "ngram_tokens", "ngram_window"
"""Names of the layer's windows: of tokens, and of the convolution's inputs."""


@dataclass(frozen=True, slots=True)
class NgramFeaturesConfig:
    """Sizes of one layer's features, and the constants of its hashes."""

    num_streams: int
    hidden_size: int
    feature_dim: int
    max_ngram: int
    heads_per_ngram: int
    num_taps: int
    eps: float
    end_token: int
    head_rows: tuple[int, ...]
    """Rows of the table that each hash head chooses from: primes."""
    multipliers: tuple[int, ...]
    """Factors of the tokens of an n-gram, the last one first."""
    num_rows: int
    """Rows of the published table: some to spare at the end."""
    num_parts: int
    """Tensors that the table is published in."""

    @property
    def span(self) -> int:
        """Inputs from the first tap of the convolution to the last."""
        return (self.num_taps - 1) * self.max_ngram + 1

    @classmethod
    def read(cls, fields: Fields, num_streams: int, number: int) -> "NgramFeaturesConfig":
        """Read a text configuration; raises as :class:`strandline.config_fields.Fields`.

        Args:
            number: number of the layer among those that have such features, from 0.
        """
        max_ngram = fields.size("ngram_size", at_least=2, at_most=MAX_NGRAM)
        num_taps = fields.size("ple_conv_kernel_size", at_least=2, at_most=(MAX_SPAN - 1) // max_ngram + 1)
        heads_per_ngram = fields.size("heads_per_ngram", at_most=MAX_HASH_HEADS)
        num_heads, feature_dim = (max_ngram - 1) * heads_per_ngram, fields.size("ple_embed_dim")
        if feature_dim % num_heads:
            fields.reject("ple_embed_dim", f"a multiple of the {num_heads} hash heads")
        vocab_size, seed = read_vocab_size(fields), fields.size("seed", at_least=0, at_most=MASK)
        first = fields.size("ngram_vocab_size_base", at_least=2, at_most=MAX_TABLE // num_heads)
        primes = primes_from(first)
        head_rows = [next(primes) for _ in range((number + 1) * num_heads)][-num_heads:]
        divisor = fields.size("make_ngram_vocab_size_divisible_by")
        return cls(
            num_streams=num_streams,
            hidden_size=fields.size("hidden_size"),
            feature_dim=feature_dim,
            max_ngram=max_ngram,
            heads_per_ngram=heads_per_ngram,
            num_taps=num_taps,
            eps=read_eps(fields),
            end_token=_read_end_token(fields, vocab_size),
            head_rows=tuple(head_rows),
            multipliers=hash_multipliers(vocab_size, max_ngram, number, seed),
            num_rows=-(-sum(head_rows) // divisor) * divisor,
            num_parts=fields.size("split_ngram_parts"),
        )


def _read_end_token(fields: Fields, vocab_size: int) -> int:
    """Return the end token, the first if there are several."""
    value = fields.value("eos_token_id")
    named = Fields({"eos_token_id": value[0] if isinstance(value, list) and value else value})
    return named.size("eos_token_id", at_least=0, at_most=vocab_size - 1)


def primes_from(start: int) -> Iterator[int]:
    """Yield the primes from a number on."""
    while True:
        if start > 1 and all(start % divisor for divisor in range(2, math.isqrt(start) + 1)):
            yield start
        start += 1


def hash_multipliers(vocab_size: int, max_ngram: int, number: int, seed: int) -> tuple[int, ...]:
    """Return odd numbers, from a hash (splitmix64) of the layer's number, whose products with tokens fit 64 bits."""
    half_bound = max(1, (2**63 - 1) // vocab_size // 2)
    states = (seed + 10007 * number + GOLDEN_GAMMA * (index + 1) for index in range(max_ngram))
    return tuple(2 * (_splitmix64(state) % half_bound) + 1 for state in states)


def _splitmix64(state: int) -> int:
    value = (state + GOLDEN_GAMMA) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


class DilatedTaps(nn.Module):
    """Taps that are some tokens apart."""

    operations, bias_C = (), None
    weight_CW: Tensor

    def __init__(self, num_channels: int, num_taps: int, distance: int, site: Site) -> None:
        super().__init__()
        filter_CW = unfilled_filter(num_channels, (num_taps - 1) * distance + 1, site)
        self.register_buffer("weight_CW", filter_CW, persistent=False)
        self.taps_CK = site.parameter(num_channels, num_taps)
        self.distance = distance

    def use_kernels(self, kernels: Kernels) -> None:
        """Fill the filter."""
        del kernels
        self.weight_CW[:, :: self.distance] = self.taps_CK


class NgramTable(nn.Module):
    """The rows that hashes of n-grams choose.

    Args:
        site: the shard divides the rows; every rank hashes all n-grams.
    """

    def __init__(self, config: NgramFeaturesConfig, site: Site) -> None:
        super().__init__()
        self.config, self.held = config, site.shard.span(config.num_rows, "rows of a table of n-grams")
        row_dim = config.feature_dim // len(config.head_rows)
        self.embed_ZD = site.parameter(len(self.held), row_dim)
        starts = [sum(config.head_rows[:head]) for head in range(len(config.head_rows))]
        for name, numbers in {"head_rows_A": config.head_rows, "first_row_A": starts}.items():
            self.register_buffer(name, torch.tensor(numbers, device=site.device), persistent=False)

    head_rows_A: Tensor
    first_row_A: Tensor
    operations = ()

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._ranks = kernels.ranks

    def forward(self, token_ids_TN: Tensor) -> Tensor:
        """Return the features of tokens ``[T, A D]``, given each one and those before it, the latest first."""
        config, hashes = self.config, []
        first, *others = (token_ids_TN[:, index] * factor for index, factor in enumerate(config.multipliers))
        mixed_T = first
        for product_T in others:
            mixed_T = mixed_T ^ product_T
            hashes.append(mixed_T.unsqueeze(-1).expand(-1, config.heads_per_ngram))
        row_TA = torch.cat(hashes, dim=-1) % self.head_rows_A + self.first_row_A
        if len(self.held) == config.num_rows:
            return F.embedding(row_TA, self.embed_ZD).flatten(1)
        row_TA = row_TA - self.held.start
        is_elsewhere_TA = (row_TA < 0) | (row_TA >= len(self.held))
        row_TAD = F.embedding(row_TA.masked_fill(is_elsewhere_TA, 0), self.embed_ZD)
        return self._ranks.sum(row_TAD.masked_fill_(is_elsewhere_TA.unsqueeze(-1), 0.0).flatten(1))

    def targets(self, prefix: str, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors: the table in parts, or as one, and constants of the hashes where they are."""
        config = self.config
        if f"{prefix}ngram_embedding.weight" in names:
            yield f"{prefix}ngram_embedding.weight", self._part(0, config.num_rows)
        else:
            size = -(-config.num_rows // config.num_parts)
            for part, start in enumerate(range(0, config.num_rows, size)):
                end = min(start + size, config.num_rows)
                yield f"{prefix}ngram_embedding.shard_{part}.weight", self._part(start, end)
        num_heads = len(config.head_rows)
        sizes = {"layer_multipliers": config.max_ngram, "ngram_heads_vocab_sizes": num_heads}
        for name, size in (sizes | {"ngram_heads_offsets": num_heads}).items():
            if f"{prefix}{name}" in names:
                yield f"{prefix}{name}", unused(size)

    def _part(self, start: int, end: int) -> Target:
        """Return the target of rows ``[start, end)`` of the table."""
        first, last = max(start, self.held.start), min(end, self.held.stop)
        shape = (end - start, self.embed_ZD.shape[1])
        if first >= last:
            return unused(*shape)
        rows = self.embed_ZD[first - self.held.start : last - self.held.start]
        return Target(shape, (Piece((slice(first - start, last - start),), (rows,)),))


@dataclass(frozen=True, slots=True)
class NgramFeaturesMemory:
    """A layer's share of all slots and logs."""

    tokens_SRC: Tensor
    tokens_log: DraftLog
    window_SRC: Tensor
    window_log: DraftLog


class NgramFeatures(nn.Module):
    """What a layer adds to its streams before its mixer, a ``StatefulPart``.

    Args:
        site: the shard divides the table's rows; all else is computed on every rank.
    """

    operations = (add_gated, gate_features)

    def __init__(self, config: NgramFeaturesConfig, site: Site) -> None:
        super().__init__()
        self.config, num_streams, hidden_size = config, config.num_streams, config.hidden_size
        width = num_streams * hidden_size
        self.table = NgramTable(config, site)
        numbers = site.in_dtype(torch.float32)
        self.delays = CausalConvolution(Delays(1, config.max_ngram - 1, numbers), None, numbers, TOKENS)
        """The tokens before each token, the latest first, as float32 numbers."""
        self.in_proj = FusedProjection((width, hidden_size), config.feature_dim, site)
        """Rows: a key for each stream, the value."""
        self.key_norm_SE, self.stream_norm_SE, self.conv_norm_SE = (
            site.parameter(num_streams, hidden_size) for _ in range(3)
        )
        self.conv = CausalConvolution(DilatedTaps(width, config.num_taps, config.max_ngram, site), None, site, INPUTS)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._add_gated, self._gate_features = kernels[add_gated], kernels[gate_features]
        self._norms = FeatureNorms(self.key_norm_SE, self.stream_norm_SE, self.conv_norm_SE)

    @property
    def spec(self) -> LayerSpec:
        return LayerSpec(
            states=(self.delays.window, self.conv.window), draft_log=(self.delays.logged, self.conv.logged)
        )

    def bind(self, memory: LayerMemory) -> NgramFeaturesMemory:
        """Return the layer's memory as ``forward`` takes it."""
        return NgramFeaturesMemory(*self.delays.bind(memory), *self.conv.bind(memory))

    def rerun(self, batch: StepBatch, memory: NgramFeaturesMemory) -> None:
        """Advance the windows over logged tokens alone."""
        self.delays.rerun(batch, memory.tokens_SRC, memory.tokens_log)
        self.conv.rerun(batch, memory.window_SRC, memory.window_log)

    def forward(self, stream: Streams, batch: StepBatch, memory: NgramFeaturesMemory) -> Streams:
        """Return the streams with the features, and with the output of the part before them."""
        stream_TSE = self._add_gated(*stream)
        features_TO = self.table(self._ngrams(batch, memory))
        key_TO, value_TE = self.in_proj.project(features_TO)
        gated_TSE, normed_TSE = self._gate_features(key_TO, value_TE, stream_TSE, self._norms, self.config.eps)
        convolved_TC = self.conv.convolve(normed_TSE.flatten(1), batch, memory.window_SRC, memory.window_log)
        return Streams(stream_TSE + (gated_TSE + F.silu(convolved_TC).view_as(gated_TSE)))

    def _ngrams(self, batch: StepBatch, memory: NgramFeaturesMemory) -> Tensor:
        """Return each token and those before it, the latest first, up to the last end token before it."""
        end_token, num_delays = self.config.end_token, self.config.max_ngram - 1
        from_end_T = (batch.token_ids_T - end_token).float()
        repeated_TC = from_end_T.unsqueeze(-1).repeat(1, num_delays)
        delayed_TC = self.delays.convolve(repeated_TC, batch, memory.tokens_SRC, memory.tokens_log)
        is_within_TC = (delayed_TC != 0).cumprod(dim=-1)
        return torch.cat((from_end_T.unsqueeze(-1), delayed_TC * is_within_TC), dim=-1).long() + end_token

    def targets(self, prefix: str, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors."""
        yield from self.table.targets(f"{prefix}ple_embedding.", names)
        key, value = self.in_proj.weights
        yield f"{prefix}key_proj.weight", whole(key)
        yield f"{prefix}value_proj.weight", whole(value)
        norms = {"key": self.key_norm_SE, "query": self.stream_norm_SE, "conv": self.conv_norm_SE}
        for name, weight_SE in norms.items():
            yield f"{prefix}norm_{name}.weight", whole(weight_SE.view(-1))
        yield f"{prefix}conv1d.weight", whole(self.conv.filter.taps_CK.unsqueeze(1))


class FeaturesLayer(DecoderLayer[MixerT_co, FeedForwardT_co]):
    """A layer that first adds features of n-grams to streams, which gates mix."""

    def __init__(
        self,
        mixer: MixerT_co,
        mlp: FeedForwardT_co,
        residuals: tuple[StreamsResidual, StreamsResidual],
        features: NgramFeatures,
    ) -> None:
        super().__init__(mixer, mlp, *residuals, stateful=features)
        self.features = features

    def forward(self, stream: Streams, step: Step, memory: LayerStates) -> Streams:
        """Return the streams after the layer."""
        after: Streams = super().forward(self.features(stream, step.batch, memory.other), step, memory.mixer)
        return after
