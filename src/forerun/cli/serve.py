"""`forerun serve`: a model behind an OpenAI-compatible HTTP interface."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun import registry
from forerun.cli import options
from forerun.cli._signals import exit_at_once
from forerun.cli.output import notice
from forerun.errors import ConfigError, DataError
from forerun.utils.text import counted

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.serving.replicas import ReplicaSetup
    from forerun.serving.server import DrainingServer
    from forerun.serving.settings import Settings
    from forerun.serving.tenants import Keys

KEYS = "FORERUN_API_KEYS"  # keys divided by commas; a command line would show them to everybody
UNSERVED = "interrupted before anything was served"
LEAST_CONTEXT = 2  # tokens: one to begin with, and one that is said
SETTINGS = (  # fields of `Settings` that have an option of their name,
    "verifier",
    "controller",
    "allow_lossy",
    "max_seqs",
    "max_waiting",
    "max_samples",
    "max_nodes",
    "max_body",
    "drain",
)
OPTIONS = {
    "request_timeout": "timeout",
    "methods": "method",
    "constraints": "constraint",
}  # and those of another one
REASONER = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ m.content }}\n\n"
    "{% elif m.role == 'user' %}Problem: {{ m.content | trim }}\nSolution:\n{% endif %}"
    "{% endfor %}"
)

ModelName = Annotated[str, typer.Argument(help="Folder, hub id, .gguf file or name.")]
Host = Annotated[str, typer.Option("--host", help="Address to listen at; 0.0.0.0 is all.")]
Port = Annotated[int, typer.Option("--port", help="0 takes a free one.")]
Name = Annotated[str | None, typer.Option("--name", help="What clients call the model.")]
Default = Annotated[
    str | None, typer.Option("--drafter", "-d", help="Method of requests that name none.")
]
Method = Annotated[
    list[str],
    typer.Option("--method", help="One more that requests may name, NAME or NAME=SPEC."),
]
Constraint = Annotated[
    list[str],
    typer.Option(
        "--constraint",
        help="One that requests may name, NAME or NAME=SPEC, as book=corpus:index=FILE.",
        rich_help_panel=options.METHODS,
    ),
]
Engines = Annotated[
    int,
    typer.Option("--replicas", min=1, help="Engines behind the port, on a Ray cluster if not 1."),
]
Lossy = Annotated[
    bool, typer.Option("--allow-lossy", help="Accept a verifier that changes the law.")
]
MaxSeqs = Annotated[int, typer.Option("--max-seqs", help="Sequences that run at once.")]
MaxWaiting = Annotated[
    int, typer.Option("--max-waiting", help="Requests of one tenant that may wait; then 429.")
]
MaxSamples = Annotated[
    int, typer.Option("--max-samples", help="Sequences of one request: prompts times n.")
]
MaxNodes = Annotated[int, typer.Option("--max-nodes", help="Largest max_nodes of a request.")]
MaxBody = Annotated[int, typer.Option("--max-body", help="Bytes of a request.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds a request may take.")]
Drain = Annotated[float, typer.Option("--drain", help="Seconds to finish after a signal.")]
Context = Annotated[int | None, typer.Option("--context", help="Shorter than the model's own.")]
KeyFile = Annotated[
    Path | None,
    typer.Option("--api-keys", help=f"File of lines TENANT:KEY or KEY; or set {KEYS}."),
]
Template = Annotated[
    Path | None, typer.Option("--chat-template", help="Jinja file in place of the model's own.")
]


def command(
    ctx: typer.Context,
    model: ModelName = "reasoner",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    name: Name = None,
    drafter: Default = None,
    method: Method = [],  # noqa: B006
    verifier: options.VerifierSpec = registry.VERIFIER,
    controller: options.ControllerSpec = registry.CONTROLLER,
    target: options.TargetSpec = None,
    constraint: Constraint = [],  # noqa: B006
    allow_lossy: Lossy = False,
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
    chat_template: Template = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> int:
    """Serve a model over HTTP, in OpenAI's form."""
    with exit_at_once(UNSERVED):  # imports and kernels that are loaded may drop a Ctrl-C
        _check(replicas, context, device)
        settings = _settings(ctx.params)
        keys, template = _keys(api_keys), _template(chat_template, model)
        from forerun.serving.server import bind_sockets

        sockets = bind_sockets(host, port)  # before anything is loaded
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    if replicas != 1:
        from forerun.serving.replicas import ReplicaSetup

        setup = ReplicaSetup(model, settings, keys, dtype, device, context, template, target)
        return _serve_many(setup, replicas, sockets)
    notice(f"loading {model}")
    with exit_at_once(UNSERVED):
        loaded = _load(model, dtype, device, max_seqs, context, template, target)
        server = _server(loaded, settings, keys, sockets)
    return _run(server)


