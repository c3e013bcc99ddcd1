"""`forerun serve`: serve a model over an OpenAI-compatible HTTP API."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun import registry
from forerun.cli import options
from forerun.cli._graphs import wants_graphs
from forerun.cli._signals import exit_at_once
from forerun.cli.output import notice
from forerun.errors import ConfigError, DataError, install_extra
from forerun.utils.text import counted

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.serving.replicas import ReplicaSetup
    from forerun.serving.server import DrainingServer
    from forerun.serving.settings import Settings
    from forerun.serving.tenants import Keys

KEYS_VARIABLE = "FORERUN_API_KEYS"  # keys, separated by commas
EARLY_INTERRUPT = "interrupted before anything was served"
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

ModelName = Annotated[str, typer.Argument(help="Folder, hub id, .gguf file or name.")]
Host = Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0: all.")]
Port = Annotated[int, typer.Option("--port", help="Port; 0: a free one.")]
Name = Annotated[str | None, typer.Option("--name", help="Model name for clients.")]
Default = Annotated[
    str | None, typer.Option("--drafter", "-d", help="Default draft method of requests.")
]
Method = Annotated[
    list[str],
    typer.Option("--method", help="Further draft method for requests, NAME or NAME=SPEC."),
]
Constraint = Annotated[
    list[str],
    typer.Option(
        "--constraint",
        help="Constraint for requests, NAME or NAME=SPEC, e.g. book=corpus:index=FILE.",
        rich_help_panel=options.METHODS,
    ),
]
Learn = Annotated[
    float,
    typer.Option(
        "--learn",
        help="Share of time for training the draft while requests run, 0 to 1; 0: off.",
        rich_help_panel=options.METHODS,
    ),
]
LearnInterval = Annotated[
    int,
    typer.Option(
        "--learn-interval",
        help="Finished requests per update of the draft.",
        rich_help_panel=options.METHODS,
    ),
]
LearnRate = Annotated[
    float,
    typer.Option(
        "--learn-rate", help="Learning rate of the draft.", rich_help_panel=options.METHODS
    ),
]
Engines = Annotated[
    int,
    typer.Option("--replicas", min=1, help="Number of engines; more than 1 needs a Ray cluster."),
]
Lossy = Annotated[
    bool, typer.Option("--allow-lossy", help="Accept a verifier that changes the distribution.")
]
SharePrefixes = Annotated[
    bool,
    typer.Option("--share-prefixes", help="Let all tenants reuse the KV cells of each other."),
]
Operator = Annotated[
    list[str],
    typer.Option("--operator", help="Tenant that may read /metrics, which count all tenants."),
]
MaxSeqs = Annotated[int, typer.Option("--max-seqs", help="Largest batch size in sequences.")]
MaxWaiting = Annotated[
    int, typer.Option("--max-waiting", help="Waiting requests per tenant; more get 429.")
]
MaxSamples = Annotated[
    int, typer.Option("--max-samples", help="Sequences per request: prompts times n.")
]
MaxNodes = Annotated[int, typer.Option("--max-nodes", help="Largest draft tree of a request.")]
MaxBody = Annotated[int, typer.Option("--max-body", help="Size limit of a request in bytes.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Time limit of a request in seconds.")]
Drain = Annotated[float, typer.Option("--drain", help="Seconds to finish after a signal.")]
Context = Annotated[
    int | None, typer.Option("--context", help="Context length; default: the model's.")
]
AllowedHosts = Annotated[
    list[str],
    typer.Option("--allowed-hosts", help="Name of this server, for a server without keys."),
]
AllowedOrigins = Annotated[
    list[str],
    typer.Option("--allowed-origins", help="Site with pages that may use this server."),
]
HeaderTimeout = Annotated[
    float, typer.Option("--header-timeout", help="Seconds for the headers of a request.")
]
TextTimeout = Annotated[
    float, typer.Option("--text-timeout", help="Seconds to render and tokenise a request's texts.")
]
GrammarTimeout = Annotated[
    float, typer.Option("--grammar-timeout", help="Seconds to compile a request's constraint.")
]
KeyFile = Annotated[
    Path | None,
    typer.Option("--api-keys", help=f"File of lines KEY or TENANT:KEY; or set {KEYS_VARIABLE}."),
]
Template = Annotated[
    Path | None, typer.Option("--chat-template", help="Jinja file that replaces the model's.")
]


def command(
    ctx: typer.Context,
    model: ModelName = "reasoner",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    name: Name = None,
    drafter: Default = None,
    method: Method = [],  # noqa: B006
    verifier: options.VerifierSpec = registry.DEFAULT_VERIFIER,
    controller: options.ControllerSpec = registry.DEFAULT_CONTROLLER,
    target: options.TargetSpec = None,
    constraint: Constraint = [],  # noqa: B006
    allow_lossy: Lossy = False,
    share_prefixes: SharePrefixes = False,
    learn: Learn = 0.0,
    learn_interval: LearnInterval = 8,
    learn_rate: LearnRate = 1e-4,
    operator: Operator = [],  # noqa: B006
    replicas: Engines = 1,
    max_seqs: MaxSeqs = 32,
    max_waiting: MaxWaiting = 256,
    max_samples: MaxSamples = 256,
    max_nodes: MaxNodes = 64,
    max_body: MaxBody = 4 * 2**20,
    timeout: Timeout = 600.0,
    drain: Drain = 30.0,
    context: Context = None,
    api_keys: KeyFile = None,
    allowed_hosts: AllowedHosts = [],  # noqa: B006
    allowed_origins: AllowedOrigins = [],  # noqa: B006
    header_timeout: HeaderTimeout = 10.0,
    text_timeout: TextTimeout = 10.0,
    grammar_timeout: GrammarTimeout = 5.0,
    chat_template: Template = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> int:
    """Serve a model over HTTP with an OpenAI-compatible API."""
    with exit_at_once(EARLY_INTERRUPT):  # imports may drop KeyboardInterrupt
        if learn:
            _check_learn(replicas)
        _check(replicas, context, device)
        if learn:
            ctx.params["drafter"] = drafter or _online_draft(model, method)
        settings = _settings(ctx.params)
        keys, template = _keys(api_keys), _template(chat_template, model)
        _check_tenants(settings, keys)
        from forerun.serving.server import bind_sockets

        sockets = bind_sockets(host, port)  # before anything is loaded
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    if replicas != 1:
        from forerun.serving.replicas import ReplicaSetup

        setup = ReplicaSetup(
            model,
            settings,
            keys,
            dtype,
            device,
            context,
            template,
            target,
            graphs=wants_graphs(),
        )
        return _serve_many(setup, replicas, sockets)
    notice(f"loading {model}")
    with exit_at_once(EARLY_INTERRUPT):
        loaded = _load(model, dtype, device, max_seqs, context, template, target)
        server = _server(loaded, settings, keys, sockets)
    return _run(server)


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


def _server(model: Model, settings: Settings, keys: Keys, sockets: list[socket]) -> DrainingServer:
    """The server of one engine, with its kernels loaded."""
    from forerun.serving.server import Server
    from forerun.serving.service import Service, freeze_garbage

    with options.compiling(EARLY_INTERRUPT):
        service = Service(model, settings, keys)
        service.warm_up()
    freeze_garbage()
    started = _start_notice(settings, keys, service.describe())
    return Server(service, sockets, started, _drain_notice(settings))


def _serve_many(setup: ReplicaSetup, count: int, sockets: list[socket]) -> int:
    """Serves several engines on a Ray cluster."""
    from forerun.models.generation_config import warn_of_defaults
    from forerun.models.identity import local_folder
    from forerun.serving.proxy import Proxy
    from forerun.serving.replicas import Replicas
    from forerun.serving.server import DrainingServer

    notice(f"starting the first of {count} engines; compiling kernels may take minutes")
    backend = Replicas(setup, count, notice)
    settings, offer = setup.settings, backend.open()
    front = Proxy(backend, settings, is_open=not len(setup.keys))
    started = _start_notice(settings, setup.keys, offer, f", {count} engines")
    try:
        if folder := local_folder(setup.model):  # logs of the engines are not shown
            warn_of_defaults(folder)
        notices = started, _drain_notice(settings)
        where = settings.drain, sockets, *notices, settings.head_timeout
        return _run(DrainingServer(front, front, *where))
    finally:
        backend.close()


def _start_notice(
    settings: Settings, keys: Keys, offer: dict[str, Any], more: str = ""
) -> Callable[[str], None]:
    """A function that prints the URL, API keys and methods of the server."""
    methods = ", ".join(f"{m} (default)" * (m == offer["default"]) or m for m in offer["methods"])
    guarded = counted(len(keys), "API key") if len(keys) else "no API key"
    return lambda url: notice(
        f"serving {settings.name!r} at {url}/v1 ({guarded}{more}); methods: {methods}"
    )


def _drain_notice(settings: Settings) -> Callable[[int], None]:
    """A function that prints the number of open requests after a signal."""
    return lambda count: notice(
        f"finishing {counted(count, 'request')}, at most {settings.drain:g} s; Ctrl-C again ends "
        "at once"
    )


def _run(server: DrainingServer) -> int:
    """Runs until a signal comes and open requests end; returns the exit status."""
    from forerun.serving.server import MAX_STOP_SECONDS, exit_later

    server.owns_process = True
    server.run()
    exit_later(130 if server.force_exit else 0, MAX_STOP_SECONDS)  # if a thread does not end
    if server.num_cut:
        are = "request was" if server.num_cut == 1 else "requests were"
        notice(f"{server.num_cut} {are} not finished and got 503; goodbye")
        return 130 if server.force_exit else 0
    notice("all requests are answered; goodbye")
    return 0


def _check(replicas: int, context: int | None, device: str) -> None:
    """Checks options and packages before anything is loaded. Raises ConfigError."""
    from forerun.models import paths as folder

    folder.check_device(device)
    if context is not None and context < MIN_CONTEXT_TOKENS:
        raise ConfigError(
            f"--context must be at least {MIN_CONTEXT_TOKENS} tokens, got {context}; leave it out "
            "for the model's own"
        )
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


def _check_learn(replicas: int) -> None:
    """Raises ConfigError unless one engine learns."""
    if replicas != 1:
        raise ConfigError("--learn works with one engine; leave out --replicas")


def _online_draft(model: str, methods: list[str]) -> str | None:
    """The default method that learns: the draft that comes with the model.

    None if another method is given that may learn. Raises ConfigError without a draft.
    """
    from forerun.models.draft_link import companion
    from forerun.models.identity import local_folder

    if any("online" in spec for spec in methods):
        return None
    folder = local_folder(model)
    found = companion(folder) if folder else None
    if found is None:
        raise ConfigError(
            f"--learn needs a draft, and model {model!r} comes with none; name one with --drafter "
            "online:model=DRAFT"
        )
    return f"online:model={found}"


def _load(
    name: str,
    dtype: str,
    device: str,
    max_seqs: int,
    context: int | None,
    template: str | None,
    target: str | None,
) -> Any:
    import forerun

    how: dict[str, Any] = {"dtype": dtype, "device": device, "target": target}
    how["graphs"] = wants_graphs()
    model = forerun.load(name, max_seqs=max_seqs, context=context, **how)
    if template is not None:
        model.tokenizer.inner.chat_template = template
    return model


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
