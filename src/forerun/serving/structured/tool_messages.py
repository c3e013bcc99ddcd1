"""Messages with tools and calls, in the form that a chat template takes.

A template that writes calls as `<tool_call>` gets the tools and calls as they are. For others the
tools are described in a system message, and calls and results are written into the messages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Many
from typing import Any

from forerun.serving.errors import bad
from forerun.serving.schemas import Function, ToolCall
from forerun.serving.structured.tools import BEGIN, END

Messages = list[dict[str, Any]]
RESPONSE = "<tool_response>\n{}\n</tool_response>"


def knows_tools(template: Any) -> bool:
    """Whether a chat template writes tools and calls in our form."""
    return "tools" in str(template) and BEGIN in str(template)


def as_dicts(functions: Many[Function]) -> list[dict[str, Any]]:
    """Functions as chat templates take them."""
    return [
        {"type": "function", "function": one.model_dump(exclude_none=True, exclude={"strict"})}
        for one in functions
    ]


def calls_as_dicts(calls: Many[ToolCall], where: str) -> list[dict[str, Any]]:
    """Calls as chat templates take them. Raises ApiError for arguments that are no object."""
    found = []
    for i, call in enumerate(calls):
        param = f"{where}.{i}.function.arguments"
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            shown = repr(call.function.arguments)[:60]
            raise bad(f"{param}: expected a JSON object as text, got {shown}", param)
        function = {"name": call.function.name, "arguments": arguments}
        found.append({"id": call.id or "", "type": "function", "function": function})
    return found


def described(functions: Many[Function]) -> str:
    """The text that explains the tools of a request to a model."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in as_dicts(functions))
    return (
        f"You can call these functions:\n<tools>\n{listed}\n</tools>\n\nTo call a function, write "
        f'a JSON object with its name and its arguments:\n{BEGIN}\n{{"name": <name>, "arguments": '
        f"<arguments>}}\n{END}"
    )


def as_plain(messages: Messages, functions: Many[Function]) -> Messages:
    """The messages with tools, calls and results as text."""
    plain = [_plain(message) for message in messages]
    if not functions:
        return plain
    if plain[0]["role"] in ("system", "developer"):
        first = plain[0] | {"content": f"{plain[0]['content']}\n\n{described(functions)}".lstrip()}
        return [first, *plain[1:]]
    return [{"role": "system", "content": described(functions)}, *plain]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": RESPONSE.format(message["content"])}
    if "tool_calls" not in message:
        return message
    calls = (_written(call["function"]) for call in message["tool_calls"])
    content = "\n".join(filter(None, [message["content"], *calls]))
    return {"role": message["role"], "content": content}


def _written(function: dict[str, Any]) -> str:
    name, arguments = json.dumps(function["name"]), json.dumps(function["arguments"])
    return f'{BEGIN}\n{{"name": {name}, "arguments": {arguments}}}\n{END}'
