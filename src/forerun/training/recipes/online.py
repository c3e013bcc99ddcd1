"""Online speculative decoding offline: replays traffic and distils the draft along it.

Liu et al., "Online Speculative Decoding", 2024. Requests run one after the other, in the order of
the file. After every `interval` requests of a class, its draft takes one optimizer step on the
positions where the target corrected it, and later requests draft with the new weights. The same
file and seed give the same versions. `forerun serve --learn` does the same while it serves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

import forerun
from forerun.api import Model
from forerun.controllers.fixed import Fixed
from forerun.drafters.online import ONE_CLASS, Online
from forerun.errors import ConfigError, DataError
from forerun.models.draft_link import companion
from forerun.models.identity import local_folder
from forerun.registry import ModelName
from forerun.training import plans
from forerun.training.corrections import RequestStats
from forerun.training.drafts.data import prompt_ids
from forerun.training.export import save
from forerun.training.online import OnlineLearner, OnlineOptions, draft_module
from forerun.training.progress import Watch, counted, silent
from forerun.training.recipes.base import Recipe
from forerun.utils.files import write_atomically

FORM = 'expected a JSON object per line with "prompt", and optionally "class"'
RESULTS = "requests.jsonl"


class Request(NamedTuple):
    """A request of the traffic."""

    prompt: str
    kind: str


class Labels:
    """A router that takes the class of the running request from the traffic."""

    def __init__(self, classes: list[str]) -> None:
        self.classes, self.current = classes, classes[0]

    def route(self, tokens: Many[int]) -> str:
        """The class of the running request."""
        return self.current


@dataclass(kw_only=True, eq=False)
class OnlineDraft(Recipe):
    """Distils a draft along recorded traffic, from the positions where the target corrected it.

    replay: JSON-lines file with "prompt", and optionally "class"; requests in order of time.
    model: target, a folder or name.
    draft: draft model to start from; without it, the one that comes with the model.
    classes: JSON-lines file with "prompt" and "class" for a router, if the traffic has no classes.
    interval: finished requests of a class per update; 0 keeps the draft as it is.
    loss: fkl, rkl or mix.
    rate: learning rate.
    top_k: target probabilities stored per position; 0 stores all.
    gamma: length of a draft.
    temperature: of the requests.
    max_tokens: maximum length of an answer.
    max_length: positions of a text beyond it are not learned.
    hold_every: every n-th request of a class is held out for the fall-back; 0 is none.
    tolerance: loss of held-out acceptance that brings back the average of earlier weights.
    num_requests: maximum number of requests.
    compat: learn at the positions of the published code, one too late.
    """

    can_resume: ClassVar[bool] = False
    minimums = Recipe.minimums | {
        "interval": 0,
        "top_k": 0,
        "gamma": 1,
        "temperature": 0,
        "max_tokens": 1,
        "max_length": 2,
        "hold_every": 0,
        "tolerance": 0,
        "num_requests": 1,
    }

    replay: Path | None = None
    model: ModelName = "reasoner"
    draft: ModelName | None = None
    classes: Path | None = None
    interval: int = 8
    loss: str = "fkl"
    rate: float = 1e-4
    top_k: int = 64
    gamma: int = 5
    temperature: float = 1.0
    max_tokens: int = 256
    max_length: int = 512
    hold_every: int = 8
    tolerance: float = 0.02
    num_requests: int = 1_000_000
    compat: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replay is None:
            raise ConfigError(f"recipe online needs traffic; give --replay FILE ({FORM})")
        self.options  # noqa: B018  (raises for a value out of range)

    @property
    def options(self) -> OnlineOptions:
        """The learner's options."""
        names = {field.name for field in fields(OnlineOptions)} & vars(self).keys()
        given = {name: getattr(self, name) for name in names}
        return OnlineOptions(**given | {"interval": self.interval or 1})

    def train(self, out: Path, *, resume: bool = False, watch: Watch = silent) -> list[str]:
        assert self.replay is not None
        requests = read_traffic(self.replay, self.num_requests)
        plans.begin(out, self, is_trained=(out / RESULTS).exists(), resume=resume)
        model = forerun.load(self.model, max_seqs=1)
        name = self.draft or default_draft(self.model)
        labels = list(dict.fromkeys(request.kind for request in requests))
        how: dict[str, Any] = {"classes": None if self.classes is None else str(self.classes)}
        drafter = Online(model=name, tokenizer=model.tokenizer, target=model.target, **how)
        if self.classes is None:
            drafter.router = Labels(labels)
        rows = list[dict[str, Any]]()

        def note(kind: str, stats: RequestStats) -> None:
            found = {"alpha": None if not stats.tried else stats.alpha, "tau": stats.tau}
            version = drafter.versions()[kind]  # an update comes after the request
            rows.append({"class": kind, "version": version, **found, **asdict(stats)})

        learner = OnlineLearner(draft_module(name), self.options, drafter.class_of, note)
        self.run(model, drafter, learner, requests, watch)
        text = "".join(json.dumps({"number": n, **row}) + "\n" for n, row in enumerate(rows))
        write_atomically(out / RESULTS, lambda part: Path.write_text(part, text))
        for kind, one in learner.learners.items():
            save(one.model, out / folder_name(kind), tokenizer=model.tokenizer.inner)
        return report(rows, learner, out)

    def run(
        self,
        model: Model,
        drafter: Online,
        learner: OnlineLearner,
        requests: Many[Request],
        watch: Watch = silent,
    ) -> None:
        """Replays the requests; updates the drafts between them."""
        show = counted(watch, "replay", "requests")
        plan = Fixed(nodes=self.gamma, depth=self.gamma)
        sampling = {"temperature": self.temperature, "max_new_tokens": self.max_tokens}
        for number, request in enumerate(requests):
            if isinstance(drafter.router, Labels):
                drafter.router.current = request.kind
            how: dict[str, Any] = {"drafter": drafter, "controller": plan, "numbers": [number]}
            how |= {"on_step": learner.observe, "seed": self.seed, **sampling}
            for _ in model.run([prompt_ids(model, request.prompt)], **how):
                pass
            kind = learner.due() if self.interval else None
            if kind is not None and learner.update(kind):
                drafter.publish(kind, learner.learner(kind).state(), learner.version(kind))
            show(number + 1, len(requests))


