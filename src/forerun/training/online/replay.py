"""Replays recorded requests one after the other and trains their drafts between them."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from forerun.api import Model
from forerun.controllers.fixed import Fixed
from forerun.drafters.online import ONE_CLASS, Online
from forerun.errors import ConfigError, DataError
from forerun.training.checkpoints import load_checkpoint, save_state
from forerun.training.drafts.data import fits_context
from forerun.training.online.corrections import RequestStats
from forerun.training.online.learner import OnlineLearner
from forerun.training.online.state import restore, state_of
from forerun.training.progress import Watch, counted, silent
from forerun.utils.files import read_lines
from forerun.utils.signals import delayed_interrupt

log = logging.getLogger("forerun")
CHECKPOINT_MINUTES = 3.0
FORM = 'expected a JSON object per line with "prompt", and optionally "class"'


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


@dataclass(frozen=True)
class ReplaySettings:
    """How requests run: draft length, sampling, and whether the drafts learn."""

    gamma: int = 5
    temperature: float = 1.0
    max_tokens: int = 256
    seed: int = 0
    learns: bool = True


class Replay:
    """Runs the requests one after the other, and updates the drafts between them.

    hashes: of the target and of the first draft; a checkpoint of others is refused.
    """

    def __init__(
        self,
        model: Model,
        drafter: Online,
        learner: OnlineLearner,
        requests: Many[Request],
        settings: ReplaySettings,
        hashes: tuple[str, str] = ("", ""),
    ) -> None:
        self.model, self.drafter, self.learner = model, drafter, learner
        self.requests, self.settings, self.hashes = requests, settings, hashes
        self.rows = list[dict[str, Any]]()  # of the finished requests
        self.num_done = 0
        learner.on_request = self._note

    def run(self, checkpoint: Path, watch: Watch = silent) -> None:
        """Runs the rest of the requests; on Ctrl-C saves, then raises KeyboardInterrupt.

        An interrupt takes effect after the request that runs.
        """
        show, saved = counted(watch, "replay", "requests"), time.monotonic()
        try:
            while self.num_done < len(self.requests):
                with delayed_interrupt():
                    self.step()
                show(self.num_done, len(self.requests))
                if time.monotonic() - saved > 60 * CHECKPOINT_MINUTES:
                    self.save(checkpoint)
                    saved = time.monotonic()
        except KeyboardInterrupt:
            self.save(checkpoint)
            raise
        self.save(checkpoint)

    def step(self) -> None:
        """One request, and the update that is due after it."""
        r, number = self.settings, self.num_done
        request = self.requests[number]
        if isinstance(self.drafter.router, Labels):
            self.drafter.router.current = request.kind
        how: dict[str, Any] = {"drafter": self.drafter, "numbers": [number], "seed": r.seed}
        how |= {"controller": Fixed(nodes=r.gamma, depth=r.gamma), "on_step": self.learner.observe}
        how |= {"temperature": r.temperature, "max_new_tokens": r.max_tokens}
        for _ in self.model.run([self.model.prompt_ids(request.prompt)], **how):
            pass
        kind = self.learner.due() if r.learns else None
        if kind is not None and self.learner.update(kind):
            self._publish(kind)
        self.num_done += 1

    def save(self, path: Path) -> None:
        """Writes the checkpoint; Ctrl-C takes effect after it.

        Raises CapacityError if the disk has no room.
        """
        known = self.drafter.translation.known() if self.drafter.is_foreign else {}
        state = {"num_done": self.num_done, "rows": self.rows, "ngrams": known}
        state |= {"requests": self._hash(self.num_done), "models": self.hashes}
        with delayed_interrupt():
            save_state(path, state | {"learner": state_of(self.learner)})

    def load(self, path: Path) -> None:
        """Continues from a checkpoint. Raises DataError if traffic or models are others now."""
        state = load_checkpoint(path)
        if state["num_done"] > len(self.requests):
            raise DataError(
                f"{path} has learned from {state['num_done']} requests, and there are only "
                f"{len(self.requests)} now; restore the traffic file, or raise "
                f"--num-requests to at least {state['num_done']}"
            )
        if state["requests"] != self._hash(state["num_done"]):
            raise DataError(
                f"the first {state['num_done']} requests of the traffic are not those "
                f"that {path} has learned from; restore the file, or choose another --out"
            )
        if tuple(state["models"]) != self.hashes:
            raise DataError(
                f"the target or the first draft is not the one that {path} was begun with; restore "
                "it, or choose another --out"
            )
        self.num_done, self.rows = state["num_done"], state["rows"]
        restore(self.learner, state["learner"])
        if self.drafter.is_foreign:
            self.drafter.translation.restore(state["ngrams"])
        for kind in self.learner.learners:
            self._publish(kind)

    def _publish(self, kind: str) -> None:
        version = self.learner.version(kind)
        self.drafter.publish(kind, self.learner.learner(kind).state(), version)

    def _note(self, kind: str, stats: RequestStats) -> None:
        found = {"alpha": None if not stats.tried else stats.alpha, "tau": stats.tau}
        version = self.drafter.versions()[kind]  # an update comes after the request
        self.rows.append({"class": kind, "version": version, **found, **asdict(stats)})

    def _hash(self, num: int) -> str:
        text = json.dumps([tuple(request) for request in self.requests[:num]])
        return hashlib.sha256(text.encode()).hexdigest()


def read_traffic(path: Path, num: int) -> list[Request]:
    """Up to `num` requests of a JSON-lines file. Raises DataError, ConfigError if it is empty."""
    try:
        lines = read_lines(path)
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


def fitting(requests: Many[Request], model: Model) -> list[Request]:
    """The requests with a prompt that fits the model's context; a warning counts the others.

    Raises ConfigError if none fits.
    """
    found = [r for r in requests if fits_context(model, r.prompt)]
    if num := len(requests) - len(found):
        log.warning(
            f"{num} of {len(requests)} requests are left out: their prompts do not fit the "
            f"target's context of {model.target.context} tokens"
        )
    if not found:
        raise ConfigError(
            f"no prompt fits the context of {model.target.context} tokens; give shorter ones"
        )
    return found
