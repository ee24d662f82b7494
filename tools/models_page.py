"""Writes the tables of ``docs/models.md`` that follow from the code: architectures, what layers and models keep.

Run: ``PYTHONPATH=src python tools/models_page.py``. A test holds the page to these. A model is its configuration, that
of transformers but for the values here; nothing is allocated.

Source: the models' published configurations.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from strandline.errors import ConfigError
from strandline.ids import BLOCK_TOKENS
from strandline.kernels.operation import Operation
from strandline.model_config import parse_model_config
from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.ngram_features import TOKENS
from strandline.models.layers.parts.site import Site
from strandline.models.registry import ARCHITECTURES
from strandline.specs import E4M3, TensorSpec

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "models.md"
START, END = "<!-- tools/models_page.py: {} -->\n", "<!-- tools/models_page.py: end -->\n"

ATTENTION, LINEAR = "full_attention", "linear_attention"


@dataclass(frozen=True)
class Model:
    """A published model."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values of its configuration that differ from the architecture's defaults, or replace ``SIZES``."""


def benchmark(name: str, directory: str) -> Model:
    """Return a model that the benchmarks have the configuration of."""
    return Model(name, json.loads((ROOT / "benchmarks" / "configs" / directory / "config.json").read_text()))


def layers(count: int, *attention: int) -> list[str]:
    """Return the types of layers, given which are attention."""
    return [ATTENTION if index in attention else LINEAR for index in range(count)]


MODELS: Final = {
    "BailingHybridForCausalLM": Model("Ling-3.0-Flash"),
    "BambaForCausalLM": Model("Bamba-9B", {"attn_layer_indices": [9, 18, 27], "mamba_d_state": 128}),
    "FalconH1ForCausalLM": Model("Falcon-H1, transformers' default"),
    "FalconMambaForCausalLM": Model(
        "Falcon-Mamba-7B", {"hidden_size": 4096, "num_hidden_layers": 64, "intermediate_size": 8192}
    ),
    "Gemma3ForCausalLM": Model(
        "Gemma-3-27B",
        {"num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168, "sliding_window": 1024},
    ),
    "Glm5NextForConditionalGeneration": Model("GLM-5.3-Flash"),
    "GptOssForCausalLM": Model("gpt-oss-120b"),
    "GraniteMoeHybridForCausalLM": Model(
        "Granite-4.0-H-Small",
        {
            "num_hidden_layers": 40,
            "layer_types": layers(40, 5, 15, 25, 35),
            "mamba_d_state": 128,
            "num_key_value_heads": 8,
        },
    ),
    "Inkling2ForCausalLM": Model("Inkling 2, transformers' default"),
    "InklingForCausalLM": Model("Inkling, transformers' default"),
    "JambaForCausalLM": Model("Jamba-v0.1"),
    "KimiLinearForCausalLM": benchmark("Kimi-Linear-48B-A3B", "kimi-linear-48b-a3b"),
    "LaraMiniForCausalLM": Model("Lara-4-Mini"),
    "Lfm2ForCausalLM": Model(
        "LFM2-1.2B",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "layer_types": [ATTENTION if index in (2, 5, 8, 10, 12, 14) else "conv" for index in range(16)],
        },
    ),
    "Lfm3ForCausalLM": Model("LFM3-1.7B"),
    "Lfm2MoeForCausalLM": Model(
        "LFM2-8B-A1B",
        {
            "num_hidden_layers": 24,
            "layer_types": [ATTENTION if index in (2, 6, 10, 14, 18, 21) else "conv" for index in range(24)],
        },
    ),
    "LlamaForCausalLM": Model("Llama-3.1-8B", {"num_key_value_heads": 8}),
    "Mamba2ForCausalLM": Model("Mamba-Codestral-7B"),
    "MambaForCausalLM": Model("Mamba-2.8B", {"hidden_size": 2560, "num_hidden_layers": 64, "intermediate_size": 5120}),
    "MiniMaxForCausalLM": Model(
        "MiniMax-Text-01",
        {
            "hidden_size": 6144,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "layer_types": layers(80, *range(7, 80, 8)),
        },
    ),
    "NemotronHForCausalLM": benchmark("Nemotron-3-Nano-30B-A3B", "nemotron-3-nano-30b-a3b"),
    "OlmoHybridForCausalLM": Model("OLMo-Hybrid-7B"),
    "Qwen3ForCausalLM": benchmark("Qwen3-8B", "qwen3-8b"),
    "Qwen3MoeForCausalLM": Model("Qwen3-30B-A3B", {"num_hidden_layers": 48, "head_dim": 128}),
    "Qwen3NextForCausalLM": Model("Qwen3-Next-80B-A3B"),
    "Qwen3_5ForCausalLM": benchmark("Qwen3.5-4B", "qwen3.5-4b"),
    "Qwen3_5MoeForCausalLM": benchmark("Qwen3.5-35B-A3B", "qwen3.5-35b-a3b"),
    "Qwen4ExpForCausalLM": Model(
        "Qwen4-Exp, transformers' default, 128 channels of index keys, n-grams in one layer",
        {
            "ple_layer_ids": [1],
            "eos_token_id": 0,
            "indexer_n_heads": 16,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 128,
            "indexer_budget": 2048,
            "indexer_compress_ratio": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        },
    ),
    "RecurrentGemmaForCausalLM": Model("RecurrentGemma-2B", {"num_key_value_heads": 1}),
    "Zamba2ForCausalLM": Model("Zamba2-2.7B", {"mamba_headdim": 64, "n_mamba_heads": 80}),
    "ZayaForCausalLM": Model("ZAYA1-8B, transformers' default"),
}
"""By architecture; of those that differ in what they read alone, one."""

