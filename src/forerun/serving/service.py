"""The parts of one server: model, engine thread, request parser, metrics."""

from __future__ import annotations

import gc
import hashlib
import time

from fastapi import Request

from forerun import __version__, registry
from forerun.api import Model
from forerun.constraints._penalties import Adjust
from forerun.constraints._request import RequestConstraint
from forerun.core.records import Step
from forerun.core.roles import Verifier, name_of
from forerun.drafters.online import online_parts
from forerun.engine.engine import Engine
from forerun.engine.generation import record_logprobs
from forerun.engine.stats import Recorder
from forerun.engine.stopping import Stops
from forerun.errors import ConfigError
from forerun.models.tokenizer import TextStream
from forerun.serving.asap_memories import AsapMemories
from forerun.serving.engine_thread import EngineThread
from forerun.serving.jobs import Job
from forerun.serving.lanes import Lanes
from forerun.serving.learning import Learning
from forerun.serving.methods import Constraints, Methods, check_lossless, make_verifier
from forerun.serving.metrics import Metrics
from forerun.serving.request_parser import Intake
from forerun.serving.routing import MethodControllers, MethodDispatcher
from forerun.serving.settings import Settings
from forerun.serving.streams import Responder
from forerun.serving.structured.compiling import Compiler, compiler
from forerun.serving.templates import Messages
from forerun.serving.tenants import Keys
from forerun.serving.text_workers import COMPILE, TextWorkers, Work
from forerun.serving.token_text import TokenText
from forerun.training.online.learner import OnlineOptions

WEIGHTED = "weighted"  # the verifier that draws by AWRS where a request asks for it
PREDICTION_LABELS = frozenset({"point", "swor"})  # a verifier needs these for predicted outputs


