"""`forerun serve`: serve a model over an OpenAI-compatible HTTP API."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import typer

from forerun import registry
from forerun.cli import loading, options, serve_checks, serve_options
from forerun.cli._graphs import wants_graphs
from forerun.cli._signals import exit_at_once
from forerun.cli.output import notice
from forerun.utils.text import counted

if TYPE_CHECKING:
    from socket import socket

    from forerun.api import Model
    from forerun.cli.serve_checks import Checked
    from forerun.serving.replicas import ReplicaSetup
    from forerun.serving.server import DrainingServer
    from forerun.serving.settings import Settings
    from forerun.serving.tenants import Keys

EARLY_INTERRUPT = "interrupted before anything was served"


def command(
    ctx: typer.Context,
    model: serve_options.ModelName = "reasoner",
    host: serve_options.Host = "127.0.0.1",
    port: serve_options.Port = 8000,
    name: serve_options.Name = None,
    drafter: serve_options.Default = None,
    method: serve_options.Method = [],  # noqa: B006
    verifier: options.VerifierSpec = registry.DEFAULT_VERIFIER,
    controller: options.ControllerSpec = registry.DEFAULT_CONTROLLER,
    target: options.TargetSpec = None,
    constraint: serve_options.Constraint = [],  # noqa: B006
    allow_lossy: serve_options.Lossy = False,
    share_prefixes: serve_options.SharePrefixes = False,
    learn: serve_options.Learn = 0.0,
    learn_interval: serve_options.LearnInterval = 8,
    learn_rate: serve_options.LearnRate = 1e-4,
    operator: serve_options.Operator = [],  # noqa: B006
    replicas: serve_options.Engines = 1,
    max_seqs: serve_options.MaxSeqs = 32,
    max_waiting: serve_options.MaxWaiting = 256,
    max_samples: serve_options.MaxSamples = 256,
    max_nodes: serve_options.MaxNodes = 64,
    max_body: serve_options.MaxBody = 4 * 2**20,
    timeout: serve_options.Timeout = 600.0,
    drain: serve_options.Drain = 30.0,
    context: serve_options.Context = None,
    api_keys: serve_options.KeyFile = None,
    allowed_hosts: serve_options.AllowedHosts = [],  # noqa: B006
    allowed_origins: serve_options.AllowedOrigins = [],  # noqa: B006
    header_timeout: serve_options.HeaderTimeout = 10.0,
    text_timeout: serve_options.TextTimeout = 10.0,
    grammar_timeout: serve_options.GrammarTimeout = 5.0,
    chat_template: serve_options.Template = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> int:
    """Serve a model over HTTP with an OpenAI-compatible API."""
    with exit_at_once(EARLY_INTERRUPT):  # imports may drop KeyboardInterrupt
        checked = serve_checks.check(ctx.params)
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    how: dict[str, Any] = {"dtype": dtype, "device": device, "context": context, "target": target}
    how["graphs"] = wants_graphs()
    with ExitStack() as stack:
        for one in checked.sockets:
            stack.enter_context(one)
        if replicas != 1:
            return _serve_many(_replica_setup(model, checked, **how), replicas, checked.sockets)
        notice(f"loading {model}")
        with exit_at_once(EARLY_INTERRUPT):
            server = _server(_load(model, checked, **how), checked)
        return _run(server)


def _load(name: str, checked: Checked, **how: Any) -> Model:
    """The model, with a chat template that renders."""
    import forerun

    check, max_seqs = serve_checks.template_check(name, checked.template), checked.settings.max_seqs
    model = forerun.load(name, max_seqs=max_seqs, check=check, **how)
    if checked.template is not None:
        model.tokenizer.inner.chat_template = checked.template
    return model


def _server(model: Model, checked: Checked) -> DrainingServer:
    """The server of one engine, with its kernels loaded."""
    from forerun.serving.server import Server
    from forerun.serving.service import Service, freeze_garbage

    settings, keys = checked.settings, checked.keys
    with loading.compiling(EARLY_INTERRUPT):
        service = Service(model, settings, keys)
        service.warm_up()
    freeze_garbage()
    started = _start_notice(settings, keys, service.describe())
    return Server(service, checked.sockets, started, _drain_notice(settings))


def _replica_setup(name: str, checked: Checked, **how: Any) -> ReplicaSetup:
    """What every engine of a cluster is made from."""
    from forerun.serving.replicas import ReplicaSetup

    settings, keys, template = checked.settings, checked.keys, checked.template
    return ReplicaSetup(name, settings, keys, chat_template=template, **how)


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
    if settings.learn:
        methods += (
            f"; the draft learns for at most {settings.learn:.0%} of the time, and its weights are "
            "lost at the end; GET and POST /learning"
        )
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
