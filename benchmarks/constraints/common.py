"""What the parts share: rows that outlive an interruption, tables, models, ways of sampling."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts import Row as Row
from scripts import Store as Store
from scripts import table as table

import forerun
from constraints.tasks import Problem
from forerun import registry
from forerun.api import Model
from forerun.core.sampling import Sampling
from forerun.engine.generation import Sample


@dataclass
class Setting:
    """What a part is run with. data: the folder of real data, or None. out: where results go."""

    out: Path
    data: Path | None
    models: Path
    problems: int
    samples: int
    repeats: int
    tokens: int
    seed: int
    peers: Path
    python: Path | None
    model: str
    notes: list[str] = field(default_factory=list)

    def store(self, part: str, *names: str) -> Store:
        """The rows of a part, which depend on these options and the seed."""
        chosen = {name: getattr(self, name) for name in (*names, "seed")}
        return Store(self.out / f"{part}.json", chosen)

    def skip(self, what: str, why: str) -> None:
        """One line on something that is not measured here."""
        line = f"skipped: {what}: {why}"
        if line not in self.notes:
            self.notes.append(line)
            print(line, file=sys.stderr)

    def write(self, part: str, *blocks: str) -> None:
        """Prints tables and writes them, with the notes, as `<part>.md`."""
        text = "\n\n".join([*blocks, *self.notes]) + "\n"
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / f"{part}.md").write_text(text)
        print(text, end="")


def loaded(setting: Setting, name: str, **options: Any) -> Model | None:
    """A model by name or as a folder below `models`; None, with a note, if it is missing."""
    folder = setting.models / name
    try:
        return forerun.load(str(folder) if folder.exists() else name, **options)
    except forerun.ForerunError as error:
        setting.skip(name, str(error).splitlines()[0])
        return None


class OnDemand:
    """A model that is loaded when a row needs it."""

    def __init__(self, setting: Setting, name: str, **options: Any) -> None:
        self.name = name
        self._load = lambda: loaded(setting, name, **options)

    @cached_property
    def model(self) -> Model | None:
        return self._load()


def refusal(how: str) -> str:
    """Why a way of sampling under a constraint is not available; "" if it is.

    how: "mask", "asap", "awrs", or "smc N" for N particles.
    """
    needed = {"awrs": "forerun.constraints.awrs", "smc": "forerun.search.particles"}
    module = needed.get(how.split()[0])
    return f"this version has no {module}" if module and find_spec(module) is None else ""


def generated(
    model: Model, prompt: str | list[int], how: str, n: int, **options: Any
) -> list[Sample]:
    """n samples of a prompt. options: of Sampling, with its constraint and a seed."""
    name, _, count = how.partition(" ")
    if name != "smc":
        batch = 1 if name == "asap" else 16  # ASAp learns from text to text
        given = Sampling(constraint_sampling=name, n=n, **options)
        return model.generate([prompt], given, batch=batch)[0].samples
    with particle_session(model, prompt, int(count), **options) as (search, session):
        return list(search.samples(session, n))


@contextmanager
def particle_session(
    model: Model, prompt: str | list[int], count: int, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """The search `particles` with `count` particles, and its session on a prompt."""
    search = registry.get("search", "particles")(n=count)
    with search.session(model, prompt, sampling=Sampling(**options)) as session:
        yield search, session


def prompt_of(model: Model, problem: Problem) -> str | list[int]:
    """The prompt of a problem: in the model's chat template if it has one."""
    if problem.is_raw:
        return problem.prompt
    if model.tokenizer.has_chat_template:
        return model.chat_prompt(problem.prompt)
    return problem.prompt + "\n"


def fits(setting: Setting, model: Model, problem: Problem) -> bool:
    """Whether a problem with its answer fits into the context of a model; a note if not."""
    prompt = prompt_of(model, problem)
    num = len(model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    if num + setting.tokens <= model.target.context:
        return True
    setting.skip(
        f"{problem.kind}, {problem.name}",
        f"{num} tokens and an answer of {setting.tokens} exceed the context of "
        f"{model.target.context}",
    )
    return False


def log_likelihood(sample: Sample) -> float:
    """Log-probability of a sample under the unconstrained model; needs `logprobs=0`."""
    assert sample.logprobs is not None
    pairs = zip(sample.tokens, sample.logprobs, strict=False)
    return sum(logprobs[token] for token, logprobs in pairs)
