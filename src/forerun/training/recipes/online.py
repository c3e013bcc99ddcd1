"""Online speculative decoding offline: replays traffic and distils the draft along it.

Liu et al., "Online Speculative Decoding", 2024. Requests run one after the other, in the order of
the file. After every `interval` requests of a class, its draft takes one optimizer step on the
positions where the target corrected it, and later requests draft with the new weights. The same
file and seed give the same versions. `forerun serve --learn` does the same while it serves, also
with steps without a draft.
A draft with another tokenizer drafts as `cross_vocab` and learns by OmniDraft's hybrid loss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import forerun
from forerun.api import Model
from forerun.drafters.online import Online
from forerun.errors import ConfigError
from forerun.models.draft_link import companion
from forerun.models.identity import local_folder, model_hash
from forerun.models.paths import located
from forerun.models.tokenizer import Tokenizer
from forerun.registry import ModelName
from forerun.training import plans
from forerun.training.drafts.measure import write_text
from forerun.training.export import save
from forerun.training.online.learner import OnlineLearner, OnlineOptions, draft_module
from forerun.training.online.objectives import AUTO
from forerun.training.online.replay import (
    FORM,
    Labels,
    Replay,
    ReplaySettings,
    Request,
    fitting,
    read_traffic,
)
from forerun.training.online.translated import objective_for
from forerun.training.progress import Watch, silent
from forerun.training.recipes.base import Recipe

RESULTS, CHECKPOINT = "requests.jsonl", "online.pt"


@dataclass(kw_only=True, eq=False)
class OnlineDraft(Recipe):
    """Distils a draft along recorded traffic, from what the target verified.

    A draft with the target's tokenizer learns where the target corrected it (OSD), a draft with
    another tokenizer at all positions (OmniDraft).

    replay: JSON-lines file with "prompt", and optionally "class"; requests in order of time.
    model: target, a folder or name.
    draft: draft model to start from; without it, the one that comes with the model.
    classes: JSON-lines file with "prompt" and "class" for a router, if the traffic has no classes.
    interval: finished requests of a class per update; 0 keeps the draft as it is.
    loss: one of fkl, rkl and mix; auto is fkl, or hybrid for a draft with another tokenizer.
    ngram_weight: weight of the n-gram loss in loss hybrid.
    ngram_by_target: weigh the n-gram loss by the target's probability instead.
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

    may_change: ClassVar[frozenset[str]] = frozenset({"num_requests", "rate"})
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
        "ngram_weight": 0,
    }

    replay: Path | None = None
    model: ModelName = "reasoner"
    draft: ModelName | None = None
    classes: Path | None = None
    interval: int = 8
    loss: str = AUTO
    ngram_weight: float = 0.2
    ngram_by_target: bool = False
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
        checkpoint = out / CHECKPOINT
        is_trained = checkpoint.exists() or (out / RESULTS).exists()
        plans.begin(out, self, is_trained=is_trained, resume=resume)
        model = forerun.load(self.model, max_seqs=1)
        requests = fitting(requests, model)
        drafter = self.drafter(model, requests)
        learner = OnlineLearner(
            draft_module(str(drafter.model)),
            self.options,
            drafter.class_of,
            objective=objective_for(drafter, self.options),
        )
        settings = ReplaySettings(
            self.gamma, self.temperature, self.max_tokens, self.seed, bool(self.interval)
        )
        hashes = model_hash(self.model, model.target), model_hash(str(drafter.model))
        replay = Replay(model, drafter, learner, requests, settings, hashes)
        if checkpoint.exists():
            replay.load(checkpoint)
        replay.run(checkpoint, watch)
        write_rows(out / RESULTS, replay.rows)
        for kind, name in folder_names(sorted(learner.learners)).items():
            module = learner.learners[kind].model
            save(module, out / name, tokenizer=self.tokenizer(model, drafter))
        return report(replay.rows, learner, out)

    def drafter(self, model: Model, requests: Many[Request]) -> Online:
        """The drafter, bound to the model."""
        name = self.draft or default_draft(self.model)
        classes = None if self.classes is None else str(self.classes)
        how: dict[str, Any] = {"tokenizer": model.tokenizer, "target": model.target}
        found = Online(model=name, classes=classes, **how)
        if self.classes is None:
            found.router = Labels(list(dict.fromkeys(request.kind for request in requests)))
        found.bind(model.target)
        return found

    def tokenizer(self, model: Model, drafter: Online) -> Any:
        """The draft's tokenizer, as transformers has it."""
        if not drafter.is_foreign:
            return model.tokenizer.inner
        return Tokenizer.load(located(str(drafter.model))).inner


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes numbered rows as JSON lines. Raises CapacityError if the disk has no room."""
    text = "".join(json.dumps({"number": n, **row}) + "\n" for n, row in enumerate(rows))
    write_text(path, text)


def default_draft(model: str) -> str:
    """The draft that comes with a model. Raises ConfigError if there is none."""
    folder = local_folder(model)
    found = companion(folder) if folder else None
    if found is None:
        raise ConfigError(f"model {model!r} comes with no draft; give one with --draft")
    return str(found)


def folder_names(kinds: Iterable[str]) -> dict[str, str]:
    """The folder of the draft of each class: its name, with a number if another class has it."""
    found = dict[str, str]()
    for kind in kinds:
        name = first = re.sub(r"[^\w-]", "_", kind)  # no dots: no path, and none of our files
        taken = {used.casefold() for used in found.values()}
        numbers = count(2)
        while name.casefold() in taken:
            name = f"{first}-{next(numbers)}"
        found[kind] = name
    return found


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
