"""Options that several subcommands share, and their checks before a model is loaded."""

from __future__ import annotations

import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun import registry
from forerun.cli._stdio import NO_UTF8
from forerun.errors import ConfigError, DataError
from forerun.utils.files import check_text

if TYPE_CHECKING:
    from forerun.core.sampling import Sampling

# panels of --help
PROMPTS, SAMPLING, METHODS = "Prompts", "Sampling", "Methods"
MODEL, OUTPUT, LEARNING = "Model", "Output", "Learning"

ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="Folder, hub id, .gguf file or name (`forerun models`).",
        rich_help_panel=MODEL,
    ),
]
DrafterSpec = Annotated[
    str,
    typer.Option(
        "--drafter",
        "-d",
        help="Method with options, as stand:context=4,entries=10.",
        rich_help_panel=METHODS,
    ),
]
VerifierSpec = Annotated[
    str, typer.Option("--verifier", help="Verification rule.", rich_help_panel=METHODS)
]
ControllerSpec = Annotated[
    str,
    typer.Option(
        "--controller",
        help="Decides how much to draft, as fixed:nodes=32.",
        rich_help_panel=METHODS,
    ),
]
TargetSpec = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="Target built around the model, as entropy_switch:small=draft,threshold=1.",
        rich_help_panel=METHODS,
    ),
]
ConstraintSpecs = Annotated[
    list[str],
    typer.Option(
        "--constraint",
        help="Changes the model's distribution, as corpus:index=FILE; may come again.",
        rich_help_panel=METHODS,
    ),
]
Batch = Annotated[
    int, typer.Option("--batch", "-b", help="Sequences that run at once.", rich_help_panel=MODEL)
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="Same seed and settings, same samples.", rich_help_panel=SAMPLING),
]


def _dtype(name: str) -> str:
    from forerun.models import paths as folder

    return folder.dtype_name(name)


Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="auto (the checkpoint's), bf16, fp16, fp32.",
        callback=_dtype,
        rich_help_panel=MODEL,
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        "--weights",
        help="auto (as stored), int8, int8:128 (finer scales); on a GPU also fp8, int4.",
        rich_help_panel=MODEL,
    ),
]
Device = Annotated[
    str, typer.Option("--device", help="auto, cpu, cuda, cuda:1.", rich_help_panel=MODEL)
]
Json = Annotated[
    bool,
    typer.Option("--json", help="For machines: JSON on standard output.", rich_help_panel=OUTPUT),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="Results as JSON lines, written as they come.",
        rich_help_panel=OUTPUT,
    ),
]
MemoryFile = Annotated[
    Path | None,
    typer.Option(
        "--memory",
        help="What the drafter learns: loaded where it exists, then saved.",
        rich_help_panel=LEARNING,
    ),
]
Tenant = Annotated[
    str,
    typer.Option(
        "--tenant", help="Owner of the text: memories stay apart.", rich_help_panel=LEARNING
    ),
]
Prompt = Annotated[
    list[str],
    typer.Option("--prompt", "-p", help="Prompt; may come again.", rich_help_panel=PROMPTS),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--prompt-file",
        "-f",
        help="A text file is one prompt; .jsonl: an object with a prompt per line.",
        rich_help_panel=PROMPTS,
    ),
]
Number = Annotated[
    int, typer.Option("-n", min=1, help="Samples per prompt.", rich_help_panel=SAMPLING)
]
Temperature = Annotated[
    float, typer.Option("--temperature", "-t", help="0 is greedy.", rich_help_panel=SAMPLING)
]
TopP = Annotated[
    float,
    typer.Option("--top-p", help="Keep the likeliest of mass p; 1: off.", rich_help_panel=SAMPLING),
]
RunFolder = Annotated[Path, typer.Argument(help="A run folder.")]
MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max-new-tokens",
        help="Longest text; the context may end it sooner.",
        rich_help_panel=SAMPLING,
    ),
]
Stop = Annotated[
    list[str],
    typer.Option("--stop", help="Text that ends a sample.", rich_help_panel=SAMPLING),
]

