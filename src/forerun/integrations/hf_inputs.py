"""Checks of what `generate` was called with: every argument is used, or refused by name."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ConfigError

CACHES = ("past_key_values", "cache", "cache_params")
# used here, or set by `generate` itself without an effect on the tokens
USED = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position", *CACHES}
TOKEN_KINDS = ("token_type_ids", "mm_token_type_ids")  # all zero for text
MAX_FRAMES = 8  # between `generate` of transformers and ours
OTHER_LOOPS = {  # field of a generation config -> the value with which it does nothing
    "num_beams": 1,
    "num_beam_groups": 1,
    "penalty_alpha": None,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
}
RECORDS = ("output_attentions", "output_hidden_states")


def caller_arguments() -> dict[str, Any]:
    """Arguments of the `generate` that runs a custom loop, which it does not pass on.

    They are read from its frame. Empty if the loop was called in another way.
    """
    frame = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name == "generate" and "custom_generate" in frame.f_locals:
            given = frame.f_locals
            names = ("streamer", "assistant_model", "synced_gpus")
            return {**given.get("kwargs", {}), **{name: given.get(name) for name in names}}
        frame = frame.f_back  # type: ignore[assignment]
    return {}


def check_arguments(arguments: dict[str, Any]) -> None:
    """Raises ConfigError for arguments of `generate` that this loop cannot serve."""
    if (assistant := arguments.get("assistant_model")) is not None:
        raise ConfigError(
            f"assistant_model={type(assistant).__name__} is not used by this loop; remove it and "
            "name a drafter instead, such as drafter='stand'"
        )
    if arguments.get("synced_gpus"):
        raise ConfigError("synced_gpus=True is not supported; use plain generate")


def check_config(model: Any, config: Any) -> None:
    """Raises ConfigError for settings of another decoding loop, and for unsupported outputs."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(f"{name} is an encoder-decoder; use a decoder-only model")
    for field, neutral in OTHER_LOOPS.items():
        value = getattr(config, field, neutral)
        if value not in (neutral, None):
            raise ConfigError(
                f"{field} must be {neutral}, got {value!r}; remove it or use plain generate"
            )
    if getattr(config, "cache_implementation", None) == "quantized":
        raise ConfigError(
            "cache_implementation='quantized' changes the logits and is not supported; remove it "
            "or use plain generate"
        )
    for field in RECORDS:
        if getattr(config, field, False) and config.return_dict_in_generate:
            raise ConfigError(f"{field} is not supported; remove it or use plain generate")
    if "prepare_inputs_for_generation" in vars(model):
        raise ConfigError(
            f"prepare_inputs_for_generation of this {name} was replaced, for example by learned "
            "prompts of peft, and this loop does not call it; use plain generate"
        )


def check_inputs(
    model: Any, input_ids: Tensor, inputs: dict[str, Any], arguments: dict[str, Any]
) -> None:
    """Raises ConfigError for inputs of the model other than token ids and their mask.

    arguments: those of `generate`, which may have replaced images by their encodings.
    """
    if inputs.get("mm_encoder_outputs"):
        sources = {k: v for k, v in arguments.items() if isinstance(v, Tensor) and k not in USED}
        inputs = {**sources, **inputs}
    for name, value in inputs.items():
        is_empty = value is None or (isinstance(value, dict | list | tuple) and not value)
        if is_empty or name in USED or _is_text_only(model, name, value):
            continue
        raise ConfigError(
            f"{name}={_shown(value)} is not supported: this loop reads token ids and their mask "
            "only; remove it or use plain generate"
        )
    for name in CACHES:
        check_cache(name, inputs.get(name))
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        hint = "; pass input_ids" if "inputs_embeds" not in inputs else ""
        raise ConfigError(f"input_ids has shape {list(input_ids.shape)}: a prompt is empty{hint}")
    check_given_mask(input_ids, arguments.get("attention_mask"))
    mask = inputs.get("attention_mask")
    if mask is not None:
        check_mask(input_ids, mask)
    check_positions(inputs.get("position_ids"), input_ids, mask)


def check_cache(name: str, cache: Any) -> None:
    """Raises ConfigError for a cache of the user: its cells would be ignored and not updated."""
    if cache is None:
        return
    content = cache_content(cache)
    if getattr(cache, "_is_user_defined", False) or content:
        raise ConfigError(
            f"{name}={type(cache).__name__} with {content or '0 tokens'} is not supported: this "
            "loop has a cache of its own; remove it or use plain generate"
        )


def cache_content(cache: Any) -> str:
    """What a cache of transformers holds, "" if it is empty."""
    try:
        count = getattr(cache, "get_seq_length", lambda: len(cache))()
    except ValueError:  # recurrent layers only, which count no tokens
        return "a state" if cache.has_previous_state() else ""
    return f"{int(count)} tokens" if count else ""


def check_given_mask(input_ids: Tensor, mask: Any) -> None:
    """Raises ConfigError for a mask of `generate` with another shape than the token ids.

    `generate` repeats rows, and drops a mask of ones after it has made positions from it.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return
    rows, length = mask.shape
    if length != input_ids.shape[1] or not rows or len(input_ids) % rows:
        raise ConfigError(
            f"attention_mask must have the shape of input_ids, {list(input_ids.shape)}, got "
            f"{list(mask.shape)}"
        )


def check_mask(input_ids: Tensor, mask: Tensor) -> None:
    """Raises ConfigError unless the mask [B, L] marks a non-empty suffix of each row."""
    if mask.shape != input_ids.shape:
        raise ConfigError(
            f"attention_mask must have the shape of input_ids, {list(input_ids.shape)}, got "
            f"{list(mask.shape)}"
        )
    kept = mask.bool().int()
    if (mask != kept.to(mask.dtype)).any():
        raise ConfigError("attention_mask must hold 0 and 1 only; use plain generate for weights")
    empty = (kept.sum(1) == 0).nonzero().flatten().tolist()
    if empty:
        raise ConfigError(
            f"attention_mask of row {empty[0]} is all zeros: the prompt is empty; remove this row "
            "or give it a first token"
        )
    if (kept.diff(dim=1) < 0).any():
        raise ConfigError("prompts must be padded on the left; set tokenizer.padding_side='left'")


def check_positions(positions: Tensor | None, input_ids: Tensor, mask: Tensor | None) -> None:
    """Raises ConfigError for positions that do not count the unmasked tokens of each row."""
    if positions is None:
        return
    kept = torch.ones_like(input_ids) if mask is None else mask.int().to(input_ids.device)
    usual = kept.cumsum(1) - 1
    length = min(positions.shape[-1], usual.shape[-1])
    given, usual, kept = positions[..., -length:], usual[:, -length:], kept[:, -length:].bool()
    differ = (given.to(usual.device) != usual) & kept
    if differ.any():
        raise ConfigError(
            f"position_ids={_shown(positions)} differ from 0, 1, 2, ... of each row and are not "
            "supported; remove them or use plain generate"
        )


def _is_text_only(model: Any, name: str, value: Any) -> bool:
    """Whether all tokens are of the kind text, for a model that also sees images."""
    is_multimodal = model.config.get_text_config() is not model.config
    return is_multimodal and name in TOKEN_KINDS and not torch.as_tensor(value).any()


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"tensor of shape {list(value.shape)}"
    return repr(value)[:40]
