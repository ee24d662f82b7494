"""The supported architectures, by their published names; ``models/registry.py`` has a builder for each."""

from typing import Final

from strandline.architectures.architecture import Architecture
from strandline.architectures.bailing_hybrid import BAILING_HYBRID
from strandline.architectures.bamba import BAMBA
from strandline.architectures.falcon_h1 import FALCON_H1
from strandline.architectures.gemma3 import GEMMA3
from strandline.architectures.glm5_next import GLM5_NEXT
from strandline.architectures.gpt_oss import GPT_OSS
from strandline.architectures.granite_hybrid import GRANITE_HYBRID
from strandline.architectures.inkling import INKLING
from strandline.architectures.inkling2 import INKLING2
from strandline.architectures.jamba import JAMBA
from strandline.architectures.kimi_linear import KIMI_LINEAR
from strandline.architectures.lara_mini import LARA_MINI
from strandline.architectures.lfm2 import LFM2, LFM2_MOE
from strandline.architectures.lfm3 import LFM3
from strandline.architectures.llama import LLAMA
from strandline.architectures.mamba import FALCON_MAMBA, MAMBA
from strandline.architectures.mamba2 import MAMBA2
from strandline.architectures.minimax import MINIMAX
from strandline.architectures.nemotron_h import NEMOTRON_H, NEMOTRON_OMNI, NEMOTRON_PUZZLE
from strandline.architectures.olmo_hybrid import OLMO_HYBRID
from strandline.architectures.qwen3 import QWEN3, QWEN3_MOE
from strandline.architectures.qwen3_hybrid import INTERN_S2, MINICPM_V, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from strandline.architectures.qwen4_exp import QWEN4_EXP
from strandline.architectures.recurrent_gemma import RECURRENT_GEMMA
from strandline.architectures.zamba2 import ZAMBA2
from strandline.architectures.zaya import ZAYA

SUPPORTED: Final[dict[str, Architecture]] = {
    "BailingHybridForCausalLM": BAILING_HYBRID,
    "BambaForCausalLM": BAMBA,
    "FalconH1ForCausalLM": FALCON_H1,
    "FalconMambaForCausalLM": FALCON_MAMBA,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Glm5NextForConditionalGeneration": GLM5_NEXT,
    "GptOssForCausalLM": GPT_OSS,
    "GraniteMoeHybridForCausalLM": GRANITE_HYBRID,
    "Inkling2ForCausalLM": INKLING2,
    "Inkling2ForConditionalGeneration": INKLING2,
    "InklingForCausalLM": INKLING,
    "InklingForConditionalGeneration": INKLING,
    "InternS2PreviewForConditionalGeneration": INTERN_S2,
    "JambaForCausalLM": JAMBA,
    "KimiLinearForCausalLM": KIMI_LINEAR,
    "LaraMiniForCausalLM": LARA_MINI,
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": LFM2_MOE,
    "Lfm2VlForConditionalGeneration": LFM2,
    "Lfm3ForCausalLM": LFM3,
    "Lfm3VlForConditionalGeneration": LFM3,
    "LlamaForCausalLM": LLAMA,
    "Mamba2ForCausalLM": MAMBA2,
    "MambaForCausalLM": MAMBA,
    "MiniCPMV4_6ForConditionalGeneration": MINICPM_V,
    "MiniCPMV4_7ForConditionalGeneration": MINICPM_V,
    "MiniMaxForCausalLM": MINIMAX,
    "NemotronHForCausalLM": NEMOTRON_H,
    "NemotronHPuzzleForCausalLM": NEMOTRON_PUZZLE,
    "NemotronH_Nano_Omni_Reasoning_V3": NEMOTRON_OMNI,
    "NemotronH_Omni_Reasoning_V3": NEMOTRON_OMNI,
    "OlmoHybridForCausalLM": OLMO_HYBRID,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5ForConditionalGeneration": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5_MOE,
    "Qwen4ExpForCausalLM": QWEN4_EXP,
    "Qwen4ExpForConditionalGeneration": QWEN4_EXP,
    "RecurrentGemmaForCausalLM": RECURRENT_GEMMA,
    "Zamba2ForCausalLM": ZAMBA2,
    "ZayaForCausalLM": ZAYA,
}
