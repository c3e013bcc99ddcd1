"""/metrics in Prometheus' format under vLLM's names, so that its dashboards work unchanged.

num_drafts counts draft trees as vLLM counts its chains: one per sequence and step with a draft. The
label `position` starts at 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as Total

from forerun.constraints._request import Report
from forerun.core.records import Step

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
MAX_POSITIONS = 64


class Metrics:
    """Counters of one server. `observe` is a listener of the engine."""

    def __init__(self, model: str, engine: int = 0) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._labels = {"model_name": model, "engine": str(engine)}
        self.drafts = self._total("spec_decode_num_drafts", "Draft trees that were verified")
        self.drafted = self._total("spec_decode_num_draft_tokens", "Draft tokens")
        self.accepted = self._total("spec_decode_num_accepted_tokens", "Accepted draft tokens")
        self._per_pos = Total(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position",
            [*self._labels, "position"],
            registry=self.registry,
        )
        self.prompt_tokens = self._total("prompt_tokens", "Prompt tokens of admitted requests")
        self.generated = self._total("generation_tokens", "Generated tokens")
        self.cache_queries = self._total("prefix_cache_queries", "Prompt tokens looked up")
        self.cache_hits = self._total("prefix_cache_hits", "Prompt tokens found computed")
        self._success = Total(
            "vllm:request_success",
            "Finished samples by reason",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        self.first_token = self._histogram("time_to_first_token_seconds", "To the first text", SLOW)
        self.between = self._histogram("inter_token_latency_seconds", "Time per token after", FAST)
        self.whole = self._histogram("e2e_request_latency_seconds", "From arrival to end", SLOW)
        self._errors = Total(
            "forerun:request_errors",
            "Requests answered with an error, by status",
            [*self._labels, "status"],
            registry=self.registry,
        )
        self.faults = self._total("engine_faults", "Steps that failed", "forerun")
        self.failures = self._total("drafter_failures", "Steps without a failed draft", "forerun")
        self.cancelled = self._total("requests_cancelled", "Clients that went away", "forerun")
        self._constrained = Total(
            "forerun:constrained_samples",
            "Finished samples with a constraint, by whether their text is allowed",
            [*self._labels, "valid"],
            registry=self.registry,
        )
        self.masks = self._total("constraint_masks", "Masks of allowed tokens", "forerun")
        self.tests = self._total("constraint_tests", "Tests of single tokens", "forerun")
        self.compiling = self._total(
            "grammar_compile_seconds", "Time to compile constraints", "forerun"
        )
        for position in range(8):  # dashboards need series that start at 0
            self._position(position)

    def gauge(self, name: str, text: str, value: Callable[[], float], prefix: str = "vllm") -> None:
        """Adds a gauge that calls `value` when it is read."""
        found = Gauge(f"{prefix}:{name}", text, [*self._labels], registry=self.registry)
        found.labels(**self._labels).set_function(value)

    def gauges(
        self,
        name: str,
        text: str,
        label: str,
        values: Mapping[str, Callable[[], float]],
        prefix: str = "vllm",
    ) -> None:
        """Adds a gauge with one more label; each of its values is called when it is read."""
        found = Gauge(f"{prefix}:{name}", text, [*self._labels, label], registry=self.registry)
        for key, value in values.items():
            found.labels(**self._labels, **{label: key}).set_function(value)

    def observe(self, step: Step) -> None:
        """Counts one step of the engine."""
        drafted = accepted = drafts = 0
        depths: Counter[int] = Counter()
        for tree, verdict, emitted in zip(step.trees, step.verdicts, step.emitted, strict=True):
            if len(tree):
                count = min(len(verdict.nodes), len(emitted))
                drafts, drafted, accepted = drafts + 1, drafted + len(tree), accepted + count
                depths.update(range(count))
        self.drafts.inc(drafts)
        self.drafted.inc(drafted)
        self.accepted.inc(accepted)
        self.generated.inc(sum(map(len, step.emitted)))
        for position, count in depths.items():
            self._position(min(position, MAX_POSITIONS)).inc(count)

    def finished(self, reason: str) -> None:
        """Counts a finished sample."""
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def constrained(self, report: Report | None) -> None:
        """Counts a finished sample with a constraint; None: it has none."""
        if report is not None:
            self._constrained.labels(**self._labels, valid=str(report.valid).lower()).inc()
            self.masks.inc(report.num_masks)
            self.tests.inc(report.num_tests)

    def failed(self, status: int) -> None:
        """Counts a request that was answered with an error."""
        self._errors.labels(**self._labels, status=str(status)).inc()

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self.registry)

    def _position(self, position: int) -> Total:
        return self._per_pos.labels(**self._labels, position=str(position))

    def _total(self, name: str, text: str, prefix: str = "vllm") -> Total:
        found = Total(f"{prefix}:{name}", text, [*self._labels], registry=self.registry)
        return found.labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        labels = [*self._labels]
        found = Histogram(f"vllm:{name}", text, labels, buckets=buckets, registry=self.registry)
        return found.labels(**self._labels)
