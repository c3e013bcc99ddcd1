"""A real browser without a window, driven over its DevTools protocol; the standard library does."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# the browser listens at descriptor 3 and answers at 4
LAUNCH = """
import fcntl, os, sys
r, w = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(r, 3), os.dup2(w, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)
CODES = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9}


def find() -> str | None:
    """Where a browser of the chromium family is."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page of a browser."""

    def __init__(self, to: BinaryIO, answers: queue.Queue[dict[str, Any]]) -> None:
        self._to, self._answers, self._number = to, answers, 0
        self._session: str | None = None
        self.errors: list[str] = []  # of scripts
        self.requested: list[str] = []  # addresses
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of one command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while (answer := self._answers.get(timeout=60)).get("id") != self._number:
            self._hear(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def open(self, url: str) -> None:
        """Loads a page."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """The value of an expression."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, (expression, found["exceptionDetails"])
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = 45.0) -> Any:
        """Waits until an expression holds; its value."""
        end = time.monotonic() + seconds
        while (value := self.js(expression)) in (None, False, 0, ""):  # an element comes as {}
            assert time.monotonic() < end, f"{expression} did not come about; {self.errors}"
            time.sleep(0.05)
        return value

    def type(self, selector: str, text: str) -> None:
        """Replaces what stands in a field, as a person would."""
        self.js(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", text=text)

    def press(self, key: str, ctrl: bool = False) -> None:
        """One key."""
        same = {"key": key, "code": key, "windowsVirtualKeyCode": CODES[key]}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, modifiers=2 * ctrl, **same)

    def resize(self, width: int, height: int) -> None:
        """Another size of the window."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def scheme(self, name: str) -> None:
        """light or dark, as the person's system would say."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self) -> bytes:
        """The window as PNG."""
        return b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def _hear(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif event.get("method") == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])


@contextmanager
def browse(path: str) -> Iterator[Page]:
    """A page in a fresh browser."""
    ours, theirs = os.pipe(), os.pipe()  # what we say, what it says
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [*FLAGS, f"--user-data-dir={profile}"]
        flags += ["--no-sandbox"] if os.geteuid() == 0 else []  # root has to
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(ours[0]), str(theirs[1]), path, *flags],
            pass_fds=(ours[0], theirs[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ours[0])
        os.close(theirs[1])
        answers: queue.Queue[dict[str, Any]] = queue.Queue()
        with os.fdopen(ours[1], "wb") as to, os.fdopen(theirs[0], "rb") as back:
            reader = threading.Thread(target=_read, args=(back, answers), daemon=True)
            reader.start()
            try:
                yield Page(to, answers)
            finally:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                reader.join(10)


def _read(back: BinaryIO, answers: queue.Queue[dict[str, Any]]) -> None:
    """Messages end with a zero byte."""
    rest = b""
    while data := os.read(back.fileno(), 1 << 16):
        *whole, rest = (rest + data).split(b"\0")
        for message in whole:
            answers.put(json.loads(message))
