"""`forerun search --method superposed`: several drafts of a continuation from one run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from forerun.cli import options
from forerun.cli.output import Results, notice, painted, print_json
from forerun.cli.prompts import Job, as_shown, read_jobs
from forerun.core.sampling import Sampling
from forerun.errors import ConfigError
from forerun.utils.text import counted

if TYPE_CHECKING:
    from forerun.search.superposed import Superposed

LENGTH = 10  # tokens, where nothing is said
OWN = ("ngrams", "ngram_weight")  # options that no other method has
SHARED = {"model", "prompt", "prompt_file", "method", "n", "max_new_tokens"}
SHARED |= {"dtype", "device", "out", "is_json"}


def command(ctx: typer.Context, given: dict[str, Any]) -> None:
    """The whole method, from the options of `forerun search`."""
    _check(given, {str(p.name): p.default for p in ctx.command.params})
    source = ctx.get_parameter_source("max_new_tokens")
    if source is not None and source.name == "DEFAULT":
        given = given | {"max_new_tokens": LENGTH}
    length = given["max_new_tokens"]
    jobs = read_jobs(given["prompt"], given["prompt_file"], Sampling(max_new_tokens=length))
    options.check_model(given["model"], given["dtype"], given["device"])
    with Results(given["out"]) as results:
        if not given["is_json"]:
            options.announce(ctx)
        _run(given, jobs, results, options.call_line(ctx))


def refuse(method: str, given: dict[str, Any]) -> None:
    """Raises ConfigError for our own options with another method."""
    for name in OWN:
        if given[name] not in (None, [], ()):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} belongs to --method superposed, not to {method}")


def _check(given: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Raises ConfigError for what cannot work, and for options that would change nothing."""
    for name, default in defaults.items():
        flag = name.replace("_", "-")
        if name not in SHARED and name not in OWN and given[name] not in (default, ()):
            raise ConfigError(
                f"--{flag} changes nothing with --method superposed, which draws no samples; "
                "leave it out"
            )
    from forerun.search.superposed import Settings

    how = Settings(**_settings(given))
    if how.ngram_weight and not given["ngrams"]:
        raise ConfigError(
            "--method superposed needs --ngrams FILE, a text or a saved n-gram model that tells "
            "its drafts apart; --ngram-weight 0 does without, and drafts get worse"
        )
    options.check_files("--ngrams", given["ngrams"], folders=False)


def _run(given: dict[str, Any], jobs: list[Job], results: Results, call: str) -> None:
    """Drafts for one prompt after another, shown and written as they come."""
    from forerun.ngrams.index.counts.trie import NgramModel
    from forerun.search.superposed import ORDER, rescored, superposed

    model = options.load(given["model"], dtype=given["dtype"], device=given["device"], batch=1)
    paths = [Path(path).expanduser() for path in given["ngrams"]]
    ngrams = NgramModel.of_files(paths, model.tokenizer, order=ORDER) if paths else None
    if ngrams is not None and 2 * ngrams.num_tokens < ngrams.vocab_size:
        notice(
            f"warning: --ngrams holds {counted(ngrams.num_tokens, 'token')}, so it has never seen "
            f"most of the {ngrams.vocab_size} ids of the vocabulary; it can hardly tell drafts "
            "apart, and they may be nonsense: give it more text"
        )
    how = _settings(given) | {"ngrams": ngrams, "max_new_tokens": given["max_new_tokens"]}
    for job in jobs:
        prompt, start = as_shown(model.name, job.prompt), time.perf_counter()
        found = superposed(model, prompt, **how)
        seconds = time.perf_counter() - start
        logprobs = [sum(row) for row in rescored(model, prompt, found.drafts)]
        record = to_record(found, logprobs, call) | ({} if job.id is None else {"id": job.id})
        results.write(record)
        print_json(record) if given["is_json"] else _show(found, logprobs, seconds)


def to_record(found: Superposed, logprobs: list[float], call: str) -> dict[str, Any]:
    """The drafts as plain values; logprob is the plain model's, of the whole draft."""
    drafts = [
        {
            "text": draft.text,
            "tokens": list(draft.tokens),
            "finish": draft.finish,
            "score": draft.score,
            "logprob": logprob,
        }
        for draft, logprob in zip(found.drafts, logprobs, strict=True)
    ]
    return {
        "prompt": found.prompt,
        "method": "superposed",
        "is_lossless": False,
        "text": found.drafts[0].text,
        "drafts": drafts,
        "passes": found.num_passes,
        "call": call,
    }


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    weight = given["ngram_weight"]
    return {"k": given["n"]} | ({} if weight is None else {"ngram_weight": weight})


def _show(found: Superposed, logprobs: list[float], seconds: float) -> None:
    """A draft per line on standard output; what they are beside it."""
    for draft in found.drafts:
        print(draft.text.replace("\n", "\\n"), flush=True)
    said = ", ".join(f"{logprob:.2f}" for logprob in logprobs)
    passes = counted(found.num_passes, "pass", "passes")
    for line in (
        f"approximate: drafts share the model's state; log-probabilities under it: {said}",
        f"{counted(len(found.drafts), 'draft')} from {passes} in {seconds:.2f} s",
    ):
        painted(line, "dim", stderr=True)
