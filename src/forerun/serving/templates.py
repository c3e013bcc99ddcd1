"""Renders messages with the model's chat template, and detects roles that it drops."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from forerun.errors import ForerunError
from forerun.models.tokenizer import Tokenizer
from forerun.serving.errors import ApiError, bad

log = logging.getLogger("forerun.serving")
SYSTEM_ROLES = "system", "developer"
TOOL_ROLES = "tool", "function"
Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]


class Template:
    """The chat template of a tokenizer. name: of the model, for the log. render: renders it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        name: str,
        render: Callable[[Messages, Tools | None], str] | None = None,
    ) -> None:
        self._render, self._name = render or tokenizer.chat_text, name
        self._has_warned = False  # about dropped system messages

    def text(self, messages: Messages, tools: Tools | None = None) -> str:
        """The prompt. Raises ApiError 400 if the template rejects messages or drops tool results.

        Dropped system messages, which many clients always send, are logged once.
        """
        try:
            text = self._render(messages, tools)
        except ApiError:
            raise
        except ForerunError as error:
            raise bad(f"{error}, to /v1/completions", "messages") from None
        if self._drops(TOOL_ROLES, messages, tools, text):
            raise bad(
                "the model's chat template does not support tool and function messages; put their "
                "content into a user message",
                "messages",
                "unsupported_value",
            )
        if not self._has_warned and self._drops(SYSTEM_ROLES, messages, tools, text):
            self._has_warned = True
            log.warning(
                "the chat template of %s does not support system messages: they are accepted, "
                "but the model does not see them (logged once)",
                self._name,
            )
        return text

    def _drops(
        self, roles: Collection[str], messages: Messages, tools: Tools | None, text: str
    ) -> bool:
        """Whether messages of these roles have text that the template drops."""
        if not any(message["role"] in roles for message in with_text(messages)):
            return False
        others = [message for message in messages if message["role"] not in roles]
        with suppress(Exception):  # of the template
            return text == (self._render(others, tools) if others else "")
        return False


def with_text(messages: Messages) -> Messages:
    """The messages with text."""
    return [message for message in messages if message["content"].strip()]


def empty(messages: Messages) -> ApiError:
    """The error for messages that make an empty prompt."""
    roles = " or ".join(sorted({message["role"] for message in with_text(messages)}))
    why = (
        f"the model's chat template drops messages of role {roles}; add a user message"
        if roles
        else "none of them has text, and the model's chat template adds none; add text"
    )
    return bad(f"the messages make an empty prompt: {why}", "messages")
