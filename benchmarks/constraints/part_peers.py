"""Constrained decoding by other libraries on the same checkpoint: validity and tokens per second.

JSON problems, temperature 1, one text at a time. Each library runs in its own process, in an
environment that has it: llguidance or xgrammar behind transformers in this one, in that of
--python, or in `transformers` of --peers-dir; vLLM in `vllm` of it (`make peers`). All mask:
their distance from the conditional law is that of `mask` in part kl.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from constraints import tasks
from constraints.common import Row, Setting, fits, loaded, prompt_of, table
from forerun.api import Model

KINDS = ("schemas", "functions", "extraction")
WORKER = Path(__file__).with_name("peer_worker.py")
ENGINES = {"llguidance": "transformers", "xgrammar": "transformers", "vllm": "vllm"}
MAX_SECONDS = 900
THREADS = 2


def run(setting: Setting) -> None:
    """Options that matter: model, problems of each kind, tokens."""
    store = setting.store("peers", "model", "problems", "tokens")
    problems = [p for kind in KINDS for p in list(tasks.problems(kind, None))[: setting.problems]]
    model = loaded(setting, setting.model, max_seqs=4)
    if model is None:
        return
    problems = [one for one in problems if fits(setting, model, one)]
    if not problems:
        setting.skip("peers", "no problem fits; give fewer --tokens, or a model of more context")
        return
    folder = setting.models / setting.model
    if not folder.exists():
        setting.skip("peers", f"{folder} is missing; give --models-dir the folder of checkpoints")
        return
    for drafter in ("none", "auto"):
        store.row(f"forerun, {drafter}", lambda d=drafter: _own(model, problems, d, setting))
    for engine in ENGINES:
        if engine in store.rows:
            continue
        python = _python_with(engine, setting)
        if python is None:
            setting.skip(engine, "no environment has it; `make peers`, or pip install it")
            continue
        answers = _ask(python, engine, _request(model, folder, problems, setting))
        if isinstance(answers, str):
            setting.skip(engine, answers)
        else:
            store.row(engine, lambda found=answers: _judged(problems, found))
    plain = store.rows["forerun, none"]
    lines = []
    for name, row in store.rows.items():
        rate = row["tokens"] / row["seconds"]
        over = rate / (plain["tokens"] / plain["seconds"])
        lines.append([name, row["num"], row["ended"] / row["num"], row["valid"] / row["num"],
                      row["valid"] / max(row["ended"], 1), rate, over])  # fmt: skip
    head = ["engine", "texts", "ended", "valid", "valid of ended", "tokens per second",
            "over forerun, none"]  # fmt: skip
    setting.write(
        "peers",
        f"{setting.model}, bf16, at most {setting.tokens} tokens; one after the other, not "
        "interleaved\n\n" + table(head, lines),
    )


def _own(model: Model, problems: list[tasks.Problem], drafter: str, setting: Setting) -> Row:
    answers = []
    for problem in [problems[0], *problems]:  # the first one twice: warm-up
        start = time.perf_counter()
        sample = model.generate(
            [prompt_of(model, problem)],
            drafter=drafter,
            constraint=problem.constraint,
            max_new_tokens=setting.tokens,
            seed=setting.seed,
        )[0].samples[0]
        seconds = time.perf_counter() - start
        answers.append({"text": sample.text, "tokens": len(sample.tokens), "seconds": seconds,
                        "ended": sample.finish == "stop"})  # fmt: skip
    return _judged(problems, answers[1:])


def _judged(problems: list[tasks.Problem], answers: list[dict[str, Any]]) -> Row:
    pairs = zip(problems, answers, strict=True)
    return {
        "num": len(answers),
        "ended": sum(one["ended"] for one in answers),
        "valid": sum(one["ended"] and p.check(one["text"].strip()) for p, one in pairs),
        "tokens": sum(one["tokens"] for one in answers),
        "seconds": sum(one["seconds"] for one in answers),
    }


def _request(
    model: Model, folder: Path, problems: list[tasks.Problem], setting: Setting
) -> dict[str, Any]:
    asked = []
    for problem in problems:
        prompt = prompt_of(model, problem)
        ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        asked.append({"ids": ids, "schema": problem.schema})
    return {
        "model": str(folder.resolve()),
        "problems": asked,
        "tokens": setting.tokens,
        "seed": setting.seed,
        "eos_ids": list(model.tokenizer.eos_ids),
        "threads": THREADS,
    }


def _python_with(engine: str, setting: Setting) -> str | None:
    """A Python that can import what an engine needs."""
    peer = setting.peers / ENGINES[engine] / "bin" / "python"
    others = [] if setting.python is None else [str(setting.python.absolute())]
    for python in (sys.executable, *others, str(peer.absolute())):
        code = f"import {engine}" if engine == "vllm" else f"import {engine}, transformers"
        try:
            done = subprocess.run([python, "-c", code], capture_output=True, timeout=120)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return python
    return None


def _ask(python: str, engine: str, request: dict[str, Any]) -> list[dict[str, Any]] | str:
    """The answers of a worker, or why there are none."""
    try:
        done = subprocess.run(
            [python, str(WORKER), engine],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=MAX_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {MAX_SECONDS} seconds"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return lines[-1][:300] if lines else f"status {done.returncode}"
    return json.loads(done.stdout)
