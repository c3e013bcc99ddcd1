"""The Python API: load a model, generate, stream, chat; every result has statistics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun import registry
from forerun.assets import as_problem, is_embedded
from forerun.constraints._model_constraints import ModelConstraints
from forerun.constraints._penalties import Adjust
from forerun.constraints._request import RequestConstraint, check_given, record_allowed_mass
from forerun.constraints.asap import AsapMemory
from forerun.constraints.base import Constraint
from forerun.core.mixins import is_kept
from forerun.core.records import Step
from forerun.core.roles import Controller, Drafter, Shaper, Target, Verifier, name_of
from forerun.core.sampling import Sampling, check_samples
from forerun.engine.drafter_cache import DrafterCache
from forerun.engine.engine import Engine, check_pair
from forerun.engine.generation import Event, Run, record_logprobs
from forerun.engine.requests import (
    Prompts,
    Samplings,
    as_many,
    as_prompts,
    check_batch,
    check_numbers,
    check_overrides,
    check_role,
    check_tenant,
    sampling_per_prompt,
)
from forerun.engine.results import Result as Result
from forerun.engine.results import results_of
from forerun.engine.safe_drafter import SafeDrafter
from forerun.engine.stats import Recorder
from forerun.engine.stopping import Stops
from forerun.errors import ConfigError
from forerun.models.generation_config import warn_of_defaults
from forerun.models.paths import dtype_name, located
from forerun.models.remote_code import trusting
from forerun.models.token_bounds import TokenBounds
from forerun.models.tokenizer import TextStream, Tokenizer
from forerun.utils import jit_cache
from forerun.verifiers.weighted import Weighted

if TYPE_CHECKING:
    from forerun.state.asap_file import AsapFile
    from forerun.state.drafter_files import MemoryFile

log = logging.getLogger("forerun")

Messages = str | list[dict[str, str]]


class Model:
    """A target and its tokenizer, ready to generate. Made by `forerun.load`.

    Thread-safe: concurrent runs alternate step by step.
    """

    def __init__(
        self, target: Target, tokenizer: Tokenizer, name: str = "", device: str = "auto"
    ) -> None:
        self.target, self.tokenizer, self.name, self.device = target, tokenizer, name, device
        self._drafters = DrafterCache()
        self._constraints = ModelConstraints(tokenizer, target.vocab_size)
        self._weights_version = getattr(target, "weights_version", 0)
        self._warned_verifiers: set[str] = set()
        self._has_warned_of_form = False

    def generate(
        self, prompts: Prompts, sampling: Samplings = None, **options: Any
    ) -> list[Result]:
        """One Result per prompt. `options` are those of `run`, or fields of Sampling.

        An exception has the finished samples in its attribute `samples`.
        """
        run = self.run(prompts, sampling, **options)
        check_samples(run.samplings, "iterate over model.run(...), which keeps no samples")
        return results_of(run)

    def chat(self, messages: Messages, sampling: Sampling | None = None, **options: Any) -> Result:
        """The answer to a conversation or one user message. `options` are those of `generate`.

        Raises ModelError if the model has no chat template.
        """
        prompt: Any = [self.chat_prompt(messages)]
        return self.generate(prompt, sampling, **options)[0]

    def chat_prompt(self, messages: Messages) -> str | list[int]:
        """The prompt of a conversation by the model's chat template.

        Embedded models take one problem in their own form. Raises ModelError if the model has no
        chat template.
        """
        if isinstance(messages, str) and is_embedded(self.name):
            return as_problem(messages)
        return self.tokenizer.chat(messages)

    def prompt_ids(self, text: str) -> list[int]:
        """Ids [n] of a user's text, in the chat template if there is one. Raises TemplateError."""
        has_form = self.tokenizer.has_chat_template or is_embedded(self.name)
        made = self.chat_prompt(text) if has_form else text
        return self.tokenizer.encode(made) if isinstance(made, str) else made

    def stream(
        self, prompts: Prompts, sampling: Samplings = None, **options: Any
    ) -> Iterator[Event]:
        """Yields text as it is generated. `options` are those of `generate`, with `batch=1` by
        default: one trajectory after the other. A larger batch gives more tokens per second.
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
        drafter learns from run to run. Seeded prompts use only state learned within their run, so
        equal calls give equal drafts. Exceptions: a drafter object, a drafter with
        `scope=global`, and one that is kept by `memory`.
        constraint: changes the model's distribution; a name ("corpus:index=FILE"), an object, or
        several, applied in order after `shapers`.
        batch: max sequences that run at once; default 16, or fewer if memory is short.
        tenant: owner of the prompts; drafter state is separate for each tenant.
        numbers: indices of the prompts in a larger batch, which select their random streams.
        overrides: fields of Sampling, such as n=16.
        With `constraint_sampling="smc"`, or "smc:n=20" for 20 particles, each sample is drawn from
        particles of its own, which its `constraint.particles` lists.
        """
        check_overrides(overrides, ("drafter", "verifier", "controller", "constraint", "batch"))
        check_batch(batch)
        check_tenant(tenant)
        texts = as_prompts(prompts)
        self._check_form(texts)
        check_given(constraint)
        named = as_many("constraint", constraint, str | Shaper)
        asked = [*as_many("shapers", shapers, Shaper), *map(self.constraint, named)]
        requests = sampling_per_prompt(sampling, len(texts), overrides)
        self._drop_stale_state()
        given = self._constraints.prepare(requests, asked)
        check_numbers(numbers, len(texts))
        if any(one.constraint_method == "smc" for one in given):
            how: dict[str, Any] = {"drafter": drafter, "verifier": verifier}
            how |= {"controller": controller, "constraint": constraint, "shapers": shapers}
            how |= {"batch": batch, "tenant": tenant, "numbers": numbers, "on_step": on_step}
            search: Any = registry.get("search", "particles")
            return search.runs(self, texts, requests, how)
        recorder, chosen = Recorder(), self.drafter(drafter)
        listeners = _listeners(given, on_step, recorder)
        rule = self._rule(verifier, given)
        engine = self._engine(chosen, rule, controller, asked, listeners, batch)
        run = Run(
            self,
            engine,
            recorder,
            texts,
            given,
            numbers=numbers,
            tenant=tenant,
            forget_after_run=isinstance(drafter, str) and not is_kept(chosen, tenant),
        )
        with self.target.lock:
            run.fit(warns=batch is not None)
        return run

    def _drop_stale_state(self) -> None:
        """After a weight update, drops what drafters and ASAp learned from the old weights.

        Drafters of a memory file stay: the user chose what they know.
        """
        version = getattr(self.target, "weights_version", 0)
        if version == self._weights_version:
            return
        self.asap.clear()
        self._drafters.drop_learned()
        self._weights_version = version  # last: until then other threads drop it too

    def _check_form(self, prompts: list[str | list[int]]) -> None:
        """Warns once if a prompt of an embedded model is not in the form of its training data."""
        if self._has_warned_of_form or not is_embedded(self.name):
            return
        if any(isinstance(text, str) and as_problem(text) != text for text in prompts):
            self._has_warned_of_form = True
            log.warning(
                "the embedded model learned word problems in one form and answers other text with "
                "nonsense; use model.chat(text), or load another model"
            )

    def _rule(self, verifier: str | Verifier, given: Many[Sampling]) -> Verifier:
        """The verifier of a name, with AWRS for the requests that ask for it."""
        rule = verifier
        if isinstance(rule, str):
            rule = registry.make("verifier", rule, tokenizer=self.tokenizer)
        check_role("verifier", rule, Verifier)
        if not rule.lossless and name_of(rule) not in self._warned_verifiers:
            self._warned_verifiers.add(name_of(rule))
            log.warning(
                "verifier %s changes the output distribution (docs/laws.md); the default, %s, does "
                "not",
                name_of(rule),
                registry.DEFAULT_VERIFIER,
            )
        is_tested = any(one.constraint_method == "awrs" for one in given)
        if is_tested and not isinstance(rule, Weighted):
            return Weighted(rule=rule)
        return rule

    def _engine(
        self,
        drafter: Drafter,
        rule: Verifier,
        controller: str | Controller,
        shapers: Many[Shaper],
        listeners: Many[Callable[[Step], None]],
        batch: int | None,
    ) -> Engine:
        """An engine of these parts, with compiled kernels; constraints are in the requests."""
        planner = controller
        if isinstance(planner, str):
            planner = registry.make("controller", planner)
        check_role("controller", planner, Controller)
        check_pair(drafter, rule)
        jit_cache.watch(log.warning)  # before the controller compiles kernels to measure them
        with self.target.lock:  # controllers measure passes
            engine = Engine(
                self.target,
                SafeDrafter(drafter),
                rule,
                planner,
                stops=Stops(self.tokenizer.eos_ids, lambda: TextStream(self.tokenizer)),
                shapers=(
                    Adjust(self.tokenizer.eos_ids),
                    *(one for one in shapers if not isinstance(one, Constraint)),
                    RequestConstraint(self.tokenizer),
                ),
                listeners=listeners,
                max_seqs=batch or registry.DEFAULT_BATCH,
            )
            for part in (engine.target, engine.verifier):
                part.warm_up()
            return engine

    def twin(self) -> Model:
        """A second model on the same weights, with its own KV cache."""
        return Model(self.target.twin(), self.tokenizer, self.name, self.device)

    @cached_property
    def token_bounds(self) -> TokenBounds:
        """Lower bounds on the number of tokens of a text."""
        return TokenBounds(self.tokenizer)

    @property
    def offers(self) -> dict[str, Any]:
        """Arguments for the constructors of drafters."""
        return {"tokenizer": self.tokenizer, "device": self.device, "target": self.target}

    def drafter(self, spec: str | Drafter) -> Drafter:
        """The drafter of a name, always the same object for the same string."""
        if isinstance(spec, str):
            return self._drafters.get(spec, self.offers)
        check_role("drafter", spec, Drafter)
        return spec

    def constraint(self, spec: str | Shaper) -> Shaper:
        """The constraint of a name, ready for this model; the same object for the same text."""
        return self._constraints.get(spec)

    @property
    def asap(self) -> AsapMemory:
        """What `constraint_sampling="asap"` learned."""
        return self._constraints.asap

    def memory(
        self,
        path: Path | str,
        *,
        drafter: str | Drafter = registry.DEFAULT_DRAFTER,
        tenant: str = "",
    ) -> MemoryFile:
        """A file of a drafter's state of one tenant: `load`, `save`, or a `with` block for both.

        It applies to runs with the same drafter string. Within the block, or once the file is
        loaded, the drafter also keeps what it learns from seeded runs.
        """
        from forerun.state.drafter_files import MemoryFile, origin_of

        if isinstance(drafter, str):
            self._drafters.pin(drafter)
        return MemoryFile(path, self.drafter(drafter), origin_of(self, tenant), self.target.lock)

    def asap_memory(self, path: Path | str, *, tenant: str = "") -> AsapFile:
        """A file of what `constraint_sampling="asap"` learned for a tenant, for a `with` block.

        The block loads the file if it exists and saves it at the end. Within it seeded runs use
        and extend it too.
        """
        from forerun.state.asap_file import AsapFile
        from forerun.state.drafter_files import origin_of

        return AsapFile(path, self.asap, origin_of(self, tenant), self._constraints.keep_asap)

    def memory_report(self) -> dict[str, int]:
        """Bytes of the target's weights, its cache, and every drafter used.

        Memory shared by several drafters is reported for the first.
        """
        with self.target.lock:
            return dict(self.target.memory_report()) | self._drafters.memory_report()


