"""The options of `forerun serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.cli import options

KEYS_VARIABLE = "FORERUN_API_KEYS"  # keys, separated by commas

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
