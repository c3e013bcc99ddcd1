"""Registry of methods by kind and name. A method's module is imported on first use.

`get("drafter", "stand")` imports `forerun.drafters.stand` and returns its one public Drafter. Other
packages register methods by entry points; `KINDS` lists the group of each kind.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from forerun import catalog
from forerun.core.option_text import MAX_NUMBER as MAX_NUMBER
from forerun.core.option_text import comma_hint, typed_value
from forerun.core.option_text import parse as parse
from forerun.core.option_text import piece_type as piece_type
from forerun.core.option_text import type_names as type_names
from forerun.errors import ConfigError, UnknownName

# Annotations of options that refer to something else, as in `index: Corpus | Index | None`.
# Checks before loading read them.
File = str  # a file, read by the constructor
Corpus = str  # text files or an index folder, too large to read twice
TokenId = int  # a token of a text that is indexed in memory
ModelName = str  # a model, as `forerun.load` takes it
DrafterName = str  # a drafter spec
GrowerName = str  # a grower spec
VerifierName = str  # a verifier spec
REFERENCES = re.compile(r"\b(File|Corpus|TokenId|ModelName|DrafterName|GrowerName|VerifierName)\b")

DEFAULT_DRAFTER, DEFAULT_VERIFIER, DEFAULT_CONTROLLER = "auto", "speculative", "budget"
DEFAULTS = {
    "drafter": DEFAULT_DRAFTER,
    "verifier": DEFAULT_VERIFIER,
    "controller": DEFAULT_CONTROLLER,
}
TREE_DRAFTER = "stand"  # drafts wide trees without a choice among drafters
MODEL_OPTIONS = frozenset({"tokenizer", "device", "target"})  # options that the model supplies
NOT_TEXT = frozenset({"tokenizer", "target"})  # options that text cannot express
DEFAULT_BATCH = 16  # sequences


# modules of method folders without a method of their own: base classes, the two ways to sample
# under any constraint, which `Sampling.constraint_sampling` selects, methods of `forerun compress`
NO_METHODS = frozenset({"base", "asap", "awrs", "vocab_trim"})


class Kind(NamedTuple):
    """Package, base class and entry point group of a kind."""

    package: str  # each public module is a method
    role: str  # MODULE:CLASS, the base class or protocol of the methods
    group: str  # entry point group of other packages


_ROLES = "forerun.core.roles"
KINDS = {
    "drafter": Kind("forerun.drafters", f"{_ROLES}:Drafter", "forerun.drafters"),
    "grower": Kind("forerun.growers", "forerun.core.growing:Grower", "forerun.growers"),
    "verifier": Kind("forerun.verifiers", f"{_ROLES}:Verifier", "forerun.verifiers"),
    "controller": Kind("forerun.controllers", f"{_ROLES}:Controller", "forerun.controllers"),
    "constraint": Kind("forerun.constraints", f"{_ROLES}:Shaper", "forerun.constraints"),
    "target": Kind("forerun.targets", f"{_ROLES}:Target", "forerun.targets"),
    "search": Kind("forerun.search", "forerun.search.base:Search", "forerun.searches"),
    "recipe": Kind(
        "forerun.training.recipes", "forerun.training.recipes.base:Recipe", "forerun.recipes"
    ),
    "pruner": Kind("forerun.compression", "forerun.compression.base:Pruner", "forerun.pruners"),
    "task": Kind("forerun.tasks", "forerun.tasks.base:Task", "forerun.tasks"),
}


def names(kind: str) -> list[str]:
    """All registered names of a kind; imports none of them. Raises UnknownName."""
    found = kind_of(kind)
    return sorted({*_own_modules(found.package), *_entry_points(found.group)})


def kind_of(name: str) -> Kind:
    """The kind of a name. Raises UnknownName with the nearest."""
    if name not in KINDS:
        raise UnknownName.of("kind", name, KINDS)
    return KINDS[name]


def is_registered(kind: str, spec: str) -> bool:
    """Whether the method of `spec` is registered, and its grower if it has one."""
    name, given = parse(spec)
    grower, _ = parse(str(given.get("grower", "chain")))
    return name in names(kind) and grower in names("grower")


def get(kind: str, name: str) -> type:
    """The class that implements `name`. Raises UnknownName with its state or near names."""
    found = kind_of(kind)
    if entry := _entry_points(found.group).get(name):
        return _loaded(kind, entry)
    if name not in names(kind):
        raise _not_built(kind, name) or UnknownName.of(
            kind, name, names(kind), f"`forerun methods --kind {kind}` lists all"
        )
    return _class(found.package, name, found.role)


def _loaded(kind: str, entry: EntryPoint) -> Any:
    """The class of an entry point. Raises ConfigError if its package cannot be imported."""
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        package = f" of package {entry.dist.name}" if entry.dist else ""
        raise ConfigError(
            f"{kind} {entry.name!r} cannot be loaded: {error}; repair or uninstall the entry point "
            f"{entry.value}{package}"
        ) from error


def summary(kind: str, name: str) -> str:
    """One line on a method: the first paragraph of its module's docstring, read, not imported."""
    entry = _entry_points(kind_of(kind).group).get(name)
    spec = importlib.util.find_spec(entry.module if entry else f"{KINDS[kind].package}.{name}")
    text = Path(spec.origin).read_text("utf-8") if spec and spec.origin else ""
    doc = ast.get_docstring(ast.parse(text)) or ""
    return " ".join(doc.partition("\n\n")[0].split())


