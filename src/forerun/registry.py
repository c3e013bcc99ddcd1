"""From a name to the class in the file of that name; nothing is imported before it is asked for.

`get("drafter", "stand")` imports `forerun.drafters.stand` and returns its one public Drafter. Other
packages join through the entry point groups `forerun.drafters`, `forerun.verifiers` and so on.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from importlib.metadata import entry_points
from typing import Any

from forerun.errors import ConfigError, UnknownName

KINDS = {
    "drafter": ("forerun.drafters", "Drafter"),
    "grower": ("forerun.growers", "Grower"),
    "verifier": ("forerun.verifiers", "Verifier"),
    "controller": ("forerun.controllers", "Controller"),
}


def names(kind: str) -> list[str]:
    """All registered names of a kind, without importing any of them."""
    package = importlib.import_module(KINDS[kind][0])
    own = [m.name for m in pkgutil.iter_modules(package.__path__) if m.name != "base"]
    return sorted({*own, *(e.name for e in entry_points(group=KINDS[kind][0]))})


def get(kind: str, name: str) -> type:
    """The class that implements `name`. Raises UnknownName with the nearest names."""
    package, role = KINDS[kind]
    for entry in entry_points(group=package, name=name):
        return entry.load()
    if name not in names(kind):
        raise UnknownName.of(kind, name, names(kind), "`forerun methods` lists all")
    module = importlib.import_module(f"{package}.{name}")
    base = getattr(importlib.import_module("forerun.roles"), role)
    found = [
        thing
        for thing in vars(module).values()
        if inspect.isclass(thing)
        and issubclass(thing, base)
        and thing.__module__ == module.__name__
    ]
    assert len(found) == 1, f"{module.__name__} must define one public {role}, has {found}"
    return found[0]


def options(cls: type) -> dict[str, inspect.Parameter]:
    """The options of a part: the keyword arguments of its constructor."""
    parameters = inspect.signature(cls).parameters.values()
    return {p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def make(kind: str, spec: str, /, *args: Any, **extra: Any) -> Any:
    """Builds a part from text such as "stand:context=4,entries=10"; `extra` options win."""
    name, given = parse(spec)
    cls = get(kind, name)
    known = options(cls)
    for key in given:
        if key not in known:
            raise UnknownName.of(
                f"option of {kind} {name!r}:", key, known, f"`forerun methods {name}`"
            )
    return cls(*args, **{**given, **{k: v for k, v in extra.items() if k in known}})


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """Splits "name:key=value,key=value" into the name and typed options."""
    name, _, rest = spec.strip().partition(":")
    given: dict[str, Any] = {}
    for piece in filter(None, rest.split(",")):
        key, equals, value = piece.partition("=")
        if not equals:
            raise ConfigError(f"option {piece!r} of {name!r} has no value; write {piece}=VALUE")
        given[key.strip().replace("-", "_")] = _typed(value.strip())
    return name.strip().replace("-", "_"), given


def _typed(text: str) -> Any:
    """int, float, bool, None, a tuple written 4+3+2, or the text itself."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    if "+" in text.strip("+"):
        return tuple(_typed(t) for t in text.split("+"))
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text
