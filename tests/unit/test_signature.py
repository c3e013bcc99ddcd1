"""Options of a command from the signature and docstring of a class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.cli import _signature


class Base:
    """A base. size: of the base. kept: from the base."""


class Method(Base):
    """A method with options of all types.

    size: how large it is. rate, decay: two rates. is_fast: whether it hurries; a word: no option.
    layers: which layers. names: texts. path: where to write. rule: a callable.
    """

    spellings = {"size": "-s"}
    readers = {"names": lambda names: tuple(name.upper() for name in names)}

    def __init__(
        self,
        target: Any = None,
        *,
        size: int = 3,
        rate: float = 0.5,
        decay: float | None = None,
        is_fast: bool = False,
        is_safe: bool = True,
        layers: tuple[int, ...] = (1, 2),
        names: tuple[str, ...] = (),
        path: str | Path | None = None,
        rule: Callable[[str], str] | None = None,
        kept: str = "x",
        device: str = "auto",
    ) -> None: ...


class Needy:
    """A method. what: the one thing that it needs."""

    def __init__(self, *, what: int) -> None: ...


def run(cls: type, *words: str, **how: Any) -> dict[str, Any]:
    """The constructor's arguments that a line gives."""
    found: list[dict[str, Any]] = []
    command = _signature.command(
        "method",
        lambda ctx, values: found.append(_signature.given(cls, values)),
        _signature.parameters(cls, **how),
        "Help.",
    )
    with command.make_context("method", list(words)) as context:
        command.invoke(context)
    return found[0]


def test_nothing_is_given_unless_it_differs() -> None:
    assert run(Method) == {}
    assert run(Method, "--size", "3", "--layers", "1", "--layers", "2") == {}


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("--size 4", {"size": 4}),
        ("-s 4", {"size": 4}),
        ("--rate 0.25 --decay 1", {"rate": 0.25, "decay": 1.0}),
        ("--is-fast --no-is-safe", {"is_fast": True, "is_safe": False}),
        ("--layers 5", {"layers": (5,)}),
        ("--names a --names b", {"names": ("A", "B")}),
        ("--path out --rule module:function", {"path": "out", "rule": "module:function"}),
        ("--kept y", {"kept": "y"}),
    ],
)
def test_values_have_the_declared_types(words: str, given: dict[str, Any]) -> None:
    assert run(Method, *words.split()) == given


def test_what_others_declare_is_no_option_twice() -> None:
    for flag in ("--target", "--device", "--size"):
        with pytest.raises(Exception, match="No such option"):
            run(Method, flag, "1", taken=["size"])


def test_a_required_option_must_be_given() -> None:
    assert run(Needy, "--what", "3") == {"what": 3}
    with pytest.raises(Exception, match="Missing.* what"):
        run(Needy)
    with pytest.raises(Exception, match="not a valid int|valid integer"):
        run(Needy, "--what", "many")


def test_help_is_read_from_the_docstrings() -> None:
    found = _signature.descriptions(Method)
    assert found["size"] == "How large it is." and found["kept"] == "From the base."
    assert found["rate"] == found["decay"] == "Two rates."
    assert found["is_fast"] == "Whether it hurries; a word: no option."
    assert "device" not in found
