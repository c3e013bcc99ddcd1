"""The worker in a Ray actor: a model and its drafter, which run pieces of a batch of prompts.

A plain class without Ray. With a memory file two drafters learn: the main one starts from the file
and drafts, the second one starts empty. Merging the second ones of all actors with the file, once,
gives the memory of a single drafter that observed all texts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from forerun import registry
from forerun.core.dice import Dice
from forerun.core.mixins import Persistent, Priced, Shared, active_drafter, persistent, priced
from forerun.core.records import Plan, Sequence, Snapshot, Step
from forerun.core.roles import Drafter, Shaper, Target, name_of
from forerun.core.sampling import Sampling
from forerun.core.tree import Tree, with_source
from forerun.errors import ConfigError, ForerunError
from forerun.models.remote_code import is_trusted
from forerun.state.array_file import Origin

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.engine.generation import Run, Sample


class Request(NamedTuple):
    """A prompt with its index in the whole batch; the sampling holds the seed."""

    index: int  # type: ignore[assignment]  # of the batch, not tuple.index
    prompt: str | list[int]
    sampling: Sampling


def no_shapers(model: Model) -> Many[Shaper]:
    """The default of `Setup.shapers`."""
    return ()


@dataclass(frozen=True)
class Setup:
    """The picklable settings of an actor's engine."""

    model: str = "reasoner"
    dtype: str = "auto"
    device: str = "auto"
    weights: str = "auto"
    drafter: str = registry.DEFAULT_DRAFTER
    verifier: str = registry.DEFAULT_VERIFIER
    controller: str = registry.DEFAULT_CONTROLLER
    batch: int = 1
    tenant: str = ""
    shapers: Callable[[Model], Many[Shaper]] = no_shapers
    target: str | None = None  # built around the model
    trusts_code: bool = field(default_factory=is_trusted)  # --trust-remote-code
    graphs: bool = True  # CUDA graphs on a GPU


class Worker:
    """One engine. Call `ready` first: it loads the model, so load errors are ordinary results."""

    def __init__(self, setup: Setup, threads: int = 0) -> None:
        self.setup, self.threads = setup, threads
        self.is_stopped = self.has_worked = False

    def ready(self) -> tuple[int, Origin]:
        """Loads, compiles and measures; returns the process id and the origin for memory files."""
        import torch

        import forerun
        from forerun.state.drafter_files import origin_of

        s = self.setup
        if self.threads:
            torch.set_num_threads(self.threads)
        how: dict[str, Any] = {"dtype": s.dtype, "device": s.device, "weights": s.weights}
        how |= {"trust_remote_code": s.trusts_code, "graphs": s.graphs}
        self.model = forerun.load(s.model, max_seqs=s.batch, target=s.target, **how)
        self.main = self.model.drafter(s.drafter)
        self.drafter: str | Drafter = s.drafter  # a name: every piece starts with a new drafter
        self.shapers = s.shapers(self.model)
        self.fresh: Drafter | None = None
        self._run([Request(0, [0], Sampling())])
        return os.getpid(), origin_of(self.model, s.tenant)

    def check(self, requests: Many[Request]) -> None:
        """Validates prompts; raises the engine's error with the index in the whole batch."""
        self._run([one._replace(sampling=replace(one.sampling, n=1)) for one in requests])

    def keep(self, before: Snapshot | None) -> None:
        """Keeps what is learned from now on for `snapshot`; before: the contents of the file."""
        tenant, main = self.setup.tenant, persistent(self.main)
        main.keep(tenant)
        main.kept |= {tenant}
        self.drafter = main
        if before is None:
            return
        main.restore(before, tenant)
        fresh = persistent(registry.make("drafter", self.setup.drafter, **self.model.offers))
        fresh.keep(tenant)
        self.fresh = fresh
        self.drafter = ShadowedDrafter(main, fresh)

    def snapshot(self) -> Snapshot | None:
        """What this worker learned, without the file's contents; None if nothing."""
        try:
            return persistent(self.fresh or self.main).snapshot(self.setup.tenant)
        except ConfigError:
            if self.has_worked:
                raise
            return None

    def work(self, requests: Many[Request]) -> list[tuple[int, list[Sample]]]:
        """Pairs of prompt index and samples; after `stop` only of the finished prompts."""
        run = self._run(requests)
        found: list[list[Sample]] = [[] for _ in requests]
        events = run.events()
        for event in events:
            self.has_worked = True
            if event.sample:
                here = found[event.prompt_index]
                number = requests[event.prompt_index].index
                here.append(replace(event.sample, prompt_index=number))
            if self.is_stopped:
                events.close()  # type: ignore[attr-defined]
                break
        return [
            (one.index, sorted(samples, key=lambda sample: sample.index))
            for one, samples in zip(requests, found, strict=True)
            if len(samples) == one.sampling.n
        ]

    def stop(self) -> None:
        """Stops the current work after its next step."""
        self.is_stopped = True

    def _run(self, requests: Many[Request]) -> Run:
        """A run with the dice of a single run of the whole batch."""
        s = self.setup
        try:
            return self.model.run(
                [one.prompt for one in requests],  # type: ignore[arg-type]
                [one.sampling for one in requests],
                drafter=self.drafter,
                verifier=s.verifier,
                controller=s.controller,
                shapers=self.shapers,
                batch=s.batch,
                tenant=s.tenant,
                numbers=[one.index for one in requests],
            )
        except ForerunError as error:
            raise _renumbered(error, requests) from None