def read_traffic(path: Path, num: int) -> list[Request]:
    """Up to `num` requests of a JSON-lines file. Raises DataError, ConfigError if it is empty."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}); {FORM}") from None
    found = list[Request]()
    for number, line in enumerate(lines, 1):
        if not line.strip() or len(found) == num:
            continue
        try:
            row = json.loads(line)
            prompt, kind = row["prompt"], row.get("class", ONE_CLASS)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{path}:{number} is not a request ({error!r}); {FORM}") from None
        if not (isinstance(prompt, str) and prompt and isinstance(kind, str) and kind):
            raise DataError(f"{path}:{number} has an empty prompt or class; {FORM}")
        found.append(Request(prompt, kind))
    if not found:
        raise ConfigError(f"{path} has no request; {FORM}")
    return found


def default_draft(model: str) -> str:
    """The draft that comes with a model. Raises ConfigError if there is none."""
    folder = local_folder(model)
    found = companion(folder) if folder else None
    if found is None:
        raise ConfigError(f"model {model!r} comes with no draft; give one with --draft")
    return str(found)


def folder_name(kind: str) -> str:
    """The folder of a class's draft."""
    return re.sub(r"[^\w.-]", "_", kind)


def report(rows: list[dict[str, Any]], learner: OnlineLearner, out: Path) -> list[str]:
    """One line per class: acceptance in the first and last fifth of its requests."""
    lines = []
    for kind in dict.fromkeys(row["class"] for row in rows):
        alphas = [r["alpha"] for r in rows if r["class"] == kind and r["alpha"] is not None]
        part = max(1, len(alphas) // 5)
        first, last = (float(np.mean(some)) if some else 0.0 for some in _ends(alphas, part))
        one = learner.learners.get(kind)
        fallbacks = one.num_fallbacks if one else 0
        lines.append(
            f"{kind}: {len(alphas)} requests, {learner.version(kind)} updates, {fallbacks} "
            f"fall-backs, acceptance {first:.3f} -> {last:.3f}"
        )
    return [*lines, f"drafts and {RESULTS} -> {out}"]


def _ends(values: list[float], part: int) -> tuple[list[float], list[float]]:
    return values[:part], values[-part:]