@cache
def _class(package: str, name: str, role: str) -> type:
    """The one public class of a role in a module of this package."""
    module = importlib.import_module(f"{package}.{name}")
    home, _, title = role.partition(":")
    base = getattr(importlib.import_module(home), title)
    found = [
        thing
        for thing in vars(module).values()
        if inspect.isclass(thing)
        and thing.__name__[0] != "_"
        and thing.__module__ == module.__name__
        and issubclass(thing, base)
    ]
    assert len(found) == 1, f"{module.__name__} must define one public {title}, has {found}"
    return found[0]


def _not_built(kind: str, name: str) -> UnknownName | None:
    """The error for a name that the catalog or another kind has; None for other names."""
    if name.lower() in names(kind):
        return None  # "did you mean" says more
    if (kind, name) == ("drafter", "plain"):  # as benchmarks call it
        return UnknownName("unknown drafter 'plain'; plain decoding is drafter 'none'")
    hint = f"{kind}s that work: {', '.join(names(kind)) or 'none yet'}"
    if row := catalog.owner(file_of(kind, name)):
        return UnknownName(
            f"{kind} {name!r} is not built yet: it belongs to {row.title}, which the catalog lists "
            f"as {row.state} (`forerun methods {row.name}`); {hint}"
        )
    if row := catalog.find(name):
        if (
            row.parts
            and "search" not in row.parts
            and all(is_registered(*part) for part in row.parts.items())
        ):
            hint = "use " + " ".join(f"--{part} {spec}" for part, spec in row.parts.items())
        return UnknownName(
            f"{name!r} is not a {kind}; the catalog lists this system as {row.state}: "
            f"{row.title} (`forerun methods {row.name}`); {hint}"
        )
    return None


def file_of(kind: str, name: str) -> str:
    """The file of a method as the catalog lists it, e.g. "drafters/stand". Raises UnknownName."""
    return f"{kind_of(kind).package.removeprefix('forerun.').replace('.', '/')}/{name}"


@cache
def _own_modules(package: str) -> frozenset[str]:
    """Public modules of a package of forerun."""
    found = pkgutil.iter_modules(importlib.import_module(package).__path__)
    return frozenset(one.name for one in found if one.name[0] != "_") - NO_METHODS


@cache
def _entry_points(group: str) -> dict[str, EntryPoint]:
    """Methods of other installed packages."""
    return {entry.name: entry for entry in entry_points(group=group)}


