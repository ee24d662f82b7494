"""The supported architectures, by their published names, and the building of their models."""

from contextlib import nullcontext
from typing import Any, Protocol

from strandline.model_config import ModelConfig
from strandline.models.families.bailing_hybrid import build_bailing_hybrid
from strandline.models.families.bamba import build_bamba
from strandline.models.families.causal_lm import CausalLM
from strandline.models.families.falcon_h1 import build_falcon_h1
from strandline.models.families.gemma3 import build_gemma3
from strandline.models.families.glm5_next import build_glm5_next
from strandline.models.families.gpt_oss import build_gpt_oss
from strandline.models.families.granite_hybrid import build_granite_hybrid
from strandline.models.families.inkling import build_inkling
from strandline.models.families.inkling2 import build_inkling2
from strandline.models.families.jamba import build_jamba
from strandline.models.families.kimi_linear import build_kimi_linear
from strandline.models.families.lara_mini import build_lara_mini
from strandline.models.families.lfm2 import build_lfm2, build_lfm2_moe
from strandline.models.families.lfm3 import build_lfm3
from strandline.models.families.llama import build_llama
from strandline.models.families.mamba import build_falcon_mamba, build_mamba
from strandline.models.families.mamba2 import build_mamba2
from strandline.models.families.minimax import build_minimax
from strandline.models.families.nemotron_h import build_nemotron_h
from strandline.models.families.olmo_hybrid import build_olmo_hybrid
from strandline.models.families.qwen3 import build_qwen3, build_qwen3_moe
from strandline.models.families.qwen3_5 import build_qwen3_5
from strandline.models.families.qwen3_next import build_qwen3_next
from strandline.models.families.qwen4_exp import build_qwen4_exp
from strandline.models.families.recurrent_gemma import build_recurrent_gemma
from strandline.models.families.zamba2 import build_zamba2
from strandline.models.families.zaya import build_zaya
from strandline.models.layers.parts.site import Site, matrices_without_memory
from strandline.models.lora.adapter_slots import AdapterSlots
from strandline.models.model_options import ModelOptions


class Builder(Protocol):
    """Builds the model of a configuration, with unfilled parameters."""

    def __call__(self, config: ModelConfig, site: Site) -> CausalLM:
        """Build it.

        Raises:
            ConfigError: a setting is not supported, or the model cannot be divided into these shards.
        """


ARCHITECTURES: dict[str, Builder] = {
    "BailingHybridForCausalLM": build_bailing_hybrid,
    "BambaForCausalLM": build_bamba,
    "FalconH1ForCausalLM": build_falcon_h1,
    "FalconMambaForCausalLM": build_falcon_mamba,
    "Gemma3ForCausalLM": build_gemma3,
    "Gemma3ForConditionalGeneration": build_gemma3,
    "Glm5NextForConditionalGeneration": build_glm5_next,
    "GptOssForCausalLM": build_gpt_oss,
    "GraniteMoeHybridForCausalLM": build_granite_hybrid,
    "Inkling2ForCausalLM": build_inkling2,
    "Inkling2ForConditionalGeneration": build_inkling2,
    "InklingForCausalLM": build_inkling,
    "InklingForConditionalGeneration": build_inkling,
    "InternS2PreviewForConditionalGeneration": build_qwen3_5,
    "JambaForCausalLM": build_jamba,
    "KimiLinearForCausalLM": build_kimi_linear,
    "LaraMiniForCausalLM": build_lara_mini,
    "Lfm2ForCausalLM": build_lfm2,
    "Lfm2MoeForCausalLM": build_lfm2_moe,
    "Lfm2VlForConditionalGeneration": build_lfm2,
    "Lfm3ForCausalLM": build_lfm3,
    "Lfm3VlForConditionalGeneration": build_lfm3,
    "LlamaForCausalLM": build_llama,
    "Mamba2ForCausalLM": build_mamba2,
    "MambaForCausalLM": build_mamba,
    "MiniCPMV4_6ForConditionalGeneration": build_qwen3_5,
    "MiniCPMV4_7ForConditionalGeneration": build_qwen3_5,
    "MiniMaxForCausalLM": build_minimax,
    "NemotronHForCausalLM": build_nemotron_h,
    "NemotronHPuzzleForCausalLM": build_nemotron_h,
    "NemotronH_Nano_Omni_Reasoning_V3": build_nemotron_h,
    "NemotronH_Omni_Reasoning_V3": build_nemotron_h,
    "OlmoHybridForCausalLM": build_olmo_hybrid,
    "Qwen3ForCausalLM": build_qwen3,
    "Qwen3MoeForCausalLM": build_qwen3_moe,
    "Qwen3NextForCausalLM": build_qwen3_next,
    "Qwen3_5ForCausalLM": build_qwen3_5,
    "Qwen3_5ForConditionalGeneration": build_qwen3_5,
    "Qwen3_5MoeForCausalLM": build_qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": build_qwen3_5,
    "Qwen4ExpForCausalLM": build_qwen4_exp,
    "Qwen4ExpForConditionalGeneration": build_qwen4_exp,
    "RecurrentGemmaForCausalLM": build_recurrent_gemma,
    "Zamba2ForCausalLM": build_zamba2,
    "ZayaForCausalLM": build_zaya,
}


def builder_for(config: ModelConfig) -> Builder:
    """Return the builder for a configuration's architecture."""
    return ARCHITECTURES[config.architecture]


def build_model(config: ModelConfig, options: ModelOptions) -> Any:
    """Return a model whose parameters have no values yet; matrices have no memory where they may stay quantised.

    Raises:
        ConfigError: the architecture or a setting is not supported.
    """
    with matrices_without_memory() if options.keeps_quantized else nullcontext():
        model: Any = builder_for(config)(config, Site(options.dtype_of(config), options.device, options.shard))
        if options.with_draft_layer:
            model.add_draft_layer()
    if options.pictures is not None:
        model.add_tower(options.pictures)
    if options.adapter_slots is not None:
        targets = dict(model.targets(frozenset()))
        model.adapters = AdapterSlots(model.decoder, targets, options.adapter_slots, options.device)
    if options.kv_cache_dtype is not None:
        model.use_kv_cache_dtype(options.kv_cache_dtype)
    if options.records_routing:
        model.record_routing()
    return model
