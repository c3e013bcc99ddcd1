"""From a name to the class in the file of that name; nothing is imported before it is asked for.

`get("drafter", "stand")` imports `forerun.drafters.stand` and returns its one public Drafter. Other
packages join through the entry point groups `forerun.drafters`, `forerun.verifiers` and so on.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from forerun import catalog
from forerun.errors import ConfigError, UnknownName

# What the text of an option names where it is no plain value. Annotations say so by these words, as
# in `index: Corpus | Index | None`: who checks options before anything is loaded reads them.
File = str  # a file that is read when the part is made
Corpus = str  # files of text or the folder of an index, too large to be read twice
TokenId = int  # of a text that is indexed in memory
ModelName = str  # a model, as `forerun.load` takes it
DrafterName = str  # another part, with its options
GrowerName = str
NAMED = re.compile(r"\b(File|Corpus|TokenId|ModelName|DrafterName|GrowerName)\b")

DRAFTER, VERIFIER, CONTROLLER = "auto", "speculative", "budget"  # what users get unasked
BRANCHING = "stand"  # one alone, whose trees try most of a pass: where `auto` cannot compare
OFFERED = frozenset({"tokenizer", "device", "target"})  # what a model has for all parts made for it
UNWRITTEN = frozenset({"tokenizer", "target"})  # of that, what no text can stand for
LARGEST = 2**31 - 1  # of the numbers that options take: kernels count in 32 bits
BATCH = 16  # sequences at once: a pass over sixteen rows costs half more than one over one
KINDS = {
    "drafter": ("forerun.drafters", "Drafter"),
    "grower": ("forerun.growers", "Grower"),
    "verifier": ("forerun.verifiers", "Verifier"),
    "controller": ("forerun.controllers", "Controller"),
    "target": ("forerun.targets", "Target"),
    "recipe": ("forerun.training.recipes", "Recipe"),
}


def names(kind: str) -> list[str]:
    """All registered names of a kind, without importing any of them."""
    package = KINDS[kind][0]
    return sorted({*_own(package), *_foreign(package)})


def is_registered(kind: str, spec: str) -> bool:
    """Whether the part that `spec` names is there, and its grower if it names one."""
    name, given = parse(spec)
    grower, _ = parse(str(given.get("grower", "chain")))
    return name in names(kind) and grower in names("grower")


def get(kind: str, name: str) -> type:
    """The class that implements `name`. Raises UnknownName: its state, or the nearest names."""
    package, role = KINDS[kind]
    if entry := _foreign(package).get(name):
        return entry.load()
    if name not in names(kind):
        raise _not_built(kind, name) or UnknownName.of(
            kind, name, names(kind), "`forerun methods` lists all"
        )
    return _class(package, name, role)


@cache
def _class(package: str, name: str, role: str) -> type:
    """The one public class of that role in a module of ours."""
    module = importlib.import_module(f"{package}.{name}")
    base = _role(package, role)
    found = [
        thing
        for thing in vars(module).values()
        if inspect.isclass(thing)
        and issubclass(thing, base)
        and thing.__module__ == module.__name__
    ]
    assert len(found) == 1, f"{module.__name__} must define one public {role}, has {found}"
    return found[0]


def _role(package: str, role: str) -> type:
    """The class of a role: of `core.roles`, or of the package's own `base`."""
    roles = importlib.import_module("forerun.core.roles")
    return getattr(roles, role, None) or getattr(importlib.import_module(f"{package}.base"), role)


def _not_built(kind: str, name: str) -> UnknownName | None:
    """The error for a name that is known elsewhere, and not of this kind; None for any other."""
    if name.lower() in names(kind):
        return None  # "did you mean" says more
    if (kind, name) == ("drafter", "plain"):  # as benchmarks call it
        return UnknownName("unknown drafter 'plain'; plain decoding is drafter 'none'")
    hint = f"{kind}s that work: {', '.join(names(kind))}"
    if row := catalog.owner(f"{kind}s/{name}"):
        return UnknownName(
            f"{kind} {name!r} is not built yet: the catalog lists {row.title} as {row.state} "
            f"(`forerun methods {row.name}`); {hint}"
        )
    if row := catalog.find(name):
        if row.parts and all(is_registered(*part) for part in row.parts.items()):
            hint = "use " + " ".join(f"--{part} {spec}" for part, spec in row.parts.items())
        return UnknownName(
            f"{name!r} is no {kind}, but a system that the catalog lists as {row.state}: "
            f"{row.title} (`forerun methods {row.name}`); {hint}"
        )
    return None


@cache
def _own(package: str) -> frozenset[str]:
    """Modules of a package of ours; read once, for every run asks and folders are slow to walk."""
    found = pkgutil.iter_modules(importlib.import_module(package).__path__)
    return frozenset(one.name for one in found if one.name[0] != "_") - {"base"}


@cache
def _foreign(group: str) -> dict[str, EntryPoint]:
    """Parts that other installed packages offer; read once, it takes milliseconds."""
    return {entry.name: entry for entry in entry_points(group=group)}