class ShadowedDrafter(Shared, Priced):
    """Drafts with one drafter; a second one of the same kind observes the same steps."""

    def __init__(self, main: Persistent, fresh: Persistent) -> None:
        self.main, self.fresh, self.name = main, fresh, name_of(main)
        self.labels, self.needs, self.parts = main.labels, main.needs, main.parts
        self.num_top_logits, self.learns = main.num_top_logits, priced(main).learns
        self.can_observe_late = main.can_observe_late

    @property
    def kept(self) -> frozenset[str]:
        """Tenants with all steps observed."""
        return self.main.kept

    def bind(self, target: Target) -> None:
        self.main.bind(target)
        self.fresh.bind(target)

    def active_drafter(self, seq: Sequence) -> Drafter:
        return active_drafter(self.main, seq)

    def check_room(self, seqs: int, tokens: int, taken: int = 0) -> int:
        return priced(self.main).check_room(seqs, tokens, taken)

    def draft_seconds(self, nodes: int, num: int = 1) -> float:
        return priced(self.main).draft_seconds(nodes, num)

    def catch_up_seconds(self, seq: Sequence) -> float:
        return priced(self.main).catch_up_seconds(seq)

    def acceptance_prior(self, num: int = 1) -> tuple[float, float]:
        return priced(self.main).acceptance_prior(num)

    def start(self, seq: Sequence) -> None:
        self.main.start(seq)
        self.fresh.start(seq)

    def read(self, seqs: Many[Sequence]) -> None:
        self.main.read(seqs)
        self.fresh.read(seqs)

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice]) -> list[Tree]:
        return [with_source(tree, self.name) for tree in self.main.propose(seqs, plans, dice)]

    def observe(self, step: Step) -> None:
        self.main.observe(step)
        self.fresh.observe(step)

    def finish(self, seq: Sequence) -> None:
        self.main.finish(seq)
        self.fresh.finish(seq)

    def forget(self, group: Hashable) -> None:
        self.main.forget(group)
        self.fresh.forget(group)

    def memory_report(self) -> dict[str, int]:
        parts: dict[str, Any] = {"": self.main, "learned now: ": self.fresh}
        return {
            f"{name}{what}": size
            for name, part in parts.items()
            for what, size in part.memory_report().items()
        }


def _renumbered(error: ForerunError, requests: Many[Request]) -> ForerunError:
    """The error of a prompt, with its index in the whole batch."""
    text = str(error)
    found = re.match(r"prompt (\d+) ", text)
    if not found:
        return error
    number = requests[int(found[1])].index
    return type(error)(f"prompt {number} {text[found.end() :]}")
