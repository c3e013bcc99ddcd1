"""Speed of constrained decoding, and what masks cost.

JSON problems are decoded in four ways, interleaved: each problem in all ways before the next one,
in alternating order, so that a slow moment of the machine meets all. Ratios are of tokens per
second, by problem, with a 95 % interval over problems. Cost of masks: mean time of `allowed` along
texts, as a share of a step of the same run. --model reasoner-0.3b (made by `forerun models`) has
the size, not the texts, of a 0.3B model.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from constraints import tasks
from constraints.common import OnDemand, Row, Setting, fits, prompt_of, table
from forerun.api import Model
from forerun.bench.metrics import speed_of
from forerun.bench.timers import Clock, freeze_old_objects
from forerun.constraints.base import Constraint
from forerun.core.records import Sequence
from forerun.models.tokenizer import Tokenizer

KINDS = ("schemas", "functions", "extraction")
WAYS: dict[str, dict[str, Any]] = {
    "unconstrained, plain": {"drafter": "none"},
    "masked, plain": {"drafter": "none"},
    "masked, auto": {"drafter": "auto"},
    "masked, forced": {"drafter": "forced"},
}
FREE, PLAIN = "unconstrained, plain", "masked, plain"


def run(setting: Setting) -> None:
    """Options that matter: model, problems of each kind, repeats, samples, tokens."""
    store = setting.store("speed", "model", "problems", "repeats", "samples", "tokens")
    needed, keys = OnDemand(setting, setting.model, max_seqs=max(setting.samples, 4)), []
    is_warm = False
    for kind in KINDS:
        for at, problem in enumerate(list(tasks.problems(kind, None))[: setting.problems]):
            for repeat in range(setting.repeats):
                for way in list(WAYS)[:: 1 if (at + repeat) % 2 == 0 else -1]:
                    key = f"{kind}, {problem.name}, {repeat}, {way}"
                    if key in store.rows:
                        continue
                    if needed.model is None:
                        return
                    if not fits(setting, needed.model, problem):
                        break
                    if not is_warm:
                        _warm_up(needed.model, problem, setting)
                        is_warm = True
                    row = _row(needed.model, problem, way, repeat, setting)
                    store.row(key, lambda row=row: row)
                else:
                    keys.append((kind, problem.name, repeat))
    if not keys:
        return
    setting.write("speed", _ratios(store.rows, keys, setting), _masks(store.rows, setting))


def _warm_up(model: Model, problem: tasks.Problem, setting: Setting) -> None:
    for name in WAYS:
        _row(model, problem, name, 0, setting)


class Timed(Constraint):
    """The constraint `inner`; a clock takes the times of what drafting and drawing ask of it."""

    def __init__(self, inner: Constraint, clock: Clock) -> None:
        self.inner, self.clock, self.eos_ids = inner, clock, inner.eos_ids
        self.forced = clock.wrap("forced", inner.forced)  # type: ignore[method-assign]
        self._allowed = clock.wrap("allowed", inner.allowed)
        self._allows = clock.wrap("allows", inner.allows)

    def bind(self, tokenizer: Tokenizer, vocab_size: int) -> Timed:  # type: ignore[override]
        return Timed(self.inner.bind(tokenizer, vocab_size), self.clock)

    def start(self, seq: Sequence) -> Any:
        return self.inner.start(seq)

    def advance(self, state: Any, token: int) -> Any:
        return self.inner.advance(state, token)

    def allowed(self, state: Any) -> np.ndarray:
        return self._allowed(state)

    def allows(self, state: Any, token: int) -> bool:
        return self._allows(state, token)

    def is_complete(self, state: Any) -> bool:
        return self.inner.is_complete(state)

    def begin(self, text: bytes) -> Any:
        return self.inner.begin(text)

    def error(self, state: Any) -> str:
        return self.inner.error(state)


def _row(model: Model, problem: tasks.Problem, way: str, repeat: int, setting: Setting) -> Row:
    clock = Clock()
    constraint = () if way == FREE else Timed(problem.constraint, clock)
    with freeze_old_objects():
        start = time.perf_counter()
        result = model.generate(
            [prompt_of(model, problem)],
            drafter=WAYS[way]["drafter"],
            constraint=constraint,
            n=setting.samples,
            batch=1,
            max_new_tokens=setting.tokens,
            seed=setting.seed + repeat,
        )[0]
        seconds = time.perf_counter() - start
    stats = result.stats
    return {
        "tokens": stats.generated,
        "passes": stats.passes,
        "seconds": seconds,
        "tau": stats.tau,
        "masks": clock.calls["allowed"],
        "mask_seconds": clock.seconds["allowed"],
        "constraint_seconds": sum(clock.seconds.values()),
        "valid": sum(bool(one.valid) for one in result.samples),
        "vocabulary": model.target.vocab_size,
    }


def _ratios(rows: dict[str, Row], keys: list[tuple[str, str, int]], setting: Setting) -> str:
    """Tokens per second over masked, plain decoding, by kind of problem."""
    lines = []
    for kind in (*KINDS, "all"):
        own = [key for key in keys if kind in (key[0], "all")]
        for way in WAYS if own else ():
            by_prompt: dict[tuple[str, int], float] = {}
            for number, name in enumerate(dict.fromkeys(key[:2] for key in own)):
                rates = [_rate(rows, [k for k in own if k[:2] == name], w) for w in (way, PLAIN)]
                by_prompt[name[0], number] = rates[0] / rates[1]
            found = speed_of(by_prompt)
            assert found is not None
            interval = "-" if found.interval is None else "{:.2f} to {:.2f}".format(*found.interval)
            used = [rows[", ".join((*map(str, key), way))] for key in own]
            tau = sum(r["tokens"] for r in used) / sum(r["passes"] for r in used)
            lines.append([kind, way, len(by_prompt), f"{found.ratio:.2f}", interval, tau])
    head = ["problems", "decoding", "number", "over masked, plain", "95 % interval",
            "tokens per pass"]  # fmt: skip
    return f"{setting.model}, {setting.repeats} repeats, in one run\n\n" + table(head, lines)


def _rate(rows: dict[str, Row], keys: list[tuple[str, str, int]], way: str) -> float:
    used = [rows[", ".join((*map(str, key), way))] for key in keys]
    return sum(row["tokens"] for row in used) / sum(row["seconds"] for row in used)


def _masks(rows: dict[str, Row], setting: Setting) -> str:
    lines = []
    for way in WAYS:
        used = [row for key, row in rows.items() if key.endswith(way)]
        masks, seconds = sum(r["masks"] for r in used), sum(r["seconds"] for r in used)
        if not masks:
            continue
        spent = [sum(r[name] for r in used) for name in ("mask_seconds", "constraint_seconds")]
        steps = sum(r["passes"] for r in used)
        worst = float(np.max([r["mask_seconds"] / r["seconds"] for r in used]))
        lines.append(
            [way, used[0]["vocabulary"], masks, 1e6 * spent[0] / masks, 1e3 * seconds / steps,
             f"{100 * spent[0] / seconds:.2f} %", f"{100 * spent[1] / seconds:.2f} %",
             f"{100 * worst:.2f} %"]
        )  # fmt: skip
    head = ["decoding", "vocabulary", "masks", "microseconds of a mask", "ms of a step",
            "masks, share of time", "all of the constraint", "masks, worst text"]  # fmt: skip
    return "Cost of masks\n\n" + table(head, lines)