SIZE_FIELDS: Final = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES: Final = {
    "BailingHybridForCausalLM": (157_184, 2560, 6144, 42, 32),
    "BambaForCausalLM": (128_000, 4096, 14_336, 32, 32),
    "FalconH1ForCausalLM": (128_000, 4096, 14_336, 32, 32),
    "FalconMambaForCausalLM": (50_280, 768, 1536, 32, None),
    "Gemma3ForCausalLM": (262_208, 5376, 21_504, 62, 32),
    "Glm5NextForConditionalGeneration": (154_880, 4096, 12_288, 45, 64),
    "GptOssForCausalLM": (201_088, 2880, 2880, 36, 64),
    "GraniteMoeHybridForCausalLM": (32_000, 4096, 11_008, 32, 32),
    "Inkling2ForCausalLM": (201_024, 4608, None, 48, 48),
    "InklingForCausalLM": (201_024, 6144, 24_576, 66, 64),
    "JambaForCausalLM": (65_536, 4096, 14_336, 32, 32),
    "LaraMiniForCausalLM": (151_936, 1024, None, 34, 16),
    "Lfm2ForCausalLM": (65_536, 2560, 12_288, 32, 32),
    "Lfm3ForCausalLM": (128_000, 2048, 7680, 24, 16),
    "Lfm2MoeForCausalLM": (65_536, 2048, 7168, 32, 32),
    "LlamaForCausalLM": (32_000, 4096, 11_008, 32, 32),
    "Mamba2ForCausalLM": (32_768, 4096, None, 64, None),
    "MambaForCausalLM": (50_280, 768, 1536, 32, None),
    "MiniMaxForCausalLM": (32_000, 4096, 14_336, 32, 32),
    "NemotronHForCausalLM": (131_072, 4096, 21_504, 52, 32),
    "OlmoHybridForCausalLM": (100_352, 3840, 11_008, 32, 30),
    "Qwen3MoeForCausalLM": (151_936, 2048, 6144, 24, 32),
    "Qwen3NextForCausalLM": (151_936, 2048, 5632, 48, 16),
    "Qwen4ExpForCausalLM": (248_320, 2048, None, 40, 16),
    "RecurrentGemmaForCausalLM": (256_000, 2560, 7680, 26, 10),
    "Zamba2ForCausalLM": (32_000, 2560, 10_240, 54, 32),
    "ZayaForCausalLM": (262_272, 2048, None, 40, 8),
}
"""Sizes of models that do not give all: those of transformers' configuration class."""

SUPER: Final = "MEMEMEM*" + 2 * "EMEMEMEM*" + 4 * "EMEMEMEMEM*" + "EMEMEMEM*" + "EMEMEMEME"

FURTHER: Final = {
    "NemotronHForCausalLM": Model(
        "Nemotron-3-Super-120B-A12B",
        {
            "hybrid_override_pattern": SUPER,
            "num_key_value_heads": 2,
            "n_routed_experts": 512,
            "num_experts_per_tok": 22,
            "moe_intermediate_size": 2688,
            "moe_shared_expert_intermediate_size": 5376,
            "moe_latent_size": 1024,
            "num_nextn_predict_layers": 1,
            "max_position_embeddings": 2**20,
        },
    ),
}
"""Another model of an architecture, which differs in what it supports."""


