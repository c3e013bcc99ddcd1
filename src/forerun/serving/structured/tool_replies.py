"""Tool calls of one choice in OpenAI's format, in a message and in chunks of a stream."""

from __future__ import annotations

import secrets
from typing import Any

from forerun.serving.structured.tool_parser import Arguments, Begin, Content, Part, ToolParser


class Calls:
    """The calls that the text of a choice holds. start: text before which there are none.

    can_stop: whether a stop string may cut a call. Such a call is content.
    """

    def __init__(self, start: str | None = None, *, can_stop: bool = False) -> None:
        self._parser = ToolParser(start, holds=can_stop)

    def message(self, text: str, reason: str) -> dict[str, Any]:
        """Content and calls of a whole text, as fields of a message. reason: why it ended."""
        content, calls = "", list[dict[str, Any]]()
        for part in self._parts(text, reason):
            if isinstance(part, Content):
                content += part.text
            elif isinstance(part, Begin):
                calls.append(_begin(part))
            else:
                calls[part.number]["function"]["arguments"] += part.text
        if not calls:
            return {"content": content}
        return {"content": content or None, "tool_calls": calls}

    def deltas(self, text: str, reason: str | None) -> list[dict[str, Any]]:
        """Deltas for the next text of a stream: the name of a call first, then its arguments.

        reason: why the text ended, with the last one.
        """
        return [_delta(part) for part in self._parts(text, reason)]

    def finish(self, reason: str | None) -> str | None:
        """The finish reason: `tool_calls` for a text that ended after the arguments of a call."""
        is_call = self._parser.num_calls and self._parser.is_whole
        return "tool_calls" if reason == "stop" and is_call else reason

    def _parts(self, text: str, reason: str | None) -> list[Part]:
        found = self._parser.feed(text)
        return found if reason is None else found + self._parser.finish(reason)


def _delta(part: Part) -> dict[str, Any]:
    if isinstance(part, Content):
        return {"content": part.text}
    if isinstance(part, Begin):
        return {"tool_calls": [{"index": part.number} | _begin(part)]}
    assert isinstance(part, Arguments)
    return {"tool_calls": [{"index": part.number, "function": {"arguments": part.text}}]}


def _begin(part: Begin) -> dict[str, Any]:
    """A call without arguments yet."""
    function = {"name": part.name, "arguments": ""}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
