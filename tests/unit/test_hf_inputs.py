"""Inputs of transformers' `generate`: served, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hf_small import CACHE, IS_RENAMED, PROMPT, SIZES, made, ours, same
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    FalconMambaConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
)
from transformers.generation.streamers import BaseStreamer

from forerun.errors import ConfigError
from forerun.integrations.hf import generate
from forerun.integrations.hf_candidates import candidates


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position_ids", torch.arange(9)[None] + 3),
        (CACHE, DynamicCache()),
        ("output_attentions", True),
        ("prompt_lookup_num_tokens", 4),
        ("num_beams", 2),
        ("cache_implementation", "quantized"),
    ],
)
def test_arguments_without_a_use_are_refused_by_name(fresh: Any, name: str, value: Any) -> None:
    options = {name: value, "return_dict_in_generate": True}
    with pytest.raises((ConfigError, ImportError), match="cache|" + name):
        ours(fresh, **options)


def test_embeddings_as_inputs_are_refused(fresh: Any) -> None:
    embeds = fresh.get_input_embeddings()(PROMPT)
    options = {"max_new_tokens": 4, "custom_generate": generate}
    with pytest.raises(ConfigError, match="inputs_embeds"):
        fresh.generate(inputs_embeds=embeds, **options)
    with pytest.raises(ConfigError, match="inputs_embeds"):
        fresh.generate(PROMPT, inputs_embeds=embeds, **options)


def test_token_types_of_gpt2_are_refused() -> None:
    with pytest.raises(ConfigError, match="token_type_ids"):
        ours(made("gpt2"), token_type_ids=torch.zeros_like(PROMPT))


def test_an_assistant_model_is_refused(fresh: Any) -> None:
    with pytest.raises(ConfigError, match="assistant_model"):
        ours(fresh, assistant_model=copy.deepcopy(fresh))


@pytest.mark.parametrize("shape", [(1, 12), (1, 5), (2, 9)])
def test_a_mask_of_another_shape_is_named(fresh: Any, shape: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"attention_mask must have the shape of input_ids, \[1"):
        ours(fresh, attention_mask=torch.ones(shape))


@pytest.mark.parametrize("role", ["drafter", "verifier", "controller"])
@pytest.mark.parametrize("value", [None, 3, [], {}, int])
def test_what_is_no_method_is_refused_in_a_line(fresh: Any, role: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{role} must be a name, such as '.*', got"):
        fresh.generate(PROMPT, max_new_tokens=2, custom_generate=generate, **{role: value})
    if role == "drafter":
        with pytest.raises(ConfigError, match="drafter must be a name"), candidates(fresh, value):
            pass


KINDS_WITH_STATE: dict[str, tuple[Any, dict[str, Any]]] = {
    "mamba": (MambaConfig, {}),
    "falcon_mamba": (FalconMambaConfig, {}),
    "mamba2": (Mamba2Config, {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}),
}


@pytest.mark.parametrize("kind", KINDS_WITH_STATE)
def test_models_without_attention_are_served(kind: str) -> None:
    config, own = KINDS_WITH_STATE[kind]
    torch.manual_seed(7)
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id")
    sizes = {name: SIZES[name] for name in names} | {"bos_token_id": 1, "eos_token_id": None}
    model = AutoModelForCausalLM.from_config(config(**sizes, **own)).eval()
    for parameter in model.parameters():
        parameter.data *= 4 if parameter.dim() > 1 else 1
    assert same(model)
    ids = torch.tensor([[0, 0, 5, 6, 7, 5, 6], [4, 9, 3, 9, 3, 7, 7]])
    assert same(model, ids, attention_mask=(ids > 0).long())
    name = "cache" if IS_RENAMED else "cache_params"
    cache = model(input_ids=PROMPT, use_cache=True)[name]
    with pytest.raises(ConfigError, match=f"{name}=DynamicCache with a state"):
        ours(model, **{name: cache})


def test_usual_positions_and_masks_are_served(fresh: Any) -> None:
    ids = torch.tensor([[0, 0, 5, 6, 7], [4, 9, 3, 9, 3]])
    mask = (ids > 0).long()
    mask[1] = 1
    assert same(fresh, ids, attention_mask=mask)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    assert same(fresh, ids, attention_mask=mask, position_ids=positions)
    assert same(fresh, PROMPT, attention_mask=torch.ones_like(PROMPT).bool())
    assert same(fresh, PROMPT, use_cache=False)


def test_right_padding_in_a_boolean_mask_is_refused(fresh: Any) -> None:
    mask = torch.tensor([[True] * 6 + [False] * 3])
    with pytest.raises(ConfigError, match="left"):
        ours(fresh, attention_mask=mask)


class Kept(BaseStreamer):
    def __init__(self) -> None:
        self.got: list[int] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.got += value.flatten().tolist()

    def end(self) -> None:
        self.ends += 1


def test_the_streamer_of_generate_is_served(fresh: Any) -> None:
    streamer = Kept()
    out = ours(fresh, streamer=streamer)
    assert streamer.got == out[0].tolist() and streamer.ends == 1


def tiny_vlm() -> Any:
    """A LLaVA with small towers."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    text = LlamaConfig(**SIZES, max_position_embeddings=128)
    torch.manual_seed(3)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=40)
    model = LlavaForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def test_images_are_refused_and_text_of_the_same_model_is_served() -> None:
    model = tiny_vlm()
    ids = torch.tensor([[5, 40, 40, 40, 40, 6]])
    pixels = torch.randn(1, 3, 8, 8)
    with pytest.raises(ConfigError, match="pixel_values"):
        ours(model, ids, pixel_values=pixels)
    assert same(model)
