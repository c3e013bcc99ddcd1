"""Converts prompts, messages and biases of requests to the forms that the engine takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from forerun.core.sampling import token_id
from forerun.errors import ConfigError
from forerun.serving.errors import bad
from forerun.serving.schemas import Message, Part
from forerun.serving.structured.tool_messages import calls_as_dicts


def prompt_list(prompt: str | list[Any]) -> list[str | list[int]]:
    """Any form of `prompt` as a list of texts or of lists of token ids. Raises ApiError."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad("the prompt is an empty list; give it at least one text", "prompt")
    is_one = _is_id(prompt[0])
    for at, item in enumerate(prompt):
        if not (_is_id(item) if is_one else _is_prompt(item)):
            raise bad(
                "prompt must be a text, a list of token ids, or a list of texts or of such lists; "
                f"got {json.dumps(item)[:40]} at position {at} of "
                f"{'token ids' if is_one else 'the list'}",
                "prompt",
            )
    return [prompt] if is_one else prompt


def _is_id(item: Any) -> bool:
    return type(item) is int  # excludes bool


def _is_prompt(item: Any) -> bool:
    return isinstance(item, str) or isinstance(item, list) and item != [] and all(map(_is_id, item))


def plain_message(i: int, message: Message) -> dict[str, Any]:
    """Message i as chat templates take it. Raises ApiError if its content is not text."""
    where = f"messages.{i}"
    if message.function_call or message.annotations or message.audio:
        raise bad(
            f"{where}: function_call, annotations and audio are not supported",
            where,
            "unsupported_value",
        )
    if message.tool_calls and message.role != "assistant":
        raise bad(f"{where}.tool_calls needs the role assistant", f"{where}.tool_calls")
    more: dict[str, Any] = {"name": message.name} if message.name else {}
    if message.tool_call_id and message.role == "tool":
        more["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        more["tool_calls"] = calls_as_dicts(message.tool_calls, f"{where}.tool_calls")
    if not message.content and message.content != "" and not message.tool_calls:
        came = "null" if message.content is None else "an empty list"
        raise bad(
            f"{where}.content: expected a text or a list of text parts, got {came}",
            f"{where}.content",
        )
    text = plain_text(message.content or "", f"{where}.content")
    return {"role": message.role, "content": text} | more


def plain_text(content: str | list[Part], where: str) -> str:
    """The text of a content, a string or a list of parts. Raises ApiError."""
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type != "text":
            raise bad(
                f"{where}: expected parts of type 'text', got {part.type[:40]!r}; this model reads "
                "text only",
                where,
                "unsupported_value",
            )
        if part.text is None:
            raise bad(f"{where}.{i}.text is required in a part of type 'text'", f"{where}.{i}.text")
    return "".join(part.text or "" for part in content)


def biases(given: Mapping[str, float], vocab: int) -> dict[int, float]:
    """logit_bias by token id. Raises ApiError for ids not below `vocab`."""
    try:
        found = {token_id(key): bias for key, bias in given.items()}
    except ConfigError as error:
        raise bad(str(error), "logit_bias") from None
    if (most := max(found, default=0)) >= vocab:
        raise bad(f"logit_bias names token {most}, but ids end at {vocab - 1}", "logit_bias")
    return found