def _listeners(
    given: Many[Sampling], on_step: Callable[[Step], None] | None, recorder: Recorder
) -> list[Callable[[Step], None]]:
    """The listeners of each step, in order: `on_step` finds what the requests had recorded."""
    found: list[Callable[[Step], None]] = []
    if any(one.allowed_mass for one in given):
        found.append(record_allowed_mass)
    if any(one.logprobs is not None for one in given):
        found.append(record_logprobs)
    return [*found, *([] if on_step is None else [on_step]), recorder]


def load(
    model: Any = "reasoner",
    *,
    dtype: Any = "auto",
    device: str = "auto",
    max_seqs: int = 256,
    context: int | None = None,
    weights: str = "auto",
    target: str | None = None,
    trust_remote_code: bool = False,
    graphs: bool = True,
    check: Callable[[Tokenizer], None] | None = None,
) -> Model:
    """A Model from a folder, a hub id, a GGUF file, or a name that `forerun models` lists.

    "reasoner" ships with forerun; `forerun.pull` fetches the others.

    dtype: auto (the checkpoint's), bf16, fp16, fp32, or a torch dtype. max_seqs: max sequences
    that run at once; KV cells are allocated on demand. context: max tokens of a sequence, at most
    the model's own; a smaller one saves memory.
    weights: "int8" or "int8:128" (a scale per 128 inputs) on a CPU; "int8", "fp8" or "int4" on a
    GPU, by torchao. Quantised weights change the distribution.
    target: a target that wraps the model, such as "entropy_switch:small=draft,threshold=1".
    trust_remote_code: run Python code that comes with the checkpoint. Without it such checkpoints
    are refused.
    graphs: run passes over few rows as CUDA graphs on a GPU; False runs all passes on torch.
    check: called with the tokenizer before the weights are loaded; may raise.
    Sampling defaults in the checkpoint are not used; a warning names them.
    Raises ModelError with the cause.
    """
    from forerun.models.load import choose_device, load_target

    if target is not None:
        registry.check_spec("target", target)
    choose_device(device)  # before anything is fetched
    path = located(model) if isinstance(model, str) else model
    options = {"dtype": dtype, "device": device, "weights": weights, "graphs": graphs}
    with trusting(trust_remote_code):
        tokenizer = Tokenizer.load(path)
        if check is not None:
            check(tokenizer)
        runner: Target = load_target(path, max_seqs=max_seqs, context=context, **options)
    if context is not None and context > runner.context:
        log.warning(
            f"context={context} exceeds the model's maximum of {runner.context}; using that"
        )
    tokenizer.drop_end_ids(runner.vocab_size)
    if target is not None:
        runner = registry.make("target", target, runner, tokenizer=tokenizer, device=device)
    warn_of_defaults(path)
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

    model: as for `load`, or a Model. The last loaded model is kept for the next call. For many
    prompts use `Model.generate`.
    """
    if isinstance(model, Model):
        if (dtype, device) != ("auto", "auto"):
            raise ConfigError(
                f"the model is loaded already, so it cannot take {dtype=}, {device=}; pass them to "
                "forerun.load"
            )
    else:
        model = _kept(model, dtype_name(dtype), device)
    (result,) = model.generate([prompt], sampling, **options)
    return result


@lru_cache(maxsize=1)
def _kept(model: Any, dtype: str, device: str) -> Model:
    return load(model, dtype=dtype, device=device)
