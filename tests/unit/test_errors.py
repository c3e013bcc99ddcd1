"""The error tree drawn at the top of errors.py is the tree of classes."""

from __future__ import annotations

import inspect

import pytest

from forerun import errors
from forerun.errors import ConfigError, ForerunError, UnknownName


def drawn() -> dict[str, str]:
    """Class -> parent class, as drawn in the module's docstring."""
    parents: dict[str, str] = {}
    stem: list[str] = []
    for line in errors.__doc__.splitlines():
        bare = line.lstrip("│├└─ ")
        name = bare.split(" ")[0]
        if not (name.isidentifier() and name[0].isupper() and "  " in bare):
            continue
        depth = (len(line) - len(bare)) // 4
        stem[depth:] = [name]
        if depth:
            parents[name] = stem[depth - 1]
    return parents


def classes() -> dict[str, type]:
    return {
        name: thing
        for name, thing in vars(errors).items()
        if inspect.isclass(thing) and issubclass(thing, Exception)
    }


def test_the_drawn_tree_equals_the_classes():
    found = {
        name: next(base.__name__ for base in cls.__bases__ if issubclass(base, ForerunError))
        for name, cls in classes().items()
        if cls is not ForerunError
    }
    assert drawn() == found


def test_the_also_remarks_are_true():
    remarks = [line for line in errors.__doc__.splitlines() if "(also a " in line]
    assert len(remarks) == 2
    for line in remarks:
        name = line.lstrip("│├└─ ").split(" ")[0]
        builtin = line.partition("(also a ")[2].rstrip(")")
        assert issubclass(classes()[name], __builtins__[builtin])


def test_every_error_has_a_docstring():
    assert all(cls.__doc__ for cls in classes().values())


def test_unknown_name_prints_its_sentence_bare():
    error = UnknownName.of("drafter", "stnd", ["stand", "none"], "`forerun methods` lists all")
    assert str(error) == (
        "unknown drafter 'stnd'; did you mean 'stand'? (`forerun methods` lists all)"
    )


@pytest.mark.parametrize(
    ("name", "known", "told"),
    [
        ("nope", ["none", "code"], "did you mean 'none'?"),
        ("sand", ["stand", "fspad", "sam"], "did you mean 'stand'?"),
        ("qwen3", ["Qwen-3", "SmolLM"], "did you mean 'Qwen-3'?"),
        ("nope", ["story", "code"], "known: code, story"),
        ("eagle", ["seal", "pearl"], "known: pearl, seal"),
        ("rai", ["ray", "local"], "did you mean 'ray'?"),
        ("rai", ["rest", "local"], "known: local, rest"),
        ("stnd", ["STAND", "stand", "none"], "did you mean 'STAND' or 'stand'?"),
    ],
)
def test_only_near_names_are_suggested(name: str, known: list[str], told: str) -> None:
    assert str(UnknownName.of("method", name, known)) == f"unknown method {name!r}; {told}"


@pytest.mark.parametrize("caught", [UnknownName, ConfigError, ForerunError, ValueError, KeyError])
def test_unknown_name_can_be_caught_as(caught):
    with pytest.raises(caught):
        raise UnknownName.of("option", "x", ["y"])
