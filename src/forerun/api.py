"""What a Python user touches: load a model, generate, stream; statistics on every result."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from numbers import Integral
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from forerun import registry
from forerun.assets import as_problem, is_embedded
from forerun.core.logits import Adjust
from forerun.core.records import Step
from forerun.core.roles import Controller, Drafter, Shaper, Target, Verifier, name_of
from forerun.core.sampling import Sampling
from forerun.engine.engine import Engine, check_pair
from forerun.engine.generation import Event, Run, Sample, record_logprobs
from forerun.engine.safe_drafter import SafeDrafter
from forerun.engine.stats import Recorder, Stats
from forerun.engine.stopping import Stops
from forerun.errors import ConfigError, DataError, UnknownName
from forerun.models.generation_config import tell_defaults
from forerun.models.paths import dtype_name, located
from forerun.models.token_bounds import Sizes
from forerun.models.tokenizer import TextStream, Tokenizer
from forerun.utils import jit_cache

if TYPE_CHECKING:
    from forerun.state.drafter_files import Kept

log = logging.getLogger("forerun")

Prompts = str | Many[str] | Many[Many[int]]
Messages = str | list[dict[str, str]]
Samplings = Sampling | Many[Sampling] | None


@dataclass(frozen=True)
class Result:
    """All samples of one prompt, and their statistics added up."""

    prompt: str | list[int]
    samples: list[Sample]
    seed: int
    stats: Stats = field(default_factory=Stats)

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.samples[0].text


class Model:
    """A target and its tokenizer, ready to generate. Made by `forerun.load`.

    Threads may share it: their runs take turns, step by step, and do not become faster by it.
    """

    def __init__(
        self, target: Target, tokenizer: Tokenizer, name: str = "", device: str = "auto"
    ) -> None:
        self.target, self.tokenizer, self.name, self.device = target, tokenizer, name, device
        self._drafters: dict[str, Drafter] = {}
        self._constraints: dict[str, Shaper] = {}
        self._making = Lock()  # of drafters: each is made once
        self._told: set[str] = set()  # verifiers that were warned of
        self._knows_form = False  # whether the user was warned of a prompt in another form

    def generate(
        self, prompts: Prompts, sampling: Samplings = None, **options: Any
    ) -> list[Result]:
        """One Result per prompt. `options` are those of `run`, or fields of Sampling.

        What ends a run early carries the finished samples in its attribute `samples`.
        """
        run = self.run(prompts, sampling, **options)
        samples: list[Sample] = []
        try:
            for sample in run:
                samples.append(sample)
        except BaseException as error:
            error.samples = samples  # type: ignore[attr-defined]
            raise
        results = []
        for i, prompt in enumerate(run.prompts):
            own = sorted((s for s in samples if s.prompt_index == i), key=lambda s: s.index)
            total = Stats()
            for sample in own:
                total.add(sample.stats)
            results.append(Result(prompt, own, run.seed, total))
        return results

    def chat(self, messages: Messages, sampling: Sampling | None = None, **options: Any) -> Result:
        """The answers to a conversation, or to one user message. `options` are those of `generate`.

        Raises ModelError if the model has no chat template.
        """
        prompt: Any = [self.chat_prompt(messages)]
        return self.generate(prompt, sampling, **options)[0]

    def chat_prompt(self, messages: Messages) -> str | list[int]:
        """A conversation as the model is shown it, for `generate`, `stream` and `run`.

        Made by the model's chat template; the embedded models take one problem in their own form.
        Raises ModelError if the model has no chat template.
        """
        if isinstance(messages, str) and is_embedded(self.name):
            return as_problem(messages)
        return self.tokenizer.chat(messages)

    def stream(
        self, prompts: Prompts, sampling: Samplings = None, **options: Any
    ) -> Iterator[Event]:
        """Text as it becomes certain. `options` are those of `generate`, but `batch` is 1 unless
        told: one trajectory after the other, where several at once make more tokens a second.
        """
        return self.run(prompts, sampling, **{"batch": 1} | options).events()

    def run(
        self,
        prompts: Prompts,
        sampling: Samplings = None,
        *,
        drafter: str | Drafter = registry.DEFAULT_DRAFTER,
        verifier: str | Verifier = registry.DEFAULT_VERIFIER,
        controller: str | Controller = registry.DEFAULT_CONTROLLER,
        constraint: str | Shaper | Many[str | Shaper] = (),
        shapers: Many[Shaper] = (),
        batch: int | None = None,
        tenant: str = "",
        numbers: Many[int] | None = None,
        on_step: Callable[[Step], None] | None = None,
        **overrides: Any,
    ) -> Run:
        """Prepares a run: iterate over it for samples in the order in which they finish.

        sampling: one for all prompts, or one for each.
        drafter, verifier, controller: a name with options ("stand:context=4"), or an object. A
        drafter learns from run to run. Prompts with a seed learn within their run only, if the
        drafter is given by a name that was not given to `memory` (and does not say
        `scope=global`): the same call then drafts the same again.
        constraint: what changes the model's distribution, likewise by name ("corpus:index=FILE")
        or as an object; or several, which apply in their order, after those of `shapers`.
        batch: most sequences that run at once; unless told 16, or fewer where there is no room. A
        pass over several costs little more than over one, but drafts learn less from each other.
        tenant: whose prompts these are, for memories that are kept apart by tenant.
        numbers: those of the prompts in a larger batch, whose randomness they then have.
        overrides: fields of Sampling, such as n=16.
        """
        unknown = [name for name in overrides if name not in Sampling.__dataclass_fields__]
        if unknown:
            own = {"drafter", "verifier", "controller", "constraint", "batch"}
            known = {*Sampling.__dataclass_fields__, *own}
            raise UnknownName.of("option", unknown[0], known)
        if batch is not None and not (_is_whole(batch) and batch >= 1):
            raise ConfigError(
                f"batch must be at least 1, a whole number, got {batch!r}; 1 runs one at a time"
            )
        if not isinstance(tenant, str):
            raise ConfigError(f"tenant must be a string, got {tenant!r}; '' is for one alone")
        texts = _as_list(prompts)
        self._check_form(texts)
        given = as_samplings(sampling)
        given = given * len(texts) if len(given) == 1 else given
        if len(given) != len(texts):
            raise ConfigError(
                f"expected one sampling setting for all prompts, or one for each; prompts: "
                f"{len(texts)}, settings: {len(given)}"
            )
        if numbers is not None and len(numbers) != len(texts):
            raise ConfigError(
                f"expected a number for each prompt or none; prompts: {len(texts)}, numbers: "
                f"{len(numbers)}"
            )
        if numbers is not None and not all(_is_whole(n) and n >= 0 for n in numbers):
            raise ConfigError(f"numbers of prompts are whole and at least 0, got {numbers!r}")
        given = [replace(s, **overrides) for s in given]
        recorder = Recorder()
        heard: list[Callable[[Step], None]] = []
        if any(s.logprobs is not None for s in given):
            heard.append(record_logprobs)
        heard += [on_step, recorder] if on_step else [recorder]
        chosen = self.drafter(drafter)
        single = isinstance(constraint, str | Shaper)
        named = [constraint] if single else constraint  # type: ignore[list-item]
        shapers = [*shapers, *map(self.constraint, named)]  # type: ignore[arg-type]
        engine = self._engine(chosen, verifier, controller, shapers, heard, batch)
        is_lent = isinstance(drafter, str) and tenant not in getattr(chosen, "kept", ())
        how: dict[str, Any] = {"numbers": numbers, "tenant": tenant, "is_lent": is_lent}
        run = Run(self, engine, recorder, texts, given, **how)
        with self.target.turns:
            run.fit(warns=batch is not None)
        return run

    def _check_form(self, prompts: list[str | list[int]]) -> None:
        """Warns once if an embedded model is shown a text that is not in its form."""
        if self._knows_form or not is_embedded(self.name):
            return
        if any(isinstance(text, str) and as_problem(text) != text for text in prompts):
            self._knows_form = True
            log.warning(
                "the embedded model learned word problems in one form and answers other text with "
                "nonsense; use model.chat(text), or load another model"
            )

    def _engine(
        self,
        drafter: Drafter,
        verifier: str | Verifier,
        controller: str | Controller,
        shapers: Many[Shaper],
        listeners: Many[Callable[[Step], None]],
        batch: int | None,
    ) -> Engine:
        """An engine of these parts, compiled."""
        rule, planner = verifier, controller
        if isinstance(rule, str):
            rule = registry.make("verifier", rule, tokenizer=self.tokenizer)
        if isinstance(planner, str):
            planner = registry.make("controller", planner)
        _check_role("verifier", rule, Verifier)
        _check_role("controller", planner, Controller)
        check_pair(drafter, rule)
        if not rule.lossless and name_of(rule) not in self._told:
            self._told.add(name_of(rule))
            log.warning(
                "verifier %s changes what the model says (docs/laws.md); the default, %s, does not",
                name_of(rule),
                registry.DEFAULT_VERIFIER,
            )
        jit_cache.watch(log.warning)  # what the controller measures may be the first to compile
        with self.target.turns:  # controllers measure passes
            engine = Engine(
                self.target,
                SafeDrafter(drafter),
                rule,
                planner,
                stops=Stops(self.tokenizer.eos_ids, lambda: TextStream(self.tokenizer)),
                shapers=(Adjust(self.tokenizer.eos_ids), *shapers),
                listeners=listeners,
                max_seqs=batch or registry.DEFAULT_BATCH,
            )
            for part in (engine.target, engine.verifier):
                part.warm_up()
            return engine

    def twin(self) -> Model:
        """The same weights with a cache of its own: what runs on one is not found by the other."""
        return Model(self.target.twin(), self.tokenizer, self.name, self.device)

    @cached_property
    def sizes(self) -> Sizes:
        """How many tokens a text has at least."""
        return Sizes(self.tokenizer)

    @property
    def offers(self) -> dict[str, Any]:
        """What it has for the drafters that are made for it."""
        return {"tokenizer": self.tokenizer, "device": self.device, "target": self.target}

    def drafter(self, spec: str | Drafter) -> Drafter:
        """The drafter of a name; the same object for the same text: global memories last."""
        if not isinstance(spec, str):
            _check_role("drafter", spec, Drafter)
            return spec
        if spec not in self._drafters:  # who is made already waits for nobody
            with self._making:
                if spec not in self._drafters:
                    self._drafters[spec] = registry.make("drafter", spec, **self.offers)
        return self._drafters[spec]

    def constraint(self, spec: str | Shaper) -> Shaper:
        """The constraint of a name; the same object for the same text: files are read once."""
        if not isinstance(spec, str):
            _check_role("constraint", spec, Shaper)
            return spec
        with self._making:
            if spec not in self._constraints:
                made = registry.make("constraint", spec, tokenizer=self.tokenizer)
                self._constraints[spec] = made
            return self._constraints[spec]

    def memory(
        self,
        path: Path | str,
        *,
        drafter: str | Drafter = registry.DEFAULT_DRAFTER,
        tenant: str = "",
    ) -> Kept:
        """What a drafter learns of a tenant, kept in a file: `load`, `save`, or both around `with`.

        The drafter is that of runs which name it by the same text. Within the `with`, or once the
        file is loaded, it learns from those with a seed, too.
        """
        from forerun.state.drafter_files import Kept, origin_of

        return Kept(path, self.drafter(drafter), origin_of(self, tenant), self.target.turns)

    def memory_report(self) -> dict[str, int]:
        """Bytes held by the target's weights, its cache, and every drafter that was used.

        What several drafters hold together stands at the first of them.
        """
        with self.target.turns:
            report = dict(getattr(self.target, "memory_report", dict)())
            held = {spec: part.memory_report() for spec, part in list(self._drafters.items())}
        seen: set[Hashable] = set()
        for spec, sizes in held.items():
            for part, size in sizes.items():
                key = getattr(size, "key", (spec, part))
                if key not in seen:
                    report[f"{spec}: {part}"] = size
                seen.add(key)
        return report


def _check_role(kind: str, part: Any, role: type) -> None:
    """Raises ConfigError for what is no part of a kind."""
    if not isinstance(part, role):
        hint = '; drafter="none" decodes without drafts' if kind == "drafter" else ""
        raise ConfigError(
            f"expected the name of a {kind} or a {role.__name__} object, got {part!r}{hint}"
        )


def _is_whole(number: object) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool)


def _as_list(prompts: Prompts) -> list[str | list[int]]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | Mapping):
        raise DataError(
            f"expected a prompt or a list of them, got {prompts!r}; such as '...', "
            "['...', '...'] or [[5, 6, 7]]"
        )
    found = [_as_prompt(i, prompt) for i, prompt in enumerate(prompts)]
    if not found:
        raise DataError("there is no prompt; give at least one")
    return found


def _as_prompt(i: int, prompt: Any) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    try:
        if isinstance(prompt, bytes):
            raise TypeError
        return [operator.index(token) for token in prompt]  # NumPy's integers too
    except TypeError:
        raise DataError(
            f"prompt {i} is {prompt!r}; expected a text or a list of token ids. Model.generate "
            "takes a list of those, such as ['...', '...'] or [[5, 6, 7]]"
        ) from None


def as_samplings(sampling: Samplings) -> list[Sampling]:
    """A list of what was given; the default if that was nothing. Raises ConfigError."""
    if sampling is None:
        return [Sampling()]
    given = list(sampling) if isinstance(sampling, Iterable) else [sampling]
    if not all(isinstance(one, Sampling) for one in given):
        raise ConfigError(
            f"expected a Sampling, or a list with one for each prompt, got {sampling!r}; several "
            "prompts go into one list, options by their names, such as temperature=0.6"
        )
    return given


def load(
    model: Any = "reasoner",
    *,
    dtype: Any = "auto",
    device: str = "auto",
    max_seqs: int = 256,
    context: int | None = None,
    weights: str = "auto",
    target: str | None = None,
) -> Model:
    """A Model from a folder, a hub id, a GGUF file, or a name that `forerun models` lists.

    "reasoner" ships with forerun; `forerun.pull` fetches the others.

    dtype: auto (the checkpoint's), bf16, fp16, fp32, or torch's own. max_seqs: most sequences that
    may run at once; their cells are allocated as they come. context: shorter than the model's own,
    to save memory; a longer one is not had, with a warning.
    weights: "int8" or "int8:128" (a scale per 128 inputs) on a CPU; "int8", "fp8" or "int4" on a
    GPU, by torchao. Quantised weights change the distribution.
    target: a target built around the model, such as "entropy_switch:small=draft,threshold=1".
    What the checkpoint says of sampling is told in a warning, and not obeyed.
    Raises ModelError with the cause.
    """
    from forerun.models.load import load_target

    path = located(model) if isinstance(model, str) else model
    tokenizer = Tokenizer.load(path)
    options = {"dtype": dtype, "device": device, "weights": weights}
    runner: Target = load_target(path, max_seqs=max_seqs, context=context, **options)
    if context is not None and context > runner.context:
        log.warning(
            f"context={context} exceeds the model's maximum of {runner.context}; using that"
        )
    if target is not None:
        runner = registry.make("target", target, runner, tokenizer=tokenizer, device=device)
    tell_defaults(path)
    return Model(runner, tokenizer, str(model), device)


def generate(
    prompt: str | Many[int],
    sampling: Sampling | None = None,
    *,
    model: Any = "reasoner",
    dtype: Any = "auto",
    device: str = "auto",
    **options: Any,
) -> Result:
    """Samples of one prompt (a text or token ids) in one call; `options` are those of `Model.run`.

    model: what `load` takes, or a Model. The last model that was loaded here is kept for the next
    call; for many prompts use `Model.generate`.
    """
    if isinstance(model, Model):
        if (dtype, device) != ("auto", "auto"):
            raise ConfigError(
                f"dtype and device are of a model that is to be loaded, and this one is: got "
                f"{dtype=}, {device=}; give them to forerun.load"
            )
    else:
        model = _kept(model, dtype_name(dtype), device)
    (result,) = model.generate([prompt], sampling, **options)
    return result


@lru_cache(maxsize=1)
def _kept(model: Any, dtype: str, device: str) -> Model:
    return load(model, dtype=dtype, device=device)
