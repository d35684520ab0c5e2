"""Tiny seeded models that take images beside text, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from tests.equivalence.hybrid_configs import HYBRID_CONFIGS

IMAGE, VIDEO, START, END = 95, 94, 93, 92
_TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48}
_QWEN_VISION: dict[str, Any] = {
    **_VISION,
    "depth": 2,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}
_QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_SECTIONS: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


def varied(model: Any) -> Any:
    """Enlarge the weights, so that greedy output does not repeat itself; every row has the full length."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2 and parameter.std() < 0.05:
                parameter.mul_(4)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def left_padded(prompts: list[list[int]]) -> dict[str, Tensor]:
    """Ids and mask of ragged prompts."""
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[0] * (width - len(p)) + p for p in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
    }


def _image(num_tokens: int) -> list[int]:
    return [START, *[IMAGE] * num_tokens, END]


def llava() -> tuple[Any, dict[str, Any]]:
    vision = CLIPVisionConfig(
        **_VISION, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8, projection_dim=32
    )
    config = LlavaConfig(
        vision_config=vision, text_config=LlamaConfig(**_TEXT), image_token_id=IMAGE, vision_feature_layer=-1
    )
    inputs = left_padded([[5, *_image(4), 7, 8], [*_image(4), 9], [3, 4, 5, 6, *_image(4), 10, 11, 12]])
    return LlavaForConditionalGeneration(config), {**inputs, "pixel_values": torch.randn(3, 3, 16, 16)}


def gemma3() -> tuple[Any, dict[str, Any]]:
    """Tokens of an image see each other in both directions."""
    text = {
        **_TEXT,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 8,
    }
    vision = {**_VISION, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
    config = Gemma3Config(text_config=text, vision_config=vision, image_token_id=IMAGE, mm_tokens_per_image=4)
    inputs = left_padded([[5, *_image(4), 7, 8], [*_image(4), 9], [3, 4, 5, 6, *_image(4), 10, 11, 12]])
    types = (inputs["input_ids"] == IMAGE).long()
    model: Any = Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)  # zeros when new
    return model, {**inputs, "token_type_ids": types, "pixel_values": torch.randn(3, 3, 16, 16)}


def _qwen_inputs() -> dict[str, Any]:
    """Positions in three sections; the last prompt ends inside of an image, where the sections differ."""
    inputs = left_padded([[5, *_image(4), 7, 8], [*_image(6), 9], [3, 4, 5, 6, START, *[IMAGE] * 6]])
    grid = torch.tensor([[1, 4, 4], [1, 4, 6], [1, 4, 6]])
    pixels = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 4 * 4)
    types = (inputs["input_ids"] == IMAGE).int()
    return {**inputs, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": types}


def qwen2_vl() -> tuple[Any, dict[str, Any]]:
    vision = {**_QWEN_VISION, "embed_dim": 32, "mlp_ratio": 2}
    config = Qwen2VLConfig(text_config={**_TEXT, "rope_parameters": _SECTIONS}, vision_config=vision, **_QWEN_TOKENS)
    return Qwen2VLForConditionalGeneration(config), _qwen_inputs()


def qwen2_5_vl() -> tuple[Any, dict[str, Any]]:
    vision = {**_QWEN_VISION, "out_hidden_size": 32, "fullatt_block_indexes": [1], "window_size": 16}
    config = Qwen2_5_VLConfig(text_config={**_TEXT, "rope_parameters": _SECTIONS}, vision_config=vision, **_QWEN_TOKENS)
    return Qwen2_5_VLForConditionalGeneration(config), _qwen_inputs()


def qwen3_5() -> tuple[Any, dict[str, Any]]:
    """Recurrent states and images."""
    vision = {**_QWEN_VISION, "out_hidden_size": 32, "num_position_embeddings": 16}
    rope = {**_SECTIONS, "mrope_interleaved": True, "partial_rotary_factor": 1.0}
    text = {**HYBRID_CONFIGS["qwen3_5_text"], "rope_parameters": rope}
    config = Qwen3_5Config(text_config=text, vision_config=vision, **_QWEN_TOKENS)
    return Qwen3_5ForConditionalGeneration(config), _qwen_inputs()


_MAKERS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "gemma3": gemma3,
    "llava": llava,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen2_vl": qwen2_vl,
    "qwen3_5": qwen3_5,
}
MEDIA_TYPES = sorted(_MAKERS)


def media_model(model_type: str) -> tuple[Any, dict[str, Any]]:
    """A model and three prompts with one image each, as keyword arguments of `generate`."""
    torch.manual_seed(0)
    model, inputs = _MAKERS[model_type]()
    return varied(model), inputs
