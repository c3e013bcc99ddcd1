"""Serves one peer over stdin and stdout, a JSON object per line, under the peer's own Python.

    python -P serve.py WORKER.py

-P keeps this folder off the path: its files are named like the libraries that they use. WORKER.py
defines `Worker` with `packages` (whose versions are told), `load(**fields)` and `run(**fields)`;
NotImplementedError from it means that the peer cannot do this. A request is {"id", "do", ...}, its
answer {"id", "result"}, {"id", "skip": reason} or {"id", "error": text}. Verbs:

    hello                                    -> {"python", "versions", "notes"}
    load          mode, model, dtype, threads, device, context, num_seqs, num_cells, cache_bytes,
                  cache, draft, options                                          -> {"seconds"}
    run, warm_up  mode, prompt, sampling, batch, options                         -> see `measured`
    first_tokens  the same                                                       -> {"tokens": [n]}
    close                                    -> {}, and the process ends

The pipe is kept clean: whatever libraries print, also from C, goes to stderr. Before an error is
answered, a line MARK + id is written to stderr: the reader then knows that it has read everything
that was printed before. When the other end of stdin is closed, as by a parent that was killed, the
process ends at once with all that it started.
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

MARK = "#forerun-answer "  # begins a line of stderr that is for the parent


def main() -> None:
    """Answers until "close", or until the other side is gone."""
    asked, told = private_pipes()
    threading.Thread(target=end_with_parent, args=(asked.fileno(),), daemon=True).start()
    worker = load_worker(Path(sys.argv[1]))
    for line in asked:
        request = json.loads(line)
        verb = request.pop("do")
        reply = {"id": request.pop("id"), **answer(worker, verb, request)}
        if "error" in reply:
            sys.stderr.flush()
            os.write(2, f"\n{MARK}{reply['id']}\n".encode())
        told.write(json.dumps(reply) + "\n")
        told.flush()
        if verb == "close":
            break
    told.close()
    os._exit(0)  # some libraries hang or crash while they are taken down


def private_pipes() -> tuple[TextIO, TextIO]:
    """Copies of stdin and stdout that nobody else knows; 0 becomes empty, 1 becomes stderr."""
    asked = os.fdopen(os.dup(0), "r", encoding="utf-8")
    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return asked, told


def end_with_parent(pipe: int) -> None:
    """Waits until the writing end of a pipe is closed, then ends the process and its group."""
    poll = select.poll()
    poll.register(pipe, 0)  # hang-ups and errors only
    poll.poll()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def load_worker(path: Path) -> Any:
    """The `Worker` of a file, under a module name that hides no library."""
    spec = importlib.util.spec_from_file_location(f"peer_worker_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Worker()


def answer(worker: Any, verb: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The reply to one request; a failure is told, and the worker lives on."""
    try:
        return {"result": VERBS[verb](worker, **fields)}
    except NotImplementedError as reason:
        return {"skip": str(reason)}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {str(error).strip()}"}


def hello(worker: Any) -> dict[str, Any]:
    """Versions of the packages that matter, and what the worker had to say so far."""
    told = {"python": platform.python_version(), "versions": versions(worker.packages)}
    return told | {"notes": getattr(worker, "notes", [])}


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def load(worker: Any, **fields: Any) -> dict[str, Any]:
    """Loads a mode of the peer."""
    start = time.perf_counter()
    worker.load(**fields)
    return {"seconds": time.perf_counter() - start}


def measured(worker: Any, **fields: Any) -> dict[str, Any]:
    """{"seconds", "prefill_seconds", "samples": [{"tokens", "finish", ...}], "memory"}.

    What earlier prompts left in caches is dropped first, and room is made, outside the time.
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
    """Bytes of this process now, and at most so far; empty where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    names = {"process": "VmRSS", "process at most": "VmHWM"}
    return {ours: int(values[key].split()[0]) * 1024 for ours, key in names.items()}


def close(worker: Any) -> dict[str, Any]:
    """Nothing to say; the process ends after the answer."""
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
