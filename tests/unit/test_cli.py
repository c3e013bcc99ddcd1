"""The command line as a whole: help, statuses, kernels made ready."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from command import CAT, HEAVY, Call, python

from forerun import registry
from forerun.cli import loading
from forerun.cli import main as cli
from forerun.cli.main import main
from forerun.utils import jit_cache


@pytest.mark.parametrize("words", [["--help"], ["methods"], []])
def test_help_and_methods_import_nothing_heavy(words: list[str]) -> None:
    printed = python(
        "import sys; from forerun.cli.main import main; status = main(sys.argv[1:] or "
        f"{words!r}); print(status, [m for m in {HEAVY!r} if m in sys.modules])"
    )
    assert printed.splitlines()[-1] == "0 []"


def test_help_lists_every_command(call: Call) -> None:
    status, out, _ = call("--help")
    assert status == 0
    for name, text in cli.COMMANDS.items():
        assert (f" {name} " in out and text[:30] in out) == has_methods(name)


def has_methods(command: str) -> bool:
    """Whether there is something to call it for: a kind without methods has no command."""
    kind = cli.OF_KIND.get(command)
    return kind is None or bool(registry.names(kind))


@pytest.mark.parametrize("name", [*filter(has_methods, cli.COMMANDS)])
def test_every_command_has_help(call: Call, name: str) -> None:
    status, out, _ = call(name, "--help")
    assert status == 0 and f"forerun {name}" in out


def test_what_several_commands_ask_for_is_declared_once() -> None:
    """`chat` asks for its temperature itself."""
    declared = Counter(
        ast.unparse(node)
        for file in Path(cli.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Annotated"
        if file.name != "chat.py"
    )
    assert len(declared) > 100
    assert [option for option, times in declared.items() if times > 1] == []


def test_version(call: Call) -> None:
    assert call("--version")[:2] == (0, "forerun 0.1.0\n")


def test_kernels_are_ready_only_if_compiled_from_this_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from numba import njit\n\n@njit(cache=True)\ndef twice(x):\n    return 2 * x\n"
    file = tmp_path / "kernels_of_a_test.py"
    file.write_text(code)
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("kernels_of_a_test")
    (tmp_path / "__pycache__" / "other.nbi").touch()  # of another kernel
    assert not jit_cache.is_ready(module.twice)
    assert module.twice(2) == 4 and jit_cache.is_ready(module.twice)
    fresh = importlib.reload(module).twice
    assert not fresh.signatures and jit_cache.is_ready(fresh)
    file.write_text(code + "# another source\n")
    assert not jit_cache.is_ready(importlib.reload(module).twice)


def test_parts_in_use_are_warmed_up() -> None:
    class Spy:
        warmed = 0

        @property
        def target(self) -> Any:
            return self

        def drafter(self, spec: str) -> Any:
            assert spec == "fuse"
            return self

        def warm_up(self) -> None:
            self.warmed += 1

        def bind(self, target: Any) -> None:
            assert target is self
            self.warmed += 1

    spy = Spy()
    loading.warm_up(spy, drafter="fuse", verifier="recursive")
    assert spy.warmed == 2


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 2, "--batch"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), 2, "out of memory"),
        (MemoryError(), 2, "out of memory"),
        (KeyError("slot"), 70, "internal error, KeyError: 'slot'"),
        (RuntimeError("shapes\ndiffer"), 70, "--debug"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=str,
)
def test_every_failure_is_one_line_and_a_status(
    call: Call, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, said: str
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(loading, "load", lambda *_, **__: fail())
    got, out, err = call("generate", *CAT, "--json")
    lines = [line for line in err.strip().splitlines() if "compil" not in line]  # of a cold cache
    assert (got, out, len(lines)) == (status, "", 1) and said in lines[0]


@pytest.mark.parametrize("words", [["bench"], ["memory"], ["index", "fm"]], ids=" ".join)
def test_a_group_without_a_command_shows_its_help(call: Call, words: list[str]) -> None:
    _, shown, _ = call(*words, "--help")
    assert call(*words) == (2, "", shown)


@pytest.mark.parametrize("words", [["methods"], ["methods", "--json"], ["--help"]], ids=" ".join)
def test_a_reader_that_leaves_is_no_error(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "forerun.cli.main", *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_debug_shows_the_traceback(tiny: Path) -> None:
    with pytest.raises(ValueError, match="top_p"):
        main(["generate", "-m", str(tiny), *CAT, "--top-p", "0", "--debug"])
