"""Tokenises texts, renders chat templates and compiles grammars in processes that can be stopped.

A template is a program and may loop; a tokenizer or a grammar's compiler may take seconds and
gigabytes for some texts, or crash. None can be stopped in a thread. A fork server is started with
the HTTP server and forks workers on demand. A worker starts within milliseconds, with the tokenizer
loaded. Where processes cannot be forked, the work is done in the calling thread.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from forerun.errors import ForerunError
from forerun.serving.errors import ApiError, bad, shutting_down

SMALL_CHARS = 8192  # a text up to this is tokenised in the calling thread, in milliseconds
MAX_WORKER_BYTES = 2 * 2**30  # that a worker may allocate
LENGTH = struct.Struct("!Q")  # bytes of the message that follows
COMPILE = "compile"  # of `work`: compiles a constraint
PARALLELISM = "TOKENIZERS_PARALLELISM"
Work = dict[str, Callable[..., Any]]


class TextWorkers:
    """Calls functions of `work` by name in worker processes, each call within a time limit.

    seconds: limit of a call, or of all calls in a `deadline` block.
    """

    def __init__(self, work: Work, seconds: float) -> None:
        self._work, self.seconds = work, seconds
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self._is_closed = False
        self._local = threading.local()
        self._fork_server = ForkServer.start(work)
        if self._fork_server is not None:
            weakref.finalize(self, _end, self._fork_server, self._idle)

    @contextmanager
    def deadline(self, seconds: float | None = None) -> Iterator[None]:
        """All calls of this thread in the block share one time limit; default: `self.seconds`."""
        self._local.seconds = self.seconds if seconds is None else seconds
        self._local.end = time.monotonic() + self._local.seconds
        try:
            yield
        finally:
            self._local.seconds = self._local.end = None

    def call(self, name: str, *args: Any) -> Any:
        """The result of work[name](*args), or its exception.

        Raises ApiError 400 at the time limit or if memory runs out, 503 while shutting down.
        """
        if self._fork_server is None:
            return self._work[name](*args)
        worker = self._acquire()
        try:
            is_ok, result = worker.call((name, args), self._left())
        except TimeoutError:
            worker.stop()
            limit = getattr(self._local, "seconds", None) or self.seconds
            raise _refused(name, f"took more than {limit:g} s") from None
        except (OSError, EOFError, pickle.UnpicklingError):
            worker.stop()
            if self._is_closed:
                raise shutting_down() from None
            raise _refused(name, "needed too much memory") from None
        except BaseException:  # its answer may be unread, and must not reach the next call
            worker.stop()
            raise
        finally:
            self._release(worker)
        if is_ok:
            return result
        raise result

    def abort(self) -> None:
        """Stops all work; later calls are refused."""
        with self._lock:
            self._is_closed = True
            for worker in self._busy:  # their threads close them
                worker.stop()
            if self._fork_server is not None:
                _end(self._fork_server, self._idle)

    def _left(self) -> float:
        end = getattr(self._local, "end", None)
        return self.seconds if end is None else max(end - time.monotonic(), 0.001)

    def _acquire(self) -> Worker:
        with self._lock:
            if self._is_closed or self._fork_server is None:
                raise shutting_down()
            try:
                worker = self._idle.pop() if self._idle else self._fork_server.worker()
            except (OSError, EOFError):
                raise ApiError(
                    503, "no process for this text could be started; try again", retry_after=1
                ) from None
            self._busy.add(worker)
            return worker

    def _release(self, worker: Worker) -> None:
        with self._lock:
            self._busy.discard(worker)
            if worker.is_stopped or self._is_closed:
                worker.close()
            else:
                self._idle.append(worker)


class Worker:
    """One worker process."""

    def __init__(self, pid: int, link: socket.socket) -> None:
        self.pid, self._link, self.is_stopped = pid, link, False

    def call(self, message: Any, seconds: float) -> tuple[bool, Any]:
        """Sends a call; returns whether it succeeded, and its result or exception.

        Raises TimeoutError after `seconds`, OSError or EOFError if the process is gone.
        """
        end = time.monotonic() + seconds
        self._link.settimeout(seconds)
        _send(self._link, message)
        return pickle.loads(_receive(self._link, end))

    def stop(self) -> None:
        """Kills the process; safe to repeat."""
        if not self.is_stopped:
            self.is_stopped = True
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
            with suppress(OSError):  # wakes a thread that waits for it
                self._link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stops it when no thread waits for it."""
        self.stop()
        self._link.close()


