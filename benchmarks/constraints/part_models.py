"""Real models: validity, accuracy, tokens per second and likelihood of constrained texts.

Validity is judged without the constraint: by `jsonschema`, SQLite, `re`, and a reader of SMILES.
Accuracy: right fields of an extracted object, the expected call, a statement that SQLite compiles,
valences. Log-likelihood: of valid texts under the unconstrained model, the measure of "Grammar-
Aligned Decoding".
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np

from constraints import tasks
from constraints.common import (
    OnDemand,
    Row,
    Setting,
    Store,
    fits,
    generated,
    log_likelihood,
    prompt_of,
    refusal,
    table,
)  # fmt: skip
from forerun.api import Model
from forerun.engine.generation import Sample

MODELS = ("smollm2-135m", "qwen-coder-0.5b")
WAYS = ("free", "mask", "asap", "smc 5")
KINDS = ("extraction", "functions", "sql", "schemas", "patterns", "molecules")
PARTICLE_TOKENS = 96  # of a text at most: five particles grow for each


def run(setting: Setting) -> None:
    """Options that matter: problems of each kind, samples of each, tokens."""
    store = setting.store("models", "problems", "samples", "tokens")
    lines = []
    for name in MODELS:
        needed = OnDemand(setting, name, max_seqs=16)
        for kind in KINDS:
            problems = list(tasks.problems(kind, setting.data))[: setting.problems]
            if not problems:
                setting.skip(kind, "no data; give --data-dir a folder")
            for how in WAYS if problems else ():
                if how != "free" and (why := refusal(how)):
                    setting.skip(how, why)
                    continue
                rows = _rows(setting, store, needed, how, problems)
                if rows:
                    lines.append([f"{name}, {kind}", how, *_summary(rows)])
    head = ["texts", "sampling", "problems", "ended", "valid", "right", "log-likelihood", "tokens",
            "tokens per second"]  # fmt: skip
    setting.write(
        "models",
        f"{setting.samples} texts of each problem, at most {setting.tokens} tokens, temperature 1; "
        "right: share of valid texts; log-likelihood: mean of valid texts\n\n" + table(head, lines),
    )


def _rows(
    setting: Setting, store: Store, needed: OnDemand, how: str, problems: list[tasks.Problem]
) -> list[Row]:
    """The rows of one model and way for the problems that fit it; none without the model."""
    rows = []
    for problem in problems:
        key = f"{needed.name}, {problem.kind}, {problem.name}, {how}"
        if key not in store.rows:
            if needed.model is None:
                return rows
            if not fits(setting, needed.model, problem):
                continue
            store.row(key, partial(_row, needed.model, problem, how, setting))
        rows.append(store.rows[key])
    return rows


def _row(model: Model, problem: tasks.Problem, how: str, setting: Setting) -> Row:
    options: dict[str, Any] = {
        "max_new_tokens": min(setting.tokens, problem.max_tokens),
        "seed": setting.seed,
        "logprobs": 0,
    }
    start = time.perf_counter()
    samples = _samples(model, problem, how, setting.samples, options)
    seconds = time.perf_counter() - start
    whole = [one for one in samples if one.finish == "stop"]
    valid = [one for one in whole if problem.check(one.text.strip())]
    scored = [problem.score(one.text.strip()) for one in valid] if problem.score else None
    return {
        "num": len(samples),
        "ended": len(whole),
        "valid": len(valid),
        "scores": scored,
        "logp": [log_likelihood(one) for one in valid],
        "tokens": sum(len(one.tokens) for one in samples),
        "seconds": seconds,
        "text": samples[0].text,
    }


def _samples(
    model: Model, problem: tasks.Problem, how: str, num: int, options: dict[str, Any]
) -> list[Sample]:
    prompt = prompt_of(model, problem)
    if how == "free":
        return model.generate([prompt], n=num, **options)[0].samples
    if how.startswith("smc"):
        options = options | {"max_new_tokens": min(options["max_new_tokens"], PARTICLE_TOKENS)}
    return generated(model, prompt, how, num, constraint=problem.constraint, **options)


def _summary(rows: list[Row]) -> list[Any]:
    num, valid = sum(row["num"] for row in rows), sum(row["valid"] for row in rows)
    scores = [score for row in rows for score in row["scores"] or ()]
    logps = [logp for row in rows for logp in row["logp"]]
    tokens, seconds = sum(row["tokens"] for row in rows), sum(row["seconds"] for row in rows)
    return [
        len(rows),
        sum(row["ended"] for row in rows) / num,
        valid / num,
        float(np.mean(scores)) if scores else None,
        float(np.mean(logps)) if logps else None,
        tokens,
        tokens / seconds,
    ]