class Service:
    """A model, its engine thread, and the path of requests to it.

    Raises ConfigError for incompatible parts.
    """

    def __init__(
        self,
        model: Model,
        settings: Settings,
        keys: Keys | None = None,
        verifier: Verifier | None = None,
    ) -> None:
        self.model, self.settings, self.keys = model, settings, keys or Keys()
        allowed = settings.allow_lossy
        if verifier is None:
            verifier = make_verifier(settings.verifier, allowed, tokenizer=model.tokenizer)
        verifier = check_lossless(verifier, settings.verifier, allowed)
        has_awrs = WEIGHTED in registry.names("verifier")
        if has_awrs and name_of(verifier) != WEIGHTED:
            verifier = registry.make("verifier", WEIGHTED, rule=verifier)
        self.verifier = verifier
        self.methods = Methods(settings.methods, settings.default_method, **model.offers)
        self.learning: Learning | None = None
        tokenizer = model.tokenizer

        def chat_text(template: object, messages: Messages, tools: Messages | None) -> str:
            tokenizer.inner.chat_template = template  # it may have changed since the fork
            return tokenizer.chat_text(messages, tools)

        work: Work = {"encode": tokenizer.encode, "chat_text": chat_text, COMPILE: compiler(model)}
        self.texts = TextWorkers(work, settings.text_timeout)  # forks: before threads are started
        self.lanes = Lanes()
        samplings = ("mask", "asap", "awrs") if has_awrs else ("mask", "asap")
        self.asap = AsapMemories(len(self.keys.names), settings.max_seqs)
        self.constraints = Constraints(model, settings.constraints, samplings)
        self.metrics = Metrics(settings.name, settings.engine)
        self.worker = EngineThread(self._engine, self.metrics, settings.max_waiting)
        can_predict = verifier.judges >= PREDICTION_LABELS
        parts = self.constraints, self.texts
        self.intake = Intake(model, self.methods, settings, can_predict, *parts)
        self._compiler = Compiler(model, self.texts, settings.grammar_timeout)
        self.responder = Responder(self.worker, settings.request_timeout, self.metrics)
        self.token_text = TokenText(model.tokenizer)
        self.fingerprint = self._fingerprint()
        running, waiting = "Running sequences", "Waiting requests"
        self.metrics.gauge("num_requests_running", running, lambda: self.worker.num_running)
        self.metrics.gauge("num_requests_waiting", waiting, lambda: self.worker.num_waiting)
        prompts, size = "Prompts with bounds of ASAp", "Bytes of the bounds of ASAp"
        self.metrics.gauge("asap_prompts", prompts, lambda: self.asap.num_prompts, "forerun")
        self.metrics.gauge("asap_bytes", size, lambda: self.asap.num_bytes, "forerun")
        if settings.learn:
            self.learning = self._new_learning(settings.learn)

    def warm_up(self) -> None:
        """Compiles all kernels."""
        for part in (self.model.target, self.verifier):
            part.warm_up()
        if self.learning is not None:
            self.learning.warm_up()

    def prepare(self, job: Job) -> None:
        """Compiles the constraints of a request. Raises ApiError."""
        start, hard = time.monotonic(), self.constraints.hard(job.constraints)
        own, parts = job.wanted, job.wanted_parts
        law = " ".join(sorted({*job.constraints} - {*self.constraints.hard_names}))
        memory = self.asap.of(job) if job.sampling.constraint_sampling == "asap" else None
        job.sampling = self._compiler.prepare(
            job.sampling, own, parts, hard, job.tenant, memory, law
        )
        self.metrics.compiling.inc(time.monotonic() - start)

    def needs_compiling(self, job: Job) -> bool:
        """Whether `prepare` has anything to do."""
        return job.wanted is not None or bool(self.constraints.hard(job.constraints))

    def _new_learning(self, share: float) -> Learning:
        """The learner of the first method that can learn. Raises ConfigError without one."""
        found = online_parts(self.worker.drafter)
        if not found:
            raise ConfigError(
                "learn needs a draft model that takes new weights; name one with --drafter "
                "online:model=DRAFT"
            )
        settings = self.settings
        interval, rate = settings.learn_interval, settings.learn_rate
        # the controller may not use a weak draft; it has to learn all the same
        options = OnlineOptions(interval=interval, rate=rate, records_undrafted=True)
        return Learning(found[0], share, options, self.metrics, lambda: self.worker.num_running)

    def close(self) -> None:
        """Accepts no more requests; accepted ones continue."""
        self.worker.close()

    def abort(self) -> None:
        """Ends all remaining requests with an error."""
        self.worker.abort()
        if self.learning is not None:
            self.learning.close()
        self.texts.abort()

    def tenant(self, request: Request) -> str:
        """The tenant of a request. Raises ApiError 401."""
        return self.keys.tenant(request.headers.get("authorization"))

    def check_operator(self, request: Request) -> None:
        """Raises ApiError 401 or 403 unless the request may see the counts of all tenants."""
        self.keys.check_operator(request.headers.get("authorization"), self.settings.operators)

    def describe(self) -> dict[str, object]:
        """The drafting methods and limits for clients."""
        return {
            "methods": sorted(self.methods.specs),
            "default": self.methods.default,
            "constraints": sorted(self.constraints.shapers),
            "constraint_sampling": list(self.constraints.samplings),
            "max_nodes": self.settings.max_nodes,
            "verifier": self.settings.verifier,
            "lossless": self.verifier.lossless,
        }

    def _engine(self, recorder: Recorder) -> tuple[Engine, MethodDispatcher, MethodControllers]:
        """A new engine on the target."""
        self.asap.clear()  # a fault may have left it in the middle of a change
        model, dispatcher = self.model, self.methods.dispatcher(self.verifier)
        controllers = MethodControllers(self.settings.controller, dispatcher)
        if self.learning is not None:
            self.learning.attach(dispatcher)
        learns = [self._learn] if self.settings.learn else []
        engine = Engine(
            model.target,
            dispatcher,
            self.verifier,
            controllers,
            stops=Stops(model.tokenizer.eos_ids, lambda: TextStream(model.tokenizer)),
            shapers=(
                Adjust(model.tokenizer.eos_ids),
                *self.constraints.gates(),
                RequestConstraint(model.tokenizer),
            ),
            listeners=[record_logprobs, self.metrics.observe, recorder, *learns],
            max_seqs=self.settings.max_seqs,
        )
        return engine, dispatcher, controllers

    def _learn(self, step: Step) -> None:
        """Listener: what the learner sees of a step."""
        if self.learning is not None:
            self.learning.observe(step)

    def _fingerprint(self) -> str:
        target = self.model.target
        parts = __version__, self.model.name, str(target.context), str(target.vocab_size)
        return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def freeze_garbage() -> None:
    """Excludes all current objects from garbage collection, in a process that only serves.

    A full collection would pause all requests, as it visits every object of all libraries.
    """
    gc.collect()
    gc.freeze()
