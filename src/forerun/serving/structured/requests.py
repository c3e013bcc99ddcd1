"""Constraints and tools of a request: checks, and what a chat template is given."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from forerun.core.sampling import Sampling
from forerun.serving.errors import bad
from forerun.serving.structured import tool_messages
from forerun.serving.structured.fields import UNSUPPORTED, Wanted
from forerun.serving.structured.tool_messages import Messages
from forerun.serving.structured.tools import Tools

FIXES = {  # what to use instead
    "smc": "; use awrs with n choices and resample them by their logw, or run `forerun generate "
    "--constraint-sampling smc`"
}
FORM = "response_format"  # what an answer without a call must be


def with_tools(tools: Tools, own: Wanted | None) -> tuple[Wanted, list[Wanted]]:
    """The constraint of a request with tools, and its parts.

    own: the request's other constraint. Raises ApiError 400 if it forbids calls.
    """
    if own is not None and not own.param.startswith(FORM):
        raise bad(
            f"{own.param} cannot be combined with tools; leave one of them out, or set tool_choice "
            "to none",
            own.param,
        )
    parts = tools.parts() + ([] if own is None else [own])
    return Wanted("tools", tools.constraint(own and own.constraint)), parts


def check_options(sampling: Sampling, is_constrained: bool, samplings: Collection[str]) -> None:
    """Raises ApiError 400 for options of constraints that the request or server cannot use."""
    how, param = sampling.constraint_sampling, "constraint_sampling"
    if how not in samplings:
        known = ", ".join(samplings)
        text = f"{param} {how!r} is not offered by this server; known: {known}"
        raise bad(text + FIXES.get(how, ""), param, UNSUPPORTED)
    if is_constrained:
        return
    if how != "mask":
        raise bad(f"{param} needs a constraint, such as guided_json", param)
    if sampling.constraint_start is not None:
        param = "constraint_start"
        raise bad(f"{param} needs a constraint, such as guided_json", param)


def for_template(
    messages: Messages, tools: Tools | None, template: Any
) -> tuple[Messages, list[dict[str, Any]] | None]:
    """The messages, and the tools if the chat template writes them itself."""
    functions = tools.functions if tools else ()
    if not functions and not any("tool_calls" in message for message in messages):
        return messages, None
    if tool_messages.knows_tools(template):
        return messages, tool_messages.as_dicts(functions)
    return tool_messages.as_plain(messages, functions), None


def num_chars(messages: Messages, tools: list[dict[str, Any]] | None) -> int:
    """The length of all texts that a chat template is given."""
    count = sum(len(message["content"]) for message in messages)
    calls = [message["tool_calls"] for message in messages if "tool_calls" in message]
    return count + (len(json.dumps([calls, tools])) if calls or tools else 0)