@cache
def options(cls: type) -> Mapping[str, inspect.Parameter]:
    """The options of a part: the keyword arguments of its constructor."""
    parameters = inspect.signature(cls).parameters.values()
    kept = {p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    return MappingProxyType(kept)


def written(cls: type) -> dict[str, inspect.Parameter]:
    """The options of a part that a text may give."""
    return {name: p for name, p in options(cls).items() if name not in UNWRITTEN}


def leaves_open(kind: str, spec: str, option: str) -> bool:
    """Whether a part has this option and its text says nothing of it. Raises as `resolve` does."""
    cls, given = resolve(kind, spec)
    return option in written(cls) and option not in given


def named(cls: type) -> dict[str, str]:
    """The options of a part whose text names something else, and what: "File", "ModelName", ..."""
    found = {name: NAMED.search(str(p.annotation)) for name, p in options(cls).items()}
    return {name: match.group() for name, match in found.items() if match}


def make(kind: str, spec: str, /, *args: Any, **extra: Any) -> Any:
    """Builds a part from text such as "stand:context=4,entries=10"; `extra` options win.

    Those that are OFFERED reach the parts that take them. Raises UnknownName, ConfigError.
    """
    cls, given = resolve(kind, spec)
    known = options(cls)
    name, taken = parse(spec)[0], given | {k: v for k, v in extra.items() if k in known}
    _check_options(kind, name, extra.keys() - OFFERED, known)
    check_needed(kind, name, taken, known)
    return cls(*args, **taken)


def resolve(kind: str, spec: str) -> tuple[type, dict[str, Any]]:
    """The class that a text names, and its options as values of the types it declares.

    Raises UnknownName for a name or an option, ConfigError for a value of the wrong type.
    """
    name, texts = parse(spec)
    cls = get(kind, name)
    known = written(cls)
    _check_options(kind, name, texts, known)
    try:
        return cls, {key: _typed(text, known[key]) for key, text in texts.items()}
    except ValueError as error:
        raise ConfigError(f"{kind} {name!r}: {error}; see `forerun methods {name}`") from None


# options of earlier releases, and why they went
REMOVED = {
    ("drafter", "stand", "refit"): "measuring did not pay",
    ("drafter", "stand", "update_from"): "learning from the whole tree did not pay",
}


def _check_options(kind: str, name: str, given: Iterable[str], known: Iterable[str]) -> None:
    for key in sorted(set(given) - set(known)):
        if (kind, name, key) in REMOVED:
            raise ConfigError(
                f"{name}: option {key} was removed in this release: "
                f"{REMOVED[kind, name, key]}; leave it out"
            )
        raise UnknownName.of(f"option of {kind} {name!r}:", key, known, f"`forerun methods {name}`")


def check_needed(
    kind: str, name: str, given: Iterable[str], known: Mapping[str, inspect.Parameter]
) -> None:
    """Raises ConfigError where an option without a default is not given."""
    for option, parameter in known.items():
        if parameter.default is parameter.empty and option not in given:
            raise ConfigError(
                f"{kind} {name!r} needs {option}; write {name}:{option}=VALUE "
                f"(`forerun methods {name}`)"
            )


def parse(spec: str) -> tuple[str, dict[str, str]]:
    """Splits "name:key=value,key=value" into the name and the texts of its options.

    Raises ConfigError for a piece without a value and for a key that comes twice.
    """
    name, _, rest = spec.strip().partition(":")
    given: dict[str, str] = {}
    for piece in filter(None, rest.split(",")):
        key, equals, value = piece.partition("=")
        key, value = key.strip(), value.strip()
        if not equals or not value:
            joined = ", or join the values of a list by +, as in 4+3+2" if given else ""
            raise ConfigError(f"option {key!r} of {name!r} has no value; write {key}=VALUE{joined}")
        key = key.replace("-", "_")
        if key in given:
            raise ConfigError(
                f"option {key!r} of {name!r} is given twice, as {given[key]} and as {value}; "
                "write it once"
            )
        given[key] = value
    return name.strip().replace("-", "_"), given


WORDS = {"true": True, "false": False}


def _typed(text: str, parameter: inspect.Parameter) -> Any:
    """The value of a text. Raises ValueError for another type, and numbers beyond LARGEST."""
    value = _value(text, parameter)
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, int | float) and not abs(number) <= LARGEST:  # nan is in no range
            raise ValueError(
                f"option {parameter.name} takes numbers from -{LARGEST} to {LARGEST}, got {text!r}"
            )
    return value


def _value(text: str, parameter: inspect.Parameter) -> Any:
    """The text as one of the types that the parameter is annotated with; a tuple is a+b+c."""
    kinds = [kind.strip() for kind in str(parameter.annotation).split("|")]
    if "None" in kinds and text.lower() == "none":
        return None
    if "bool" in kinds and text.lower() in WORDS:
        return WORDS[text.lower()]
    for kind, convert in (("int", int), ("float", float)):
        if kind in kinds:
            with suppress(ValueError):
                return convert(text)
    inner = next((kind for kind in kinds if kind.startswith("tuple")), None)
    if inner:
        with suppress(ValueError):
            is_whole = "int" in inner or "TokenId" in inner
            return tuple(int(piece) if is_whole else piece for piece in text.split("+"))
    plain = {"bool", "int", "float", "None"}
    if not inner and not plain.issuperset(kinds):
        return text
    raise ValueError(f"option {parameter.name} takes {_in_words(kinds)}, got {text!r}")


def _in_words(kinds: list[str]) -> str:
    """What may be written for a parameter of these types."""
    words = {"bool": "true or false", "int": "a whole number", "float": "a number", "None": "none"}
    found = [text for kind, text in words.items() if kind in kinds]
    if any(kind.startswith("tuple") for kind in kinds):
        found.append("whole numbers joined by + (4+3+2)")
    return " or ".join(found)