@dataclass(frozen=True)
class Family:
    """What a page of architectures says beside what follows from the code."""

    models: str
    others: str
    """Layers without a recurrence."""
    note: str = ""
    """On the recurrent layers."""


DENSE_OR_MOE, MOE = "attention; dense or MoE", "attention; MoE"
TEXT_OF_VISION = "Qwen3.5; reads [pictures](pictures.md)"
CLIPPED = "gated relative attention with sinks, in most layers with a window; MoE"
RELATIVE, BEHIND_PARTS = "relative attention, in most layers with a window; dense or MoE", " and behind all parts"
WINDOWED = "attention, in most layers with a window"
GATED = "attention with a gate for each head, in every other layer with a window"
INDEXED, NGRAMS = "indexed attention; MoE", ", some with features of n-grams"

FAMILIES: Final = {
    "BailingHybridForCausalLM": Family("Ling 3", "latent attention with a gate for each head; dense or MoE"),
    "BambaForCausalLM": Family("Bamba", "attention"),
    "FalconH1ForCausalLM": Family("Falcon-H1", "attention", ", side by side with attention"),
    "FalconMambaForCausalLM": Family("Falcon Mamba", "none"),
    "Gemma3ForCausalLM": Family("Gemma 3, text only", WINDOWED),
    "Gemma3ForConditionalGeneration": Family("Gemma 3; images are not taken", WINDOWED),
    "Glm5NextForConditionalGeneration": Family(
        "GLM-5.3-Flash; images are not taken", "indexed latent attention; dense or MoE"
    ),
    "GptOssForCausalLM": Family("gpt-oss", "attention with sinks, in every other layer with a window; MoE"),
    "GraniteMoeHybridForCausalLM": Family("Granite 4", DENSE_OR_MOE),
    "Inkling2ForCausalLM": Family("Inkling 2, text only", CLIPPED, BEHIND_PARTS),
    "Inkling2ForConditionalGeneration": Family("Inkling 2; images are not taken", CLIPPED, BEHIND_PARTS),
    "InklingForCausalLM": Family("Inkling, text only", RELATIVE, BEHIND_PARTS),
    "InklingForConditionalGeneration": Family("Inkling; images and audio are not taken", RELATIVE, BEHIND_PARTS),
    "InternS2PreviewForConditionalGeneration": Family("Intern-S2; images and time series are not taken", MOE),
    "JambaForCausalLM": Family("Jamba", DENSE_OR_MOE),
    "KimiLinearForCausalLM": Family("Kimi Linear", "latent attention; dense or MoE"),
    "LaraMiniForCausalLM": Family("Lara 4 Mini", "attention, in two of three layers with a window; MoE"),
    "Lfm2ForCausalLM": Family("LFM2", "attention"),
    "Lfm2MoeForCausalLM": Family("LFM2", MOE),
    "Lfm2VlForConditionalGeneration": Family("LFM2-VL; images are not taken", "attention"),
    "Lfm3ForCausalLM": Family("LFM3", GATED),
    "Lfm3VlForConditionalGeneration": Family("LFM3-VL; images are not taken", GATED),
    "LlamaForCausalLM": Family("Llama", "attention"),
    "Mamba2ForCausalLM": Family("Mamba-2", "none"),
    "MambaForCausalLM": Family("Mamba", "none"),
    "MiniCPMV4_6ForConditionalGeneration": Family("MiniCPM-V 4.6; images are not taken", "attention"),
    "MiniCPMV4_7ForConditionalGeneration": Family("MiniCPM-V 4.7; images are not taken", "attention"),
    "MiniMaxForCausalLM": Family("MiniMax-Text-01, MiniMax-M1", MOE),
    "NemotronHForCausalLM": Family("Nemotron-H, Nemotron 3", f"{DENSE_OR_MOE}, also with a latent"),
    "NemotronHPuzzleForCausalLM": Family("Nemotron 3 Puzzle", f"{DENSE_OR_MOE} of several widths, also with a latent"),
    "NemotronH_Nano_Omni_Reasoning_V3": Family("Nemotron 3 Omni; images and audio are not taken", DENSE_OR_MOE),
    "NemotronH_Omni_Reasoning_V3": Family("the same, as transformers saves it", DENSE_OR_MOE),
    "OlmoHybridForCausalLM": Family("OLMo Hybrid", "attention", ", also with negative eigenvalues"),
    "Qwen3ForCausalLM": Family("Qwen3", "attention"),
    "Qwen3MoeForCausalLM": Family("Qwen3", MOE),
    "Qwen3NextForCausalLM": Family("Qwen3-Next", MOE),
    "Qwen3_5ForCausalLM": Family("Qwen3.5, text only", "attention"),
    "Qwen3_5ForConditionalGeneration": Family(TEXT_OF_VISION, "attention"),
    "Qwen3_5MoeForCausalLM": Family("Qwen3.5, text only", MOE),
    "Qwen3_5MoeForConditionalGeneration": Family(TEXT_OF_VISION, MOE),
    "Qwen4ExpForCausalLM": Family("Qwen4-Exp, text only", INDEXED, NGRAMS),
    "Qwen4ExpForConditionalGeneration": Family("Qwen4-Exp; reads [pictures](pictures.md)", INDEXED, NGRAMS),
    "RecurrentGemmaForCausalLM": Family("RecurrentGemma", "sliding-window attention"),
    "Zamba2ForCausalLM": Family("Zamba2", "attention and a feed-forward part, shared by several layers"),
    "ZayaForCausalLM": Family("ZAYA1, without sliding windows", "MoE"),
}
"""One for each architecture."""