# of corpora and queries
AsIds = Annotated[bool, typer.Option("--ids", help="The text is token ids, as '5 17 3'.")]
Queries = Annotated[list[str], typer.Argument(help="Texts, or token ids with --ids.")]
Sources = Annotated[
    list[Path],
    typer.Argument(help="Text, .jsonl (.gz, .zst), .parquet, folders, datasets on disk."),
]
Split = Annotated[
    str, typer.Option("--split", help="Document of a text file: file, paragraph, line.")
]
OnError = Annotated[str, typer.Option("--on-error", help="Unreadable records: fail, or skip them.")]

UNBEGUN = "interrupted before anything was begun"
SHOWN = 200  # characters of an option's value, where people see it
PARTS = {"DrafterName": "drafter", "GrowerName": "grower"}  # what options name, and its kind
PATIENCE = 1.0  # seconds without a word on a terminal


def is_here(given: dict[str, Any]) -> bool:
    """Whether the model runs in this process, and not where paths and devices are others."""
    return given.get("engine", "local") == "local"


def check_parts(
    *, here: bool = True, samplings: tuple[Sampling, ...] = (), **specs: str | Many[str] | None
) -> None:
    """Refuses unknown methods and options, kind by kind, before anything slow happens.

    Then a verifier that cannot judge the drafter's drafts, or serve what will be sampled. Unless
    the parts are made `here`, nothing is looked for that an option names by its path.
    """
    made = {
        kind: check_part(kind, spec, here)
        for kind, given in specs.items()
        for spec in ([given] if isinstance(given, str) else given or ())
    }
    verifier, drafter = made.get("verifier"), made.get("drafter")
    if verifier is not None:
        for sampling in samplings:
            verifier.check(sampling)
    if verifier is not None and drafter is not None:
        from forerun.engine.engine import check_pair

        check_pair(drafter, verifier)


def check_part(kind: str, spec: str, here: bool = True) -> Any:
    """The part, made on trial; None for a target, and where it names what takes long to read."""
    registry.check_options(kind, spec, here=here)
    cls, given = registry.resolve(kind, spec)
    name, known = registry.parse(spec)[0], registry.options(cls)
    named = {o: what for o, what in registry.named(cls).items() if o in given}
    quick = set(PARTS) | ({"File"} if here else set())
    for option, what in named.items():
        value = given[option]
        if what in PARTS and value != known[option].default:
            for inner in value if isinstance(value, tuple) else [value]:
                if check_part(PARTS[what], inner, here) is None:
                    quick.discard(what)
    for option, what in named.items():
        value = given[option]
        if what == "Corpus" and here:
            check_files(f"{option} of {kind} {name!r}", value)
        elif what == "ModelName" and value not in (None, known[option].default):
            check_model(value, given.get("dtype", "auto"), given.get("device", "auto"), here=here)
    is_quick = kind != "target" and quick.issuperset(named.values())
    return cls(**given) if is_quick else None


def check_files(what: str, files: str | Many[str] | None, *, folders: bool = True) -> None:
    """Raises DataError for one that is not there, or is a folder where `folders` are no use."""
    for file in (files,) if isinstance(files, str) else files or ():
        path = Path(file).expanduser()
        if not file or not path.exists():
            kind = "file or folder" if folders else "file"
            raise DataError(f"{what}: there is no {kind} {file or repr(file)}; check the path")
        if path.is_dir() and not folders:
            raise DataError(f"{what}: {file} is a folder; give the files in it")


def check_out_folder(out: Path) -> None:
    """Raises DataError for what cannot be the folder of --out."""
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file; --out names a folder, give another")


def check_folder_name(folder: Path) -> None:
    """Raises DataError where no tokenizer could be saved: that takes names in UTF-8."""
    check_text(f"expected a folder with a name in UTF-8, but {str(folder)!r}", str(folder))


