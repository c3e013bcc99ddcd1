"""Renders a chat template of plain messages with jinja2 alone, in its sandbox.

The names and filters that a template may use are those of transformers. Conversations with tools,
documents or parts other than text are rendered by transformers itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

PLAIN_KEYS = {"role", "content"}
OTHER_TAGS = re.compile(r"\{%[-+]?\s*generation\b")  # an extension of transformers


def is_simple(messages: Any) -> bool:
    """Whether messages have a role and a text, and nothing else."""
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(
            type(message) is dict
            and message.keys() <= PLAIN_KEYS
            and all(type(value) is str for value in message.values())
            for message in messages
        )
    )


def has_known_tags(source: Any) -> bool:
    """Whether a template can be compiled here if it can be compiled at all."""
    return isinstance(source, str) and not OTHER_TAGS.search(source)


def render(
    source: str, messages: list[dict[str, str]], names: Mapping[str, str], prompted: bool
) -> str:
    """The text of a conversation. Raises the errors of jinja2.

    names: variables, such as bos_token. prompted: the text ends with the prompt for an answer.
    """
    copies = [dict(message) for message in messages]
    return str(
        _compiled(source).render(
            messages=copies,
            tools=None,
            documents=None,
            add_generation_prompt=prompted,
            **names,
        )
    )


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    """The template in a sandbox without access to Python's objects."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    sandbox.filters["tojson"] = _as_json
    sandbox.globals.update(raise_exception=_raise, strftime_now=_now)
    return sandbox.from_string(source)


def _as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