RECURRENCES: Final = {
    "gdn_prefill": "Gated DeltaNet",
    "kda_prefill": "Kimi Delta Attention",
    "lightning_prefill": "lightning attention",
    "mamba1_prefill": "Mamba",
    "mamba2_prefill": "Mamba-2",
    "rglru_prefill": "RG-LRU",
}
"""Names of recurrent layers, by the operation that runs them over a prompt."""

KINDS: Final = {
    "attention": "LlamaForCausalLM",
    "sliding-window attention": "RecurrentGemmaForCausalLM",
    "latent attention": "KimiLinearForCausalLM",
    "convolved attention": "ZayaForCausalLM",
    "relative attention": "InklingForCausalLM",
    "indexed attention": "Qwen4ExpForCausalLM",
    "indexed latent attention": "Glm5NextForConditionalGeneration",
    "Gated DeltaNet": "Qwen3_5ForCausalLM",
    "Gated DeltaNet with features of n-grams": "Qwen4ExpForCausalLM",
    "Kimi Delta Attention": "KimiLinearForCausalLM",
    "Mamba-2": "Mamba2ForCausalLM",
    "lightning attention": "MiniMaxForCausalLM",
    "Mamba": "MambaForCausalLM",
    "RG-LRU": "RecurrentGemmaForCausalLM",
    "short convolution": "Lfm2ForCausalLM",
}
"""Kinds of layers, and an architecture that has them."""

KEPT_OF_TOKENS: Final = {
    (): "",
    ("key", "value"): "keys and values",
    ("key", "value", "index_key"): "keys, values and index keys",
    ("latent",): "one latent for all heads",
    ("latent", "index_key"): "one latent for all heads, and an index key with its gates",
}
"""What layers keep of each token, by the names of their streams."""

HEADER: Final = (
    "model", "snapshot", "per token", "break-even", "CUDA", "CPU", "speculation", "FP8", "determ."
)  # fmt: skip


def build(architecture: str, model: Model) -> CausalLM:
    """Return a model without weights."""
    sizes = dict(zip(SIZE_FIELDS, SIZES.get(architecture, ()), strict=False))
    config = parse_model_config({"architectures": [architecture], **sizes, **model.values})
    return ARCHITECTURES[architecture](config, Site(torch.bfloat16, "meta"))


def row(architecture: str, published: Model) -> tuple[str, ...]:
    """Return a model's row: sizes as the engine lays them out, and what its operations are made for."""
    model = build(architecture, published)
    spec = model.spec
    token_bytes = spec.raw_block_bytes / BLOCK_TOKENS if any(layer.streams for layer in spec.layers) else 0
    snapshot_bytes = spec.raw_slot_bytes if spec.has_states else 0
    by_state = [x for x in model.operations if x.name.endswith(("_prefill", "_decode", "_update", "attention"))]
    return (
        published.name,
        megabytes(snapshot_bytes) if snapshot_bytes else "none",
        f"{token_bytes / 1024:.3g} KiB" if token_bytes else "nothing",
        f"{snapshot_bytes / token_bytes:,.0f} tokens" if snapshot_bytes and token_bytes else "",
        versions("Triton", model.operations),
        versions("Numba", by_state),
        speculation(model),
        in_fp8(architecture, published),
        is_deterministic(model),
    )


