"""Options shared by several subcommands, and their checks before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun import registry
from forerun.errors import ConfigError, DataError
from forerun.utils.files import check_text

if TYPE_CHECKING:
    from forerun.core.sampling import Sampling
    from forerun.models.tokenizer import Tokenizer

# panels of --help
PROMPTS, SAMPLING, METHODS = "Prompts", "Sampling", "Methods"
MODEL, OUTPUT, LEARNING = "Model", "Output", "Learning"

ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="Model: folder, hub id, .gguf file or name (see `forerun models`).",
        rich_help_panel=MODEL,
    ),
]
DrafterSpec = Annotated[
    str,
    typer.Option(
        "--drafter",
        "-d",
        help="Draft method with options, e.g. stand:context=4,entries=10.",
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
        help="Controller of the draft size, e.g. fixed:nodes=32.",
        rich_help_panel=METHODS,
    ),
]
TargetSpec = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="Target built around the model, e.g. entropy_switch:small=draft,threshold=1.",
        rich_help_panel=METHODS,
    ),
]
ConstraintSpecs = Annotated[
    list[str],
    typer.Option(
        "--constraint",
        help="Constraint on the model's distribution, e.g. corpus:index=FILE; repeatable.",
        rich_help_panel="Constraints",
    ),
]
Batch = Annotated[
    int, typer.Option("--batch", "-b", help="Batch size in sequences.", rich_help_panel=MODEL)
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        help="Random seed: the same command repeats its samples (limits: docs/cli.md).",
        rich_help_panel=SAMPLING,
    ),
]


def is_given(ctx: typer.Context, name: str) -> bool:
    """Whether an option is on the command line."""
    source = ctx.get_parameter_source(name)  # an enum of click or of typer's copy
    return source is not None and source.name == "COMMANDLINE"


def _dtype(name: str) -> str:
    from forerun.models import paths as folder

    return folder.dtype_name(name)


Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="Number type: auto (the checkpoint's), bf16, fp16 or fp32.",
        callback=_dtype,
        rich_help_panel=MODEL,
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        "--weights",
        help="Weight format: auto (as stored), int8 or int8:128 (finer scales); GPU: fp8, int4.",
        rich_help_panel=MODEL,
    ),
]
Device = Annotated[
    str, typer.Option("--device", help="Device: auto, cpu, cuda or cuda:1.", rich_help_panel=MODEL)
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print JSON.", rich_help_panel=OUTPUT),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="File for results as JSON lines; each is written when it is finished.",
        rich_help_panel=OUTPUT,
    ),
]
MemoryFile = Annotated[
    Path | None,
    typer.Option(
        "--memory",
        help="File for what the drafter learns; loaded if it exists, saved at the end.",
        rich_help_panel=LEARNING,
    ),
]
Tenant = Annotated[
    str,
    typer.Option(
        "--tenant",
        help="Owner of the text; each tenant has its own memory.",
        rich_help_panel=LEARNING,
    ),
]
Prompt = Annotated[
    list[str],
    typer.Option("--prompt", "-p", help="Prompt; repeatable.", rich_help_panel=PROMPTS),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--prompt-file",
        "-f",
        help="Text file with one prompt, or .jsonl file with an object per prompt.",
        rich_help_panel=PROMPTS,
    ),
]
Number = Annotated[
    int, typer.Option("-n", min=1, help="Samples per prompt.", rich_help_panel=SAMPLING)
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature", "-t", help="Sampling temperature; 0 is greedy.", rich_help_panel=SAMPLING
    ),
]
TopP = Annotated[
    float,
    typer.Option("--top-p", help="Nucleus sampling; 1: off.", rich_help_panel=SAMPLING),
]
RunFolder = Annotated[Path, typer.Argument(help="A run folder.")]
MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max-new-tokens",
        help="Maximum number of new tokens per sample.",
        rich_help_panel=SAMPLING,
    ),
]
Stop = Annotated[
    list[str],
    typer.Option("--stop", help="Text that ends a sample.", rich_help_panel=SAMPLING),
]

# corpora and queries
AsIds = Annotated[bool, typer.Option("--ids", help="Read texts as token ids, e.g. '5 17 3'.")]
Queries = Annotated[list[str], typer.Argument(help="Texts, or token ids with --ids.")]
Sources = Annotated[
    list[Path],
    typer.Argument(help="Text, .jsonl (.gz, .zst) or .parquet files, folders, saved datasets."),
]
TextField = Annotated[str, typer.Option("--field", help="Text field of JSON lines and datasets.")]
Split = Annotated[
    str, typer.Option("--split", help="What a document is in text files: file, paragraph or line.")
]
OnError = Annotated[str, typer.Option("--on-error", help="For unreadable records: fail or skip.")]

PARTS = {  # annotation -> kind
    "DrafterName": "drafter",
    "GrowerName": "grower",
    "VerifierName": "verifier",
}


def runs_locally(given: dict[str, Any]) -> bool:
    """Whether the model runs in this process; elsewhere paths and devices differ."""
    return given.get("engine", "local") == "local"


def check_parts(
    *, is_local: bool = True, samplings: tuple[Sampling, ...] = (), **specs: str | Many[str] | None
) -> None:
    """Checks the methods and options of each kind before anything slow happens.

    Also checks that the verifier suits the drafter and the samplings.
    is_local: the parts run in this process; otherwise paths are not checked.
    """
    made = {
        kind: check_part(kind, spec, is_local)
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


def check_part(kind: str, spec: str, is_local: bool = True) -> Any:
    """The part, made on trial; None for a target, or if an option refers to large files."""
    registry.check_options(kind, spec, is_local=is_local)
    cls, given = registry.resolve(kind, spec)
    name, known = registry.parse(spec)[0], registry.options(cls)
    named = {o: what for o, what in registry.reference_options(cls).items() if o in given}
    quick = set(PARTS) | ({"File"} if is_local else set())
    for option, what in named.items():
        value = given[option]
        if what in PARTS and value != known[option].default:
            for inner in value if isinstance(value, tuple) else [value]:
                if check_part(PARTS[what], inner, is_local) is None:
                    quick.discard(what)
    for option, what in named.items():
        value = given[option]
        if what == "Corpus" and is_local:
            check_files(f"{option} of {kind} {name!r}", value)
        elif what == "ModelName" and value not in (None, known[option].default):
            check_model(
                value, given.get("dtype", "auto"), given.get("device", "auto"), is_local=is_local
            )
    is_quick = kind != "target" and quick.issuperset(named.values())
    return cls(**given) if is_quick else None


def check_files(what: str, files: str | Many[str] | None, *, folders: bool = True) -> None:
    """Raises DataError for a missing file, or for a folder unless `folders` are allowed."""
    for file in (files,) if isinstance(files, str) else files or ():
        path = Path(file).expanduser()
        if not file or not path.exists():
            kind = "file or folder" if folders else "file"
            raise DataError(f"{what}: there is no {kind} {file or repr(file)}; check the path")
        if path.is_dir() and not folders:
            raise DataError(f"{what}: {file} is a folder; give the files in it")


def check_out_folder(out: Path) -> None:
    """Raises DataError if --out is a file."""
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file; --out names a folder, give another")


def check_folder_name(folder: Path) -> None:
    """Raises DataError for a name that is not UTF-8: tokenizers cannot be saved there."""
    check_text(f"expected a folder with a name in UTF-8, but {str(folder)!r}", str(folder))


def check_model(
    name: str,
    dtype: str = "auto",
    device: str = "auto",
    batch: int = 1,
    weights: str = "auto",
    *,
    is_local: bool = True,
) -> None:
    """Checks the options of a model without loading it. Raises ConfigError, ModelError.

    Fetches the configuration of a model on the hub, unless the model runs elsewhere.
    """
    from forerun.models import paths as folder
    from forerun.runner.native.weight_format import WeightFormat

    if not 1 <= batch <= registry.MAX_NUMBER:
        raise ConfigError(
            f"--batch must be in 1..{registry.MAX_NUMBER}, got {batch}; 1 runs one at a time"
        )
    folder.dtype_name(dtype)
    folder.check_device(device)
    WeightFormat.parse(weights)
    if is_local:
        folder.check_folder(folder.model_folder(folder.located(name), folder.CONFIG))


def chat_check(name: str, is_needed: bool = False) -> Callable[[Tokenizer], None]:
    """A check of the chat template for `load`: it raises TemplateError for a bad one.

    is_needed: a model without one is refused, too.
    """
    from forerun.assets import is_embedded
    from forerun.models.chat_template import TemplateError, check_template

    def check(tokenizer: Tokenizer) -> None:
        if is_embedded(name):
            return
        if tokenizer.has_chat_template:
            check_template(tokenizer.inner, add_generation_prompt=True)
        elif is_needed:
            raise TemplateError(f"{name} has no chat template; leave out --chat")

    return check
