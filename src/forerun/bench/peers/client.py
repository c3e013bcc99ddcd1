"""A worker process of a peer's own environment, spoken to in JSON lines (workers/serve.py).

Its stderr is read all the time, and an error quotes its last lines. A worker that dies, answers
with an error, or does not answer in time is a PeerError. After a timeout it is killed.
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
MARK = re.compile(r"#forerun-answer (\d+)")  # serve.py writes it to stderr before an error's answer
READ_SECONDS = 30.0  # how long the end of stderr is waited for; it comes at once, as a rule
LAST = 11  # lines of stderr that an error shows, beside its own
RAISED = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b(:.*)?")  # how tracebacks end
COLOURS = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
OURS = (  # not for another environment; the last one would replace the cache size of a run
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD"),
    "VLLM_CPU_KVCACHE_SPACE",
)
# Thread pools of every library, counted alike; nothing is fetched, nobody is told.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONNOUSERSITE": "1",
}


class WorkerProcess:
    """One worker: starts when it is made, answers one request at a time."""

    def __init__(
        self, python: Path, worker: Path, *, threads: int = 0, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = worker.stem
        self.stderr: deque[str] = deque(maxlen=200)
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._count = 0
        self._is_busy = False  # an answer is outstanding
        self._marked = 0  # id of the last answer up to which stderr has been read
        self._mark_read = threading.Condition()
        command = [str(python), "-P", str(SERVE), str(worker)]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=environment(threads, env or {}),
                start_new_session=True,  # so that what it starts can be ended with it
                text=True,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            raise PeerError(f"{self.name}: cannot start {python}: {error.strerror}") from None
        assert self._process.stdout and isinstance(self._process.stderr, TextIOWrapper)
        self._process.stderr.reconfigure(newline="")  # "\r" begins a line again, and ends none
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
            self._wait_for_stderr()
            said = self._with_tail(f"{self.name} failed in {verb}: {answer['error']}")
            self.stderr.clear()  # it lives on; what is told once is not told of a later failure
            raise PeerError(said)
        return answer["result"]

    def close(self, patience: float = 5.0) -> None:
        """Asks it to end, and kills it with all that it started if it does not.

        A worker that is still computing is killed at once: it would not hear the request.
        """
        if self.is_alive and not self._is_busy:
            with contextlib.suppress(PeerError, SkippedPeer):
                self.request("close", patience)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
        self.kill()

    def kill(self) -> None:
        """Ends the process group and frees the pipes."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for reader in self._readers:
            reader.join(READ_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                assert pipe
                pipe.close()

    def tail(self) -> str:
        """What an error quotes of stderr: its last lines, LAST of them.

        If the last exception was raised before these, as libraries go on to write when a process
        ends: the lines up to that exception and the last ones, half as many of each, and "..."
        between.
        """
        lines = [line for line in [*self.stderr] if line.strip()]  # of a copy: it may grow
        raised = [i for i, line in enumerate(lines) if RAISED.fullmatch(line)]
        if raised and raised[-1] < len(lines) - LAST:
            half = LAST // 2
            lines = [*lines[: raised[-1] + 1][-half:], "...", *lines[-half:]]
        return "\n".join(lines[-LAST:])

    def _answer(self, verb: str, timeout: float) -> dict[str, Any]:
        try:
            while (answer := self._answers.get(timeout=timeout)) is not None:
                if answer.get("id") == self._count:
                    return answer
        except queue.Empty:
            self.kill()
            text = f"{self.name}: no answer to {verb} in {timeout:g} s; the worker was ended"
            raise PeerError(self._with_tail(text)) from None
        raise self._died(verb)

    def _died(self, verb: str) -> PeerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self.kill()
        code = self._process.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return PeerError(self._with_tail(f"{self.name}: the worker died during {verb} ({how})"))

    def _wait_for_stderr(self) -> None:
        """Waits until all that was printed before the last answer has been read."""
        with self._mark_read:
            self._mark_read.wait_for(lambda: self._marked >= self._count, READ_SECONDS)

    def _with_tail(self, text: str) -> str:
        """Behind what it wrote, so that the last line says what happened."""
        return f"{self.tail()}\n{text}" if self.stderr else text

    def _read_answers(self, pipe: IO[str]) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in pipe:
                try:
                    answer = json.loads(line)
                except ValueError:  # printed before the worker took hold of its stdout
                    self.stderr.append(line.rstrip("\n"))
                    continue
                if isinstance(answer, dict):
                    self._answers.put(answer)
        self._answers.put(None)

    def _read_stderr(self, pipe: IO[str]) -> None:
        """Keeps what a terminal would show at the end: of a progress bar, its last state."""
        is_open = False  # whether the next piece goes over the last one
        with contextlib.suppress(OSError, ValueError):
            for piece in pipe:
                if mark := MARK.match(piece):
                    with self._mark_read:
                        self._marked = int(mark[1])
                        self._mark_read.notify_all()
                    continue
                text = COLOURS.sub("", piece.rstrip("\r\n"))
                if is_open and text and self.stderr:
                    self.stderr.pop()
                if text or not is_open:
                    self.stderr.append(text)
                is_open = piece.endswith("\r")


def environment(threads: int, extra: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a worker: this process's, less what points into our own Python."""
    kept = {key: value for key, value in os.environ.items() if key not in OURS}
    pools = dict.fromkeys(THREADS, str(threads)) if threads else {}
    return {**kept, **QUIET, **pools, **extra}