def is_deterministic(model: CausalLM) -> str:
    """Return whether a model can run deterministically."""
    states = (state for layer in model.spec.layers for state in layer.states)
    return "no" if any(state.is_recurrent and state.dtype != "float32" for state in states) else "yes"


def versions(backend: str, operations: Sequence[Operation[..., Any]]) -> str:
    """Return the name of a backend, and the operations that it has no version of."""
    lacking = [x.name for x in operations if all(version.name != backend for version in x.backends)]
    if not lacking:
        return backend
    return "torch" if len(lacking) == len(operations) else f"{backend}; torch: {listed(lacking)}"


def in_fp8(architecture: str, published: Model) -> str:
    """Return what a model may have in FP8."""
    model = build(architecture, published)
    streams = {stream.name for layer in model.spec.layers for stream in layer.streams}
    try:
        model.use_kv_cache_dtype(E4M3)
    except ConfigError:
        return "weights"
    return "weights, KV" if streams else "weights"


def speculation(model: CausalLM) -> str:
    """Return the methods that can draft tokens; the model gets its draft layer, where the family has one."""
    if not model.spec.can_log_drafts:
        return "no"
    try:
        model.add_draft_layer()
    except ConfigError:
        return "n-gram"
    return "n-gram, MTP"


def listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.3g} MiB"


def recurrence(architecture: str) -> str:
    """Return what an architecture's recurrent layers are."""
    builder = ARCHITECTURES[architecture]
    published = next(name for name in MODELS if ARCHITECTURES[name] is builder)
    model = build(published, MODELS[published])
    names = [RECURRENCES[x.name] for x in model.operations if x.name in RECURRENCES]
    if names:
        return ", ".join(names)
    with_states = [layer for layer in model.spec.layers if layer.states]
    if not with_states:
        return "none"
    return "convolutions inside attention" if all(layer.streams for layer in with_states) else "short convolution"


def architectures() -> str:
    """Return the table of architectures in Markdown."""
    header = ("architecture", "models", "recurrent layers", "other layers")
    return markdown(
        header,
        [(f"`{x}`", family.models, recurrence(x) + family.note, family.others) for x, family in FAMILIES.items()],
    )


def kinds() -> str:
    """Return the table of what each kind of layer keeps, in Markdown."""
    header = ("layer", "per token", "per sequence, in each snapshot", "log of decoded tokens")
    return markdown(header, [kept_by(kind, architecture) for kind, architecture in KINDS.items()])


def kept_by(kind: str, architecture: str) -> tuple[str, ...]:
    """Return the row of a kind of layer: the first one of the model that has what its name says."""
    spec = build(architecture, MODELS[architecture]).spec
    is_attention = kind.endswith("attention") and kind not in RECURRENCES.values()
    layer = next(x for x in spec.layers if (x.streams if is_attention else x.states))
    streams = KEPT_OF_TOKENS[tuple(stream.name for stream in layer.streams)]
    if is_attention and layer.window_tokens is not None:
        streams += " of its window"
    log = "" if not layer.states else f"{layer.log.num_tokens} tokens" if layer.log else "none"
    return (
        kind,
        streams if is_attention else "nothing",
        enumerated(counted([described(state) for state in layer.states])) or "nothing",
        log,
    )


def counted(parts: Sequence[str]) -> list[str]:
    """Return different parts, with the number of those that occur several times instead of their article."""
    numbers = Counter(parts).items()
    return [part if num == 1 else f"{num} {part.removeprefix('a ').replace(' of', 's of', 1)}" for part, num in numbers]


def enumerated(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def described(state: TensorSpec) -> str:
    """Return what a state is, by its shape."""
    if state.name == TOKENS:
        return f"the last {state.shape[0]} tokens"
    if not state.is_recurrent:
        return f"a window of the last {state.shape[0]} inputs"
    per = {1: "one number per channel", 3: "a matrix per head"}.get(
        len(state.shape), f"{state.shape[-1]} numbers per channel"
    )
    return f"{per} in {state.dtype}"


def models() -> str:
    """Return the table of models in Markdown."""
    rows = []
    for architecture, model in MODELS.items():
        rows.append(row(architecture, model))
        if architecture in FURTHER:
            rows.append(row(architecture, FURTHER[architecture]))
    return markdown(HEADER, rows)


def markdown(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, ("---",) * len(header), *rows))


def page() -> str:
    """Return the page with new tables."""
    text = PAGE.read_text()
    for table in (architectures, kinds, models):
        start = START.format(table.__name__)
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(END)
        text = f"{before}{start}\n{table()}\n{END}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