@cache
def options(cls: type) -> Mapping[str, inspect.Parameter]:
    """The options of a method: the named arguments of its constructor."""
    parameters = inspect.signature(cls).parameters.values()
    named = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return MappingProxyType({p.name: p for p in parameters if p.kind in named})


def text_options(cls: type) -> dict[str, inspect.Parameter]:
    """The options of a method that text can express."""
    return {name: p for name, p in options(cls).items() if name not in NOT_TEXT}


def is_option_unset(kind: str, spec: str, option: str) -> bool:
    """Whether a method has this option and its spec does not set it. Raises as `resolve`."""
    cls, given = resolve(kind, spec)
    return option in text_options(cls) and option not in given


def reference_options(cls: type) -> dict[str, str]:
    """Option -> what its text refers to: "File", "ModelName" and so on."""
    found = {name: REFERENCES.search(str(p.annotation)) for name, p in options(cls).items()}
    return {name: match.group() for name, match in found.items() if match}


def make(kind: str, spec: str, /, *args: Any, **extra: Any) -> Any:
    """Builds a method from a spec such as "stand:context=4,entries=10"; `extra` overrides it.

    Methods without one of the MODEL_OPTIONS ignore it. Raises UnknownName, ConfigError.
    """
    cls, given = resolve(kind, spec)
    known = options(cls)
    name, taken = parse(spec)[0], given | {k: v for k, v in extra.items() if k in known}
    _check_options(kind, name, extra.keys() - MODEL_OPTIONS, known)
    check_needed(kind, name, taken, known)
    return cls(*args, **taken)


def resolve(kind: str, spec: str) -> tuple[type, dict[str, Any]]:
    """The class of a spec and its options as values of the declared types.

    Raises UnknownName for a name or an option, ConfigError for a value of the wrong type.
    """
    check_spec(kind, spec)
    name, texts = parse(spec)
    cls = get(kind, name)
    known = text_options(cls)
    _check_options(kind, name, texts, known)
    try:
        return cls, {key: typed_value(text, known[key]) for key, text in texts.items()}
    except ValueError as error:
        raise ConfigError(f"{kind} {name!r}: {error}; see `forerun methods {name}`") from None


def check_spec(kind: str, spec: Any) -> None:
    """Raises ConfigError unless a method is named by a text."""
    if not isinstance(spec, str):
        example = DEFAULTS.get(kind)
        hint = f", such as {example!r}" if example else ""
        raise ConfigError(
            f"{kind} must be a name{hint}, got {spec!r:.60}; `forerun methods` lists all names"
        )


# options of earlier releases, and why they were removed
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
        hint = f"`forerun methods {name}`{comma_hint(name)}"
        raise UnknownName.of(f"option of {kind} {name!r}:", key, known, hint)


def check_needed(
    kind: str, name: str, given: Iterable[str], known: Mapping[str, inspect.Parameter]
) -> None:
    """Raises ConfigError if an option without a default is missing."""
    needed = [o for o, p in known.items() if o not in NOT_TEXT and p.default is p.empty]
    if missing := [option for option in needed if option not in given]:
        written = ",".join(f"{option}=VALUE" for option in needed)
        raise ConfigError(
            f"{kind} {name!r} needs {' and '.join(missing)}; write {name}:{written} "
            f"(`forerun methods {name}`)"
        )


def check_options(kind: str, spec: str, *, is_local: bool = True) -> None:
    """Calls the `check_options` of a method's class, if there is one, before the method is made.

    is_local: the method runs in this process; otherwise options with paths are not checked.
    """
    cls, given = resolve(kind, spec)
    check_needed(kind, parse(spec)[0], given, options(cls))
    check = getattr(cls, "check_options", None)
    if check is not None:
        paths = set() if is_local else reference_options(cls).keys()
        check(**{option: value for option, value in given.items() if option not in paths})
