"""What a model's chat template shows of messages; what it leaves out is told to who sent it."""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress

from forerun.errors import ForerunError
from forerun.models.tokenizer import Tokenizer
from forerun.serving.errors import ApiError, bad

log = logging.getLogger("forerun.serving")
FIRST = "system", "developer"  # roles of messages that say how to answer
RESULTS = "tool", "function"  # roles of messages that answer the model's calls
Messages = list[dict[str, str]]


class Template:
    """The chat template of a tokenizer. name: what the log calls the model."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self._tokenizer, self._name = tokenizer, name
        self._has_told = False  # that messages of FIRST are left out

    def text(self, messages: Messages) -> str:
        """The prompt. Raises ApiError 400 where messages are refused, or results of tools left out.

        Of system messages, which clients send by habit, the log says so once.
        """
        try:
            text = self._tokenizer.chat_text(messages)
        except ForerunError as error:
            raise bad(f"{error}, to /v1/completions", "messages") from None
        except Exception as error:  # templates are programs of their own, and refuse as they like
            raise bad(
                f"the model's chat template refuses these messages: {str(error)[:300]}", "messages"
            ) from None
        if self._leaves_out(RESULTS, messages, text):
            raise bad(
                "the model's chat template has no place for messages of tools and functions; say "
                "what they hold in a user message",
                "messages",
                "unsupported_value",
            )
        if not self._has_told and self._leaves_out(FIRST, messages, text):
            self._has_told = True
            log.warning(
                "the chat template of %s has no place for system messages: they are accepted "
                "and not shown to the model (said once)",
                self._name,
            )
        return text

    def _leaves_out(self, roles: Collection[str], messages: Messages, text: str) -> bool:
        """Whether messages of these roles say something and `text` is made without them."""
        if not any(message["role"] in roles for message in said(messages)):
            return False
        others = [message for message in messages if message["role"] not in roles]
        with suppress(Exception):  # as above
            return text == (self._tokenizer.chat_text(others) if others else "")
        return False


def said(messages: Messages) -> Messages:
    """The messages that have text."""
    return [message for message in messages if message["content"].strip()]


def empty(messages: Messages) -> ApiError:
    """Why messages make a prompt without a token."""
    roles = " or ".join(sorted({message["role"] for message in said(messages)}))
    why = (
        f"the model's chat template shows none of role {roles}; add one that it shows, as a user's"
        if roles
        else "none of them has text, and the model's chat template adds none; write something"
    )
    return bad(f"the messages make an empty prompt: {why}", "messages")
