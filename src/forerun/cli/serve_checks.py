"""Checks of `forerun serve` before a model is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any

from forerun.cli import options
from forerun.cli.output import notice
from forerun.cli.serve_options import KEYS_VARIABLE
from forerun.errors import ConfigError, DataError, install_extra

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer
    from forerun.serving.settings import Settings
    from forerun.serving.tenants import Keys

MIN_CONTEXT_TOKENS = 2  # one of the prompt and one of the answer
SETTINGS = (  # fields of `Settings` with an option of the same name
    "verifier",
    "controller",
    "allow_lossy",
    "share_prefixes",
    "max_seqs",
    "max_waiting",
    "max_samples",
    "max_nodes",
    "max_body",
    "drain",
    "text_timeout",
    "grammar_timeout",
    "learn",
    "learn_interval",
    "learn_rate",
)
OPTIONS = {  # fields of `Settings` with an option of another name
    "request_timeout": "timeout",
    "methods": "method",
    "operators": "operator",
    "head_timeout": "header-timeout",
    "constraints": "constraint",
}
REASONER_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ m.content }}\n\n"
    "{% elif m.role == 'user' %}Problem: {{ m.content | trim }}\nSolution:\n{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True)
class Checked:
    """The parts of a server that need no model."""

    settings: Settings
    keys: Keys
    template: str | None  # replaces the model's chat template
    sockets: list[socket]


def check(given: dict[str, Any]) -> Checked:
    """Checks the options, takes the port, and then checks the model's files.

    The caller closes the sockets.
    Raises ConfigError, DataError, ModelError.
    """
    from forerun.models.paths import check_device

    model, replicas = given["model"], given["replicas"]
    if given["learn"] and replicas != 1:
        raise ConfigError("--learn works with one engine; leave out --replicas")
    check_device(given["device"])
    _check_context(given["context"])
    _check_packages(replicas)
    if given["learn"]:
        drafter = _online_drafter(model, given["drafter"], given["method"])
        given = given | {"drafter": drafter}
    settings = _settings(given)
    keys, template = _keys(given["api_keys"]), _template(given["chat_template"], model)
    _check_tenants(settings, keys)
    from forerun.serving.server import bind_sockets

    sockets = bind_sockets(given["host"], given["port"])
    with ExitStack() as opened:
        for one in sockets:
            opened.enter_context(one)
        _check_model(given, template)
        opened.pop_all()
    return Checked(settings, keys, template, sockets)


def template_check(model: str, template: str | None) -> Callable[[Tokenizer], None] | None:
    """A check of the model's chat template; None if `template` replaces it.

    It raises TemplateError for one that renders no message.
    """
    from forerun.models.chat_template import TemplateError

    if template is not None:
        return None
    check_template = options.chat_check(model)

    def check_tokenizer(tokenizer: Tokenizer) -> None:
        try:
            check_template(tokenizer)
        except TemplateError as error:
            problem = (str(error).rpartition("; ")[0] or str(error)).rstrip(".")
            raise TemplateError(
                f"{problem}; correct it, or replace it by --chat-template FILE"
            ) from error

    return check_tokenizer


def _check_model(given: dict[str, Any], template: str | None) -> None:
    """Checks the model's folder; for several engines its chat template, too. Raises ModelError.

    Engines on a cluster may have other paths: a model that is not here is not checked.
    """
    from forerun.models.identity import local_folder
    from forerun.models.tokenizer import Tokenizer

    model, is_local = given["model"], given["replicas"] == 1
    options.check_model(model, given["dtype"], given["device"], is_local=is_local)
    if is_local:  # `forerun.load` checks the template
        return
    check_tokenizer, folder = template_check(model, template), local_folder(model)
    if folder and check_tokenizer:
        check_tokenizer(Tokenizer.load(folder))


def _settings(given: dict[str, Any]) -> Settings:
    """Settings from the options, checked without a model. Raises ConfigError."""
    from forerun.serving.methods import Methods, make_verifier, named
    from forerun.serving.settings import Settings

    name, drafter = given["name"], given["drafter"]
    first = [drafter] if drafter else []
    specs, chosen = named([*given["method"], *first]), next(iter(named(first)), None)
    constraints = named(given["constraint"], "constraint")
    try:
        settings = Settings(
            name=_short_name(given["model"]) if name is None else name,
            default_method=chosen,
            methods=specs,
            constraints=constraints,
            request_timeout=given["timeout"],
            operators=tuple(given["operator"]),
            allowed_hosts=(
                *_split(given, "allowed_hosts"),
                *_host_name(given["host"]),
            ),
            allowed_origins=_split(given, "allowed_origins"),
            head_timeout=given["header_timeout"],
            **{field: given[field] for field in SETTINGS},
        )
    except ConfigError as error:  # its text begins with the name of a field
        field, _, rest = str(error).partition(" ")
        option = OPTIONS.get(field, field.replace("_", "-"))
        raise ConfigError(f"--{option} {rest}") from None
    for spec in Methods(specs, chosen).specs.values():
        options.check_parts(drafter=spec, verifier=settings.verifier)
    more = {"target": given["target"], "constraint": [*constraints.values()]}
    options.check_parts(controller=settings.controller, **more)
    make_verifier(settings.verifier, settings.allow_lossy)
    return settings


def _check_packages(replicas: int) -> None:
    """Raises ConfigError if a package is missing."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"`forerun serve` needs the package {error.name}; {install_extra('serve')} to get "
            "everything that the server needs"
        ) from None
    if replicas != 1:
        from forerun.integrations.ray_batch import ray_module

        ray_module("--replicas")