def check_model(
    name: str,
    dtype: str = "auto",
    device: str = "auto",
    batch: int = 1,
    weights: str = "auto",
    *,
    here: bool = True,
) -> None:
    """Refuses what needs no loading to be refused. Raises ConfigError, ModelError.

    Of a model on the hub its configuration is fetched, and nothing of one that is not loaded here.
    """
    from forerun.models import paths as folder
    from forerun.runner.native.int8 import Rounding

    if not 1 <= batch <= registry.LARGEST:
        raise ConfigError(
            f"--batch must be in 1..{registry.LARGEST}, got {batch}; 1 runs one at a time"
        )
    folder.dtype_name(dtype)
    folder.check_device(device)
    Rounding.parse(weights)
    if here:
        folder.check_folder(folder.model_folder(folder.located(name), folder.CONFIG))


def load(
    name: str,
    *,
    dtype: str,
    device: str,
    batch: int,
    weights: str = "auto",
    target: str | None = None,
) -> Any:
    """The model, with room for `batch` sequences or more. Raises ConfigError, ModelError.

    Cells are allocated as they come; what steps cost is measured with several sequences.
    """
    check_model(name, dtype, device, batch, weights)
    import forerun
    from forerun.cli._signals import exit_at_once

    # imports may drop a Ctrl-C or die of it
    with said_if_slow(f"loading {name} ..."), exit_at_once(UNBEGUN):
        room = max(batch, registry.BATCH)
        how: dict[str, Any] = {"dtype": dtype, "device": device, "weights": weights}
        loaded = forerun.load(name, max_seqs=room, target=target, **how)
    from forerun.cli.output import notice
    from forerun.utils import jit_cache

    jit_cache.watch(notice)
    return loaded


@contextmanager
def said_if_slow(text: str) -> Iterator[None]:
    """Says a text on a terminal if the block takes longer than people wait without a word."""
    from forerun.cli.output import notice

    timer = threading.Timer(PATIENCE, notice, [text])
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def warm_up(model: Any = None, **specs: str) -> None:
    """Compiles the kernels of the parts in use before the clock runs."""
    works = [registry.make("verifier", specs.get("verifier", "speculative")).warm_up]
    if model is not None:
        drafter = model.drafter(specs.get("drafter", registry.DRAFTER))
        works += [model.target.warm_up, partial(drafter.bind, model.target)]
    warm(*works)


def warm(*works: Callable[[], object]) -> None:
    """Compiles the kernels of these parts, or loads them; says so where that is slow."""
    import time

    from forerun.cli._signals import exit_at_once
    from forerun.cli.output import notice
    from forerun.utils import jit_cache

    watch, start = jit_cache.watch(notice), time.perf_counter()
    before = watch.num_compiled
    with exit_at_once(UNBEGUN):
        for work in works:
            work()
    if watch.num_compiled > before:
        notice(f"compiled in {time.perf_counter() - start:.0f} s")


def announce(ctx: typer.Context, **changed: Any) -> None:
    """The call as a remark, its long values shortened."""
    from forerun.cli.output import notice

    notice(f"# {call_line(ctx, SHOWN, **changed)}")


def call_line(ctx: typer.Context, most: int = sys.maxsize, /, **changed: Any) -> str:
    """The call that does the same again: every option that is not at its default.

    Of a longer value than `most` characters the beginning is told, and how many more there are.
    """
    words = [ctx.command_path]
    for param in ctx.command.params:
        value = changed.get(str(param.name), ctx.params.get(str(param.name)))
        if value is None or value == param.default or value in ((), []) or param.name == "help":
            continue
        flag = max(param.opts, key=len)
        if value is True:
            words.append(flag)
        else:
            many = value if isinstance(value, list | tuple) else [value]
            join = "=" if flag.startswith("--") else " "
            words += [f"{flag}{join}{_quoted(str(v), most)}" for v in many if v is not False]
    return " ".join(words)


def _quoted(text: str, most: int = sys.maxsize) -> str:
    """Shell quoting that stays on one line, and in UTF-8."""
    if len(text) > most:
        text = f"{text[:most]}... ({len(text) - most} more characters)"
    if "\n" not in text and not NO_UTF8.search(text):
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    escaped = NO_UTF8.sub(lambda byte: f"\\x{ord(byte[0]) - 0xDC00:02x}", escaped)
    return f"$'{escaped}'"
