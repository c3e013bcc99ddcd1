"""`forerun chat`: talk to a model in the terminal; colours mark accepted drafts."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun import registry
from forerun.cli import loading, options
from forerun.cli.output import console, notice
from forerun.cli.prompts import as_shown
from forerun.core.sampling import Sampling
from forerun.errors import ConfigError, DataError, ForerunError, nearest
from forerun.models.chat_template import TemplateError
from forerun.utils.files import check_text
from forerun.utils.text import counted

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.api import Model
    from forerun.engine.stats import Stats
    from forerun.engine.token_sources import Piece

System = Annotated[str, typer.Option("--system", "-s", help="System message.")]
Temperature = Annotated[
    float, typer.Option("--temperature", "-t", help="Sampling temperature; 0 is greedy.")
]
COLOURS = ("green", "cyan", "magenta", "yellow", "blue")  # one per drafter
HELP = """\
/stats            show tokens, passes, tau, tokens per second of the last answer
/drafter SPEC     set the drafter, e.g. stand:context=3 or none
/verifier SPEC    set the verifier; /controller SPEC sets the controller
/constraint SPEC  set the constraint, e.g. corpus:index=FILE; none removes it
/temperature T    set the temperature
/system           show the system message
/system TEXT      set it and clear the conversation; - removes it
/colours          turn colours on or off
/history          show the conversation
/reset            clear the conversation
/save FILE        write the conversation as text
/quit             leave, like Ctrl-D; Ctrl-C stops an answer"""
COMMANDS = tuple(dict.fromkeys(re.findall(r"/(\w+)", HELP)))
PARTS = ("verifier", "controller", "constraint")


@dataclass
class Chat:
    """A conversation with its model, sampling and methods."""

    model: Model
    sampling: Sampling
    drafter: str
    system: str = ""
    parts: dict[str, Any] = field(default_factory=dict)  # options of `Model.run`, by kind
    turns: list[tuple[str, str]] = field(default_factory=list)  # role, text
    last: Stats | None = None

    def prompt(self, text: str) -> str | list[int]:
        """The prompt for a new message: by the chat template, or as lines ROLE: TEXT."""
        turns = [*self.turns, ("user", text)]
        if self.model.tokenizer.has_chat_template:
            first = [{"role": "system", "content": self.system}] if self.system else []
            said = [{"role": role, "content": what} for role, what in turns]
            return self.model.tokenizer.chat(first + said)
        alone = as_shown(self.model.name, text)
        if alone != text:  # the embedded models learned single problems
            return alone
        lines = [f"{role.capitalize()}: {what}" for role, what in turns]
        return "\n".join([*filter(None, [self.system]), *lines, "Assistant:"])

    def change(self, drafter: str) -> None:
        """Sets the drafter. Raises ForerunError if it cannot draft for this model."""
        self.model.drafter(drafter).bind(self.model.target)
        self.drafter = drafter

    def choose(self, kind: str, spec: str) -> None:
        """Sets verifier, controller or constraint. Raises ForerunError and changes nothing."""
        if (kind, spec) == ("constraint", "none"):
            self.parts.pop(kind, None)
            return
        drafter = self.drafter if kind == "verifier" else None
        specs: dict[str, Any] = {"drafter": drafter, kind: spec}
        options.check_parts(samplings=(self.sampling,), **specs)
        self.parts[kind] = self.model.constraint(spec) if kind == "constraint" else spec

    def check_template(self) -> None:
        """Raises TemplateError for a chat template that rejects even a single message."""
        self._first("")

    def check_system(self, text: str) -> None:
        """Raises ConfigError if the prompt has no place for a system message."""
        if text and self._first(text) == self._first(""):
            raise ConfigError(
                f"the prompt of {self.model.name} has no place for a system message; leave it out"
            )

    def _first(self, system: str) -> str | list[int]:
        return replace(self, system=system, turns=[]).prompt("Hello.")

    def answer(self, text: str) -> Iterator[Piece]:
        """Streams the answer and keeps it, even if it is stopped early."""
        is_plain = not self.model.tokenizer.has_chat_template
        law = replace(self.sampling, stop=("\nUser:",) if is_plain else ())
        said = ""
        try:
            shown: Any = [self.prompt(text)]
            drafter = self.model.drafter(self.drafter)  # an object keeps what it learned
            for event in self.model.stream(shown, law, drafter=drafter, **self.parts):
                said += event.text
                yield from event.pieces
                if event.sample:
                    self.last = event.sample.stats
        finally:
            if said:
                self.turns += [("user", text), ("assistant", said.strip())]

    def stats_text(self) -> str:
        """Statistics of the last answer."""
        if self.last is None:
            return "no answer has ended yet"
        s = self.last
        cut = f" and {s.cut} of a stop string" if s.cut else ""
        parts = ", ".join(
            f"{name} {s.accepted_by[name]} of {count}" for name, count in s.drafted_by.items()
        )
        return (
            f"{s.generated} tokens{cut} in {s.passes} passes, tau {s.tau:.2f}, "
            f"{s.tokens_per_second:.0f} tokens/s; {s.accepted} of {s.drafted} draft tokens accepted"
            + (f" ({parts})" if parts else "")
        )

    def text(self) -> str:
        """The conversation as text."""
        if not self.turns:
            return "the conversation is empty"
        return "\n\n".join(f"{role}: {what}" for role, what in self.turns)


class Terminal:
    """Reads lines, prints answers and runs commands."""

    def __init__(self, chat: Chat, out: Console) -> None:
        self.chat, self.out = chat, out
        self.colours: dict[str, str] = {}
        self.is_coloured = True

    def run(self) -> None:
        """Runs until the input ends or /quit."""
        while (line := self._read()) is not None:
            try:
                check_text("this line", line)
                if line.startswith("/"):
                    if not self.run_command(*line[1:].strip().partition(" ")[::2]):
                        return
                elif line:
                    self.show(line)
            except ForerunError as error:
                if isinstance(error, TemplateError) and not self.out.is_terminal:
                    raise  # a script must not go on
                self.out.print(f"error: {error}", style="red", markup=False)

    def show(self, text: str) -> None:
        """Streams one answer, then a line of statistics."""
        answer = self.chat.answer(text)
        try:
            for piece in answer:
                self.out.print(piece.text, end="", style=self._style(piece.origin), markup=False)
            self.out.print(f"\n[dim]{self.chat.stats_text()}[/]")
        except KeyboardInterrupt:
            answer.close()  # type: ignore[attr-defined]
            self.out.print("\n[dim]stopped[/]")

    def run_command(self, command: str, value: str) -> bool:
        """Runs one command; False ends the chat."""
        chat, value = self.chat, value.strip()
        if command in ("quit", "exit", "q"):
            return False
        if command not in (*COMMANDS, "help"):
            near = nearest(command, (*COMMANDS, "help"))
            hint = f"did you mean /{near[0]}?" if near else "/help lists them"
            raise ConfigError(f"there is no command /{command}; {hint}")
        if command == "save" and not value:
            raise ConfigError("/save needs the name of a file, e.g. /save chat.txt")
        if command == "drafter" and value:
            options.check_parts(drafter=value)
            chat.change(with_memory(value))
        elif command in PARTS and value:
            chat.choose(command, value)
        elif command == "temperature" and value:
            chat.sampling = replace(chat.sampling, temperature=_number(value))
        elif command == "system" and value:
            system = "" if value == "-" else value
            chat.check_system(system)
            chat.system, chat.turns = system, []
        elif command == "reset":
            chat.turns = []
        elif command == "colours":
            self.is_coloured = not self.is_coloured
        elif command == "save":
            save(Path(value).expanduser(), chat.text())
        shown = {
            "help": lambda: HELP,
            "stats": chat.stats_text,
            "history": chat.text,
            "system": lambda: chat.system or "there is no system message; /system TEXT sets one",
        }
        self.out.print(shown.get(command, self._settings)(), markup=False)
        return True

    def _settings(self) -> str:
        chat = self.chat
        return (
            f"drafter {chat.drafter}, temperature {chat.sampling.temperature:g}, "
            f"{counted(len(chat.turns) // 2, 'turn')}"
        )

    def _style(self, origin: str) -> str:
        from forerun.engine.token_sources import OWN

        if not self.is_coloured or origin == OWN:
            return ""
        if origin not in self.colours:
            self.colours[origin] = COLOURS[len(self.colours) % len(COLOURS)]
        return self.colours[origin]

    def _read(self) -> str | None:
        try:
            return input("\n> " if self.out.is_terminal else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            return ""


def command(
    model: Annotated[str, typer.Argument(help="Folder, hub id, .gguf file or name.")] = "reasoner",
    system: System = "",
    temperature: Temperature = 0.2,
    max_new_tokens: options.MaxNewTokens = 512,
    drafter: options.DrafterSpec = registry.DEFAULT_DRAFTER,
    verifier: options.VerifierSpec = registry.DEFAULT_VERIFIER,
    controller: options.ControllerSpec = registry.DEFAULT_CONTROLLER,
    target: options.TargetSpec = None,
    constraint: options.ConstraintSpecs = [],  # noqa: B006 - typer makes a new list per call
    seed: options.Seed = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    weights: options.Weights = "auto",
) -> None:
    """Talk to a model; colours mark accepted drafts."""
    sampling = Sampling(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    parts: dict[str, Any] = {"verifier": verifier, "controller": controller}
    parts["constraint"] = tuple(constraint)
    specs = {"drafter": drafter, "target": target, **parts}
    options.check_parts(samplings=(sampling,), **specs)
    _read_as_utf8()
    out = console()
    how = {"dtype": dtype, "device": device, "weights": weights, "target": target}
    check = options.chat_check(model)
    loaded: Any = loading.load(model, batch=2, check=check, **how)  # type: ignore[arg-type]
    chat = Chat(loaded, sampling, with_memory(drafter), system, parts)
    chat.check_template()
    chat.check_system(system)
    loading.warm_up(loaded, drafter=chat.drafter, verifier=verifier)
    if out.is_terminal:
        _remember_lines()
        notice("/help lists commands, /quit leaves; colour marks accepted drafts")
        loading.hint_small(loaded, drafter)
    Terminal(chat, out).run()


def with_memory(drafter: str) -> str:
    """The drafter spec with one memory for all answers of the chat."""
    if not registry.is_option_unset("drafter", drafter, "scope"):
        return drafter
    return f"{drafter}{',' if ':' in drafter else ':'}scope=tenant"


def _read_as_utf8() -> None:
    """Lets bytes that are not UTF-8 pass, so that only their line is refused."""
    if sys.stdin is None:
        raise DataError("standard input is closed; run it at a terminal, or pipe lines in")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"expected a number, got {text!r}; e.g. /temperature 0.7") from None


def save(path: Path, text: str) -> None:
    """Writes the conversation. Raises DataError if the file exists or cannot be written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text + "\n")
    except FileExistsError:
        raise DataError(f"{path} exists; give another file") from None
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}; give another file") from None


def _remember_lines() -> None:
    """Loads and saves the history of input lines."""
    import atexit

    from forerun.utils.paths import cache_folder

    with suppress(ImportError, OSError):
        import readline

        path = cache_folder() / "chat_history"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            readline.read_history_file(path)
        readline.set_history_length(1000)
        atexit.register(readline.write_history_file, path)