class ForkServer:
    """A child process that forks workers. It ends when this process does."""

    def __init__(self, pid: int, link: socket.socket) -> None:
        self._pid, self._link = pid, link

    @classmethod
    def start(cls, work: Work) -> ForkServer | None:
        """Starts one; None where processes cannot be forked."""
        if sys.platform != "linux":  # macOS: its libraries do not survive a fork
            return None
        ours, theirs = socket.socketpair()
        try:
            with _serial_tokenizers(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # other threads run: the child uses none of theirs
                pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            return None
        if not pid:
            _run_fork_server(theirs, work)
        theirs.close()
        return cls(pid, ours)

    def worker(self) -> Worker:
        """A new worker. Raises OSError or EOFError."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._link.settimeout(10)
            socket.send_fds(self._link, [b"w"], [theirs.fileno()])
            (pid,) = LENGTH.unpack(_exactly(self._link, LENGTH.size, time.monotonic() + 10))
        return Worker(pid, ours)

    def close(self) -> None:
        """Ends it and its workers; safe to repeat."""
        self._link.close()
        pid, self._pid = self._pid, 0
        if pid:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _end(fork_server: ForkServer, idle: list[Worker]) -> None:
    """Ends all processes that do nothing."""
    for worker in idle:
        worker.close()
    idle.clear()
    fork_server.close()


def _run_fork_server(link: socket.socket, work: Work) -> NoReturn:
    """Forks workers on request until the parent has closed the link."""
    try:
        _isolate(link)
        os.environ[PARALLELISM] = "false"  # the threads did not survive the fork
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
        while True:
            data, handles, _, _ = socket.recv_fds(link, 1, 1)
            if not data:
                break
            pid = os.fork()
            if not pid:
                with socket.socket(fileno=handles[0]) as own:
                    link.close()
                    _run_worker(own, work)
            os.close(handles[0])
            link.sendall(LENGTH.pack(pid))
    finally:
        os._exit(0)


def _run_worker(link: socket.socket, work: Work) -> NoReturn:
    """Answers calls until the link is closed."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _limit()
        while True:
            name, args = pickle.loads(_receive(link))
            try:
                answer = True, work[name](*args)
            except MemoryError:
                os._exit(1)
            except ForerunError as error:
                answer = False, error
            except Exception as error:  # may be of a class that cannot be pickled
                answer = False, RuntimeError(str(error))
            _send(link, answer)
    finally:
        os._exit(0)


def _isolate(link: socket.socket) -> None:
    """Closes all files of the parent, and ignores its signals."""
    signal.set_wakeup_fd(-1)
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(nothing, handle)
    keep = link.fileno()
    os.closerange(3, keep)
    os.closerange(keep + 1, max(os.sysconf("SC_OPEN_MAX"), keep + 1))
    gc.disable()  # collections would copy the pages of the parent
    gc.freeze()


def _limit() -> None:
    """Limits memory; the process dies with the fork server."""
    import ctypes
    import resource

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    with suppress(OSError, ValueError):
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + MAX_WORKER_BYTES, size + MAX_WORKER_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _send(link: socket.socket, value: Any) -> None:
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    link.sendall(LENGTH.pack(len(data)) + data)


def _receive(link: socket.socket, end: float | None = None) -> bytes:
    (size,) = LENGTH.unpack(_exactly(link, LENGTH.size, end))
    return _exactly(link, size, end)


def _exactly(link: socket.socket, size: int, end: float | None) -> bytes:
    """The next `size` bytes. Raises EOFError if the other side is gone, TimeoutError at `end`."""
    data = bytearray()
    while len(data) < size:
        if end is not None:
            link.settimeout(max(end - time.monotonic(), 0.001))
        piece = link.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError("the process is gone")
        data += piece
    return bytes(data)


@contextmanager
def _serial_tokenizers() -> Iterator[None]:
    """Turns threads of tokenizers off, so that a fork in the block logs no warning about them."""
    before = os.environ.get(PARALLELISM)
    os.environ[PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[PARALLELISM]
        else:
            os.environ[PARALLELISM] = before


def _refused(name: str, why: str) -> ApiError:
    """The error for a text that a worker could not process."""
    if name == "chat_text":
        text = f"the model's chat template {why} for these messages; send fewer or shorter ones"
        return bad(text, "messages", "template_limit")
    if name == COMPILE:
        return bad(f"compiling {why}; send a simpler one", code="grammar_limit")
    return bad(f"tokenising {why}; send a shorter text", code="tokenizer_limit")
