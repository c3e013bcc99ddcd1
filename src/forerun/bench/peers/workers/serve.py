"""Serves one peer over stdin and stdout, one JSON object per line, in the peer's environment.

    python -P serve.py WORKER.py

-P keeps this folder off the path, as its files have the names of libraries. WORKER.py defines
`Worker` with `packages` (reported with versions), `load(**fields)` and `run(**fields)`, which raise
NotImplementedError for unsupported requests. A request is {"id", "do", ...}, an answer
{"id", "result"}, {"id", "skip": reason} or {"id", "error": text}. Verbs:

    hello                                    -> {"python", "versions", "notes"}
    load          mode, model, dtype, threads, device, context, num_seqs, num_cells, cache_bytes,
                  cache, draft, options                                          -> {"seconds"}
    run, warm_up  mode, prompt, sampling, batch, options                         -> see `measured`
    first_tokens  the same                                                       -> {"tokens": [n]}
    close                                    -> {}, and the process ends

All output of libraries, also from C, goes to stderr. An error is the text of a traceback. When the
other end of stdin is closed, as by a killed parent, the process group ends.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import select
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, TextIO


def main() -> None:
    """Answers requests until "close" or the end of stdin."""
    requests, answers = private_pipes()
    threading.Thread(target=end_with_parent, args=(requests.fileno(),), daemon=True).start()
    worker = load_worker(Path(sys.argv[1]))
    for line in requests:
        request = json.loads(line)
        verb = request.pop("do")
        reply = {"id": request.pop("id"), **answer(worker, verb, request)}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
        if verb == "close":
            break
    answers.close()
    os._exit(0)  # some libraries hang or crash at exit


def private_pipes() -> tuple[TextIO, TextIO]:
    """Copies of stdin and stdout; file 0 becomes empty, file 1 becomes stderr."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, answers


def end_with_parent(pipe: int) -> None:
    """Waits until the writing end of a pipe is closed, then kills the process group."""
    poll = select.poll()
    poll.register(pipe, 0)  # hang-ups and errors only
    poll.poll()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def load_worker(path: Path) -> Any:
    """The `Worker` of a file, under a unique module name."""
    spec = importlib.util.spec_from_file_location(f"peer_worker_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Worker()


def answer(worker: Any, verb: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The reply to one request; errors are replies too."""
    try:
        return {"result": VERBS[verb](worker, **fields)}
    except NotImplementedError as reason:
        return {"skip": str(reason)}
    except Exception as error:
        return {"error": "".join(traceback.format_exception(error)).strip()}


def hello(worker: Any) -> dict[str, Any]:
    """Versions of Python and packages, and the worker's notes."""
    found = {"python": platform.python_version(), "versions": versions(worker.packages)}
    return found | {"notes": getattr(worker, "notes", [])}


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Versions of the installed packages."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def load(worker: Any, **fields: Any) -> dict[str, Any]:
    """Loads a mode of the peer. Raises NotImplementedError if a package is missing."""
    start = time.perf_counter()
    try:
        worker.load(**fields)
    except ModuleNotFoundError as error:
        raise NotImplementedError(
            f"its environment lacks the package {error.name}; run `make peers`"
        ) from None
    return {"seconds": time.perf_counter() - start}


def measured(worker: Any, **fields: Any) -> dict[str, Any]:
    """{"seconds", "prefill_seconds", "samples": [{"tokens", "finish", ...}], "memory"}.

    Caches of earlier prompts are emptied before the timed part.
    """
    if reset := getattr(worker, "reset", None):
        reset(**fields)
    start = time.perf_counter()
    result = worker.run(**fields)
    seconds = time.perf_counter() - start
    return {"prefill_seconds": None, **result, "seconds": seconds, "memory": memory()}


def first_tokens(worker: Any, **fields: Any) -> dict[str, Any]:
    """The first token of every sample."""
    fields["sampling"] = {**fields["sampling"], "max_new_tokens": 1}
    return {"tokens": [sample["tokens"][0] for sample in measured(worker, **fields)["samples"]]}


def memory() -> dict[str, int]:
    """Current and peak bytes of this process; empty if unknown."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    names = {"process": "VmRSS", "process at most": "VmHWM"}
    return {ours: int(values[key].split()[0]) * 1024 for ours, key in names.items()}


def close(worker: Any) -> dict[str, Any]:
    """An empty answer; the process ends after it."""
    return {}


VERBS = {
    "hello": hello,
    "load": load,
    "run": measured,
    "warm_up": measured,
    "first_tokens": first_tokens,
    "close": close,
}

if __name__ == "__main__":
    main()