def _check_context(context: int | None) -> None:
    """Raises ConfigError for a context without room for an answer."""
    if context is not None and context < MIN_CONTEXT_TOKENS:
        raise ConfigError(
            f"--context must be at least {MIN_CONTEXT_TOKENS} tokens, got {context}; leave it out "
            "for the model's own"
        )


def _online_drafter(model: str, drafter: str | None, methods: list[str]) -> str | None:
    """The default method of a server that learns: the given one, or the model's own draft.

    Raises ConfigError if no method can learn.
    """
    from forerun.models.draft_link import companion
    from forerun.models.identity import local_folder

    if any("online" in spec for spec in [*methods, drafter or ""]):
        return drafter
    folder = local_folder(model)
    found = companion(folder) if folder and not drafter else None
    if found is None:
        reason = f"{drafter} does not learn" if drafter else f"model {model!r} comes with none"
        raise ConfigError(
            f"--learn needs a draft, and {reason}; name one with --drafter online:model=DRAFT"
        )
    return f"online:model={found}"


def _template(path: Path | None, model: str) -> str | None:
    """The chat template: that of --chat-template, or REASONER_TEMPLATE for embedded models."""
    from forerun.assets import is_embedded

    if path is None:
        return REASONER_TEMPLATE if is_embedded(model) else None
    from forerun.models.chat_template import TemplateError, check_source

    try:
        source = path.read_text("utf-8")
        check_source(source)
        return source
    except TemplateError as error:
        raise DataError(f"--chat-template {path}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise DataError(f"cannot read the chat template {path}: {reason}; check the path") from None


def _keys(path: Path | None) -> Keys:
    """Keys of the file or the environment variable. Raises ConfigError for an empty variable."""
    from forerun.serving.tenants import Keys

    if path is not None:
        keys = Keys.load(path)
        if warning := Keys.exposure(path):
            notice(f"warning: {warning}")
        return keys
    keys = Keys.read(os.environ.get(KEYS_VARIABLE, "").split(","))
    if KEYS_VARIABLE in os.environ and not len(keys):
        raise ConfigError(f"{KEYS_VARIABLE} has no key; unset it to serve without keys")
    return keys


def _split(given: dict[str, Any], name: str) -> tuple[str, ...]:
    """Values of an option that may be repeated or separated by commas. Raises ConfigError."""
    found: list[str] = []
    for one in given[name]:
        parts = [part.strip() for part in one.split(",") if part.strip()]
        if not parts:
            raise ConfigError(f"{name} is empty: got {one!r}; give a value or leave it out")
        found += parts
    return tuple(found)


def _host_name(host: str) -> tuple[str, ...]:
    """The name in --host; empty for an address, which needs no permission."""
    return (host,) if re.fullmatch(r"[\w.-]*[A-Za-z][\w.-]*", host, re.ASCII) else ()


def _check_tenants(settings: Settings, keys: Keys) -> None:
    """Raises ConfigError for an unknown operator; warns of methods that tenants share."""
    for name in settings.operators:
        if name not in keys.names:
            raise ConfigError(
                f"--operator must be a tenant of the API keys, got {name!r}; give the key a tenant "
                "with a line TENANT:KEY"
            )
    shared = [spec for spec in settings.methods.values() if "scope=global" in spec]
    if len(keys.names) > 1 and shared:
        notice(
            f"warning: {', '.join(shared)} learns from all tenants together, who can observe each "
            "other's texts; use scope=tenant"
        )
    if len(keys.names) > 1 and settings.learn:
        notice(
            "warning: --learn trains one draft on the texts of all tenants; the speed of an answer "
            "may show what others wrote"
        )


def _short_name(model: str) -> str:
    """The last part of a path, or a hub id unchanged."""
    return Path(model).resolve().name if Path(model).exists() else model
