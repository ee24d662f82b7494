"""Configurations of the vision tower that Qwen3.5 and its successors share."""

from typing import Final

from strandline.architectures.architecture import VisionPart

QWEN_VISION: Final = VisionPart(
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "num_position_embeddings": 2304,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "deepstack_visual_indexes": (),
    },
    outer_defaults={
        "image_token_id": 248056,
        "vision_start_token_id": 248053,
        "vision_end_token_id": 248054,
    },
    spellings={"num_hidden_layers": "depth", "num_attention_heads": "num_heads"},
)