def _settings(given: dict[str, Any]) -> Settings:
    """What the options say, checked as far as it can be without a model. Raises ConfigError."""
    from forerun.serving.methods import Methods, make_verifier, named
    from forerun.serving.settings import Settings

    name, drafter = given["name"], given["drafter"]
    first = [drafter] if drafter else []
    specs, chosen = named([*given["method"], *first]), next(iter(named(first)), None)
    constraints = named(given["constraint"], "constraint")
    try:
        settings = Settings(
            name=_short(given["model"]) if name is None else name,
            default_method=chosen,
            methods=specs,
            constraints=constraints,
            request_timeout=given["timeout"],
            **{field: given[field] for field in SETTINGS},
        )
    except ConfigError as error:  # it begins with the name of a field
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
    """The server of one engine, warm."""
    from forerun.serving.server import Server
    from forerun.serving.service import Service, freeze_garbage

    service = Service(model, settings, keys)
    options.warm(service.warm_up)
    freeze_garbage()
    started = _started(settings, keys, service.describe())
    return Server(service, sockets, started, _draining(settings))


def _serve_many(setup: ReplicaSetup, count: int, sockets: list[socket]) -> int:
    """The same with several engines."""
    from forerun.models.generation_config import warn_of_defaults
    from forerun.models.identity import local_folder
    from forerun.serving.proxy import Proxy
    from forerun.serving.replicas import Replicas
    from forerun.serving.server import DrainingServer

    notice(f"starting the first of {count} engines; where kernels must be compiled, in minutes")
    backend = Replicas(setup, count, notice)
    settings, offer = setup.settings, backend.open()
    front = Proxy(backend, settings)
    started = _started(settings, setup.keys, offer, f", {count} engines")
    try:
        if folder := local_folder(setup.model):  # nobody hears what the engines log
            warn_of_defaults(folder)
        heard = started, _draining(settings)
        return _run(DrainingServer(front, front, settings.drain, sockets, *heard))
    finally:
        backend.close()


def _started(
    settings: Settings, keys: Keys, offer: dict[str, Any], more: str = ""
) -> Callable[[str], None]:
    """Says where the server is and what it has."""
    methods = ", ".join(f"{m} (default)" * (m == offer["default"]) or m for m in offer["methods"])
    guarded = counted(len(keys), "API key") if len(keys) else "no API key"
    return lambda url: notice(
        f"serving {settings.name!r} at {url}/v1 ({guarded}{more}); methods: {methods}"
    )


def _draining(settings: Settings) -> Callable[[int], None]:
    """Says what is waited for after a signal."""
    return lambda count: notice(
        f"finishing {counted(count, 'request')}, at most {settings.drain:g} s; Ctrl-C again ends "
        "at once"
    )


def _run(server: DrainingServer) -> int:
    """Runs until a signal comes and the last request has been answered; the exit status."""
    server.run()
    if server.num_cut:
        are = "request was" if server.num_cut == 1 else "requests were"
        notice(f"{server.num_cut} {are} not finished and got 503; goodbye")
        return 130 if server.force_exit else 0
    notice("all requests are answered; goodbye")
    return 0


def _check(replicas: int, context: int | None, device: str) -> None:
    """What can be refused before anything is imported or loaded. Raises ConfigError."""
    from forerun.models import paths as folder

    folder.check_device(device)
    if context is not None and context < LEAST_CONTEXT:
        raise ConfigError(
            f"--context must be at least {LEAST_CONTEXT} tokens, got {context}; leave it out for "
            "the model's own"
        )
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"`forerun serve` needs the package {error.name}; install them all with "
            "pip install 'forerun[serve]'"
        ) from None
    if replicas != 1:
        from forerun.integrations.ray_batch import ray_module

        ray_module("--replicas")


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
    model = forerun.load(name, max_seqs=max_seqs, context=context, **how)
    if template is not None:
        model.tokenizer.inner.chat_template = template
    return model


def _template(path: Path | None, model: str) -> str | None:
    """The chat template to use; the embedded models, which have none, get their own form."""
    from forerun.assets import is_embedded

    if path is None:
        return REASONER if is_embedded(model) else None
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise DataError(f"cannot read the chat template {path}: {reason}; check the path") from None


def _keys(path: Path | None) -> Keys:
    """Keys of the file, or of the environment, where a variable without any locks nobody out."""
    from forerun.serving.tenants import Keys

    if path is not None:
        return Keys.load(path)
    keys = Keys.read(os.environ.get(KEYS, "").split(","))
    if KEYS in os.environ and not len(keys):
        raise ConfigError(f"{KEYS} is set but holds no key; unset it to serve everybody")
    return keys


def _short(model: str) -> str:
    """The last piece of a path, or a hub id as it is."""
    return Path(model).resolve().name if Path(model).exists() else model
