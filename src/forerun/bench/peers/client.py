"""Client of a worker process in a peer's environment, over JSON lines (workers/serve.py).

An error quotes the worker's traceback, a death the last lines of stderr. A worker that dies, fails
or times out raises PeerError; after a timeout it is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

from forerun.bench.contestants import PeerError, SkippedPeer

SERVE = Path(__file__).parent / "workers" / "serve.py"
STDERR_TIMEOUT_S = 30.0
MAX_STDERR_LINES = 11  # in an error
RAISED = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b(:.*)?")  # how tracebacks end
COLOURS = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
REMOVED_VARIABLES = (  # of our environment; the last one would override the cache size
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD"),
    "VLLM_CPU_KVCACHE_SPACE",
)
# Equal thread counts for all libraries; no downloads, no telemetry.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONNOUSERSITE": "1",
}


class WorkerProcess:
    """A worker process, started on construction; answers one request at a time."""

    def __init__(
        self, python: Path, worker: Path, *, threads: int = 0, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = worker.stem
        self.stderr: deque[str] = deque(maxlen=200)
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._count = 0
        self._is_busy = False  # waiting for an answer
        command = [str(python), "-P", str(SERVE), str(worker)]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=environment(threads, env or {}),
                start_new_session=True,  # to kill its children with it
                text=True,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            raise PeerError(
                f"cannot start {python}: {error.strerror}; run `make peers` to install it again"
            ) from None
        assert self._process.stdout and isinstance(self._process.stderr, TextIOWrapper)
        self._process.stderr.reconfigure(newline="")  # "\r" restarts a line
        self._readers = [
            threading.Thread(target=self._read_answers, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._read_stderr, args=(self._process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def request(self, verb: str, timeout: float, **fields: Any) -> Any:
        """The result of one request. Raises SkippedPeer, PeerError."""
        self._count += 1
        line = json.dumps({"id": self._count, "do": verb, **fields})
        self._is_busy = True
        try:
            assert self._process.stdin
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise self._died(verb) from None
        answer = self._answer(verb, timeout)
        self._is_busy = False
        if "skip" in answer:
            raise SkippedPeer(answer["skip"])
        if "error" in answer:
            lines = answer["error"].splitlines()
            tail = "\n".join(lines[-MAX_STDERR_LINES:])
            raise PeerError(f"{tail}\n{self.name} failed in {verb}: {lines[-1]}")
        return answer["result"]

    def close(self, patience: float = 5.0) -> None:
        """Requests the end, then kills the process group.

        A worker that is still computing is killed immediately.
        """
        if self.is_alive and not self._is_busy:
            with contextlib.suppress(PeerError, SkippedPeer):
                self.request("close", patience)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
        self.kill()

    def kill(self) -> None:
        """Kills the process group and closes the pipes."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for reader in self._readers:
            reader.join(STDERR_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                assert pipe
                pipe.close()

    def tail(self) -> str:
        """The last MAX_STDERR_LINES of stderr.

        If the last exception is earlier, half of them are the lines up to that exception.
        """
        lines = [line for line in [*self.stderr] if line.strip()]  # a copy, as it may grow
        raised = [i for i, line in enumerate(lines) if RAISED.fullmatch(line)]
        if raised and raised[-1] < len(lines) - MAX_STDERR_LINES:
            half = MAX_STDERR_LINES // 2
            lines = [*lines[: raised[-1] + 1][-half:], "...", *lines[-half:]]
        return "\n".join(lines[-MAX_STDERR_LINES:])

    def _answer(self, verb: str, timeout: float) -> dict[str, Any]:
        try:
            while (answer := self._answers.get(timeout=timeout)) is not None:
                if answer.get("id") == self._count:
                    return answer
        except queue.Empty:
            self.kill()
            text = f"{self.name}: no answer to {verb} in {timeout:g} s; the worker was killed"
            raise PeerError(self._with_tail(text)) from None
        raise self._died(verb)

    def _died(self, verb: str) -> PeerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self.kill()
        code = self._process.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        if code == -signal.SIGKILL:
            how += ", as when memory is short"
        said = f": {self._cause()}" if code > 0 and self.stderr else ""
        return PeerError(
            self._with_tail(f"{self.name}: the worker died during {verb} ({how}){said}")
        )

    def _cause(self) -> str:
        """The last exception on stderr, or else its last line."""
        lines = [line.strip() for line in [*self.stderr] if line.strip()]
        raised = [line for line in lines if RAISED.fullmatch(line)]
        return (raised or lines or [""])[-1]

    def _with_tail(self, text: str) -> str:
        """The tail of stderr followed by the error."""
        return f"{self.tail()}\n{text}" if self.stderr else text

    def _read_answers(self, pipe: IO[str]) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in pipe:
                try:
                    answer = json.loads(line)
                except ValueError:  # printed before the worker redirected its stdout
                    self.stderr.append(line.rstrip("\n"))
                    continue
                if isinstance(answer, dict):
                    self._answers.put(answer)
        self._answers.put(None)

    def _read_stderr(self, pipe: IO[str]) -> None:
        """Keeps the lines that a terminal would show: of a progress bar, the last state."""
        is_open = False  # whether the next piece overwrites the last one
        with contextlib.suppress(OSError, ValueError):
            for piece in pipe:
                text = COLOURS.sub("", piece.rstrip("\r\n"))
                if is_open and text and self.stderr:
                    self.stderr.pop()
                if text or not is_open:
                    self.stderr.append(text)
                is_open = piece.endswith("\r")


def environment(threads: int, extra: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a worker: ours without those of our Python."""
    kept = {key: value for key, value in os.environ.items() if key not in REMOVED_VARIABLES}
    pools = dict.fromkeys(THREADS, str(threads)) if threads else {}
    return {**kept, **QUIET, **pools, **extra}
