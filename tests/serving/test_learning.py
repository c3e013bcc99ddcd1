"""`forerun serve --learn`: versions rise while requests run; an operator ends it in one call."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

import httpx
import numpy as np
from tiny import make_tiny

import forerun
from fakes import sequence
from forerun.cli.main import main
from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Rows, Sequence, Step, Verdict
from forerun.core.tree import chain
from forerun.drafters.online import ONE_CLASS, Online
from forerun.errors import ConfigError
from forerun.serving.learning import RECORDING_PART, WARN_AFTER_REQUESTS, Learning, TimeShare
from forerun.serving.metrics import Metrics
from forerun.serving.service import Service
from forerun.serving.settings import Settings
from forerun.serving.tenants import Keys
from forerun.training.online.learner import OnlineOptions
from served import Served, thread, wait_until

ASK: dict[str, Any] = {"model": "tiny", "prompt": "the cat", "max_tokens": 24}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random target, and as its draft another one."""
    folder = tmp_path_factory.mktemp("learning")
    return make_tiny(folder / "target", seed=1), make_tiny(folder / "draft", seed=2)


def settings(draft: Path, **more: Any) -> dict[str, Any]:
    return {
        "methods": {"online": f"online:model={draft}"},
        "default_method": "online",
        "controller": "fixed:nodes=4,depth=4",
        "learn": 1.0,
        "learn_interval": 2,
        "max_seqs": 4,
        **more,
    }


@pytest.fixture
def served(models: tuple[Path, Path]) -> Iterator[Served]:
    with thread(forerun.load(models[0], max_seqs=4), **settings(models[1])) as found:
        yield found


def ask(served: Served, **more: Any) -> str:
    reply = served.post("/v1/completions", json=ASK | more)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


def version(served: Served) -> float:
    return served.metric("forerun:draft_version")


def ask_until(served: Served, least: float) -> None:
    """Sends requests until new ones get a version."""

    def holds() -> bool:
        ask(served)
        return version(served) >= least

    wait_until(holds)


def test_versions_rise_and_a_seed_gives_the_same_text(served: Served) -> None:
    first, greedy = ask(served, seed=7), ask(served, temperature=0)
    ask_until(served, 3)
    assert ask(served, seed=7) == first, "seeded requests draft from the initial weights"
    assert ask(served, temperature=0) == greedy
    found = served.get("/learning").json()
    assert found["enabled"] and found["error"] is None and found["seconds"] > 0
    assert found["classes"]["all"]["version"] >= 3
    assert served.metric("forerun:learner_seconds") > 0
    assert served.metric("forerun:learner_enabled") == 1


def test_one_call_switches_it_off_and_on_again(served: Served) -> None:
    ask_until(served, 1)
    reply = served.post("/learning", json={"enabled": False})
    assert reply.status_code == 200 and reply.json()["enabled"] is False
    learning = served.server.service.learning
    wait_until(lambda: not learning._unpublished)
    before = version(served)
    updates = learning.learner.version("all")
    for _ in range(6):
        ask(served)
    assert learning.learner.version("all") <= updates + 1  # one may have been at work
    assert served.metric("forerun:learner_enabled") == 0
    served.post("/learning", json={"enabled": True, "share": 0.5})
    ask_until(served, before + 1)
    assert served.get("/learning").json()["share"] == 0.5


def test_a_reset_returns_to_the_initial_draft(served: Served) -> None:
    ask_until(served, 2)
    learning = served.server.service.learning
    served.post("/learning", json={"enabled": False, "reset": True})
    wait_until(lambda: not learning._wants_reset and not learning._unpublished)
    first = learning.learner.first
    assert all((first[n] == p).all() for n, p in learning.learner.learner("all").copied().items())
    assert version(served) == learning.learner.version("all")
    updates = served.get("/learning").json()["classes"]["all"]["updates"]
    assert updates == learning.learner.version("all") - 1  # a reset is a version, no update


def test_a_reset_is_pending_until_new_requests_get_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_until(served, 1)
    assert served.get("/learning").json()["reset_pending"] is False
    served.post("/learning", json={"enabled": False})
    learning = served.server.service.learning
    wait_until(lambda: not learning._unpublished)
    before = version(served)
    with monkeypatch.context() as patch:
        patch.setattr(learning.drafter, "_free_copy", lambda kind: None)  # requests use all copies
        reply = served.post("/learning", json={"reset": True}).json()
        assert reply["reset_pending"] is True and version(served) == before
        wait_until(lambda: not learning._wants_reset)
        assert served.get("/learning").json()["reset_pending"] is True, "not published yet"
    wait_until(lambda: not served.get("/learning").json()["reset_pending"])
    assert before < version(served) == learning.learner.version("all")


def test_a_reset_after_an_error_is_refused(served: Served) -> None:
    learning = served.server.service.learning
    learning._fail(RuntimeError("no such weights"))
    learning.close()
    reply = served.post("/learning", json={"reset": True})
    said = "learning has stopped (RuntimeError: no such weights); restart the server to reset it"
    assert reply.status_code == 400 and reply.json()["error"]["message"] == said
    assert served.get("/learning").json()["reset_pending"] is False


@pytest.mark.parametrize("tokenizer", ["own", "other"])
def test_it_learns_although_the_controller_drafts_nothing(
    models: tuple[Path, Path], tmp_path: Path, tokenizer: str
) -> None:
    """As when drafts do not pay: the target's distributions at plain steps are recorded."""
    draft = models[1] if tokenizer == "own" else make_tiny(tmp_path / "foreign", vocab=262, seed=2)
    model = forerun.load(models[0], max_seqs=4)
    with thread(model, **settings(draft, controller="fixed:nodes=0")) as served:
        ask_until(served, 2)
        assert served.metric("vllm:spec_decode_num_drafts_total") == 0
        found = served.get("/learning").json()
        assert found["requests_seen"] >= found["requests_recorded"] >= 4
        assert found["error"] is None
        seen = served.metric("forerun:learner_requests_seen")
        assert seen >= served.metric("forerun:learner_requests_recorded") >= 4


def test_a_learner_without_anything_to_learn_warns_once(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "forerun.serving"):
        for seed in range(WARN_AFTER_REQUESTS - 1):
            ask(served, seed=seed)
        assert not caplog.records
        for seed in range(WARN_AFTER_REQUESTS):
            ask(served, seed=seed)
    assert [r.getMessage() for r in caplog.records] == [
        "learning has recorded nothing yet: 0 of 8 finished requests; send requests without a seed "
        "to the method that learns, with prompts of at most 128 tokens (drafts that are always "
        "accepted give nothing to record)"
    ]
    found = served.get("/learning").json()
    assert (found["requests_seen"], found["requests_recorded"]) == (2 * WARN_AFTER_REQUESTS - 1, 0)
    assert served.metric("forerun:learner_requests_seen") == 2 * WARN_AFTER_REQUESTS - 1
    assert served.metric("forerun:learner_requests_recorded") == 0


def test_a_learner_that_learns_does_not_warn(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "forerun.serving"):
        for _ in range(WARN_AFTER_REQUESTS + 1):
            ask(served)
    assert not caplog.records


def test_a_refused_method_is_told_the_routes_that_are_served(served: Served) -> None:
    reply = httpx.delete(f"{served.url}/learning")
    assert reply.status_code == 405 and reply.headers["allow"] == "GET, HEAD, POST"
    assert reply.json()["error"]["message"] == (
        "DELETE /learning is not allowed; known: GET /, GET /health, GET /learning, GET /metrics, "
        "GET /openapi.json, GET /v1/models, GET /v1/models/{name}, POST /learning, "
        "POST /v1/chat/completions, POST /v1/completions"
    )


def test_a_failing_learner_only_stops_learning(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learning = served.server.service.learning

    def broken(kind: str) -> Iterator[None]:
        raise RuntimeError("no such weights")
        yield

    monkeypatch.setattr(learning.learner, "slices", broken)
    with caplog.at_level(logging.ERROR, "forerun.serving"):
        for _ in range(4):
            ask(served)
        wait_until(lambda: bool(learning.error))
        for _ in range(4):
            ask(served)
    said = [r.getMessage() for r in caplog.records if "learning has stopped" in r.getMessage()]
    assert said == ["learning has stopped (RuntimeError: no such weights); requests go on"]
    assert served.metric("forerun:learner_failed") == 1
    assert served.metric("forerun:learner_enabled") == 0 and version(served) == 0
    assert served.get("/learning").json()["error"] == "RuntimeError: no such weights"


def test_a_failing_listener_only_stops_learning(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    learning = served.server.service.learning

    def broken(step: object, record: bool) -> None:
        raise RuntimeError("bad step")

    monkeypatch.setattr(learning.learner, "observe", broken)
    assert ask(served, temperature=0) == ask(served, temperature=0)
    assert served.metric("forerun:learner_failed") == 1


def test_only_operators_may_change_it(models: tuple[Path, Path]) -> None:
    model = forerun.load(models[0], max_seqs=4)
    keys, own = Keys.read(["a:ka", "b:kb"]), {"operators": ("a",)}
    with thread(model, keys, **settings(models[1], **own)) as served:
        for key, status in (("ka", 200), ("kb", 403), ("no", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            reply = httpx.post(f"{served.url}/learning", json={"enabled": False}, headers=headers)
            assert reply.status_code == status
        bad = {"json": {"share": 2}, "headers": {"Authorization": "Bearer ka"}}
        assert httpx.post(f"{served.url}/learning", **bad).status_code == 400  # type: ignore[arg-type]


def test_work_never_exceeds_its_share_by_more_than_a_slice() -> None:
    """In every interval, against a recount of the busy time."""
    time, now, busy = TimeShare(0.25, 0.0), 0.0, list[tuple[float, float]]()
    for n in range(200):
        slice_seconds = 0.01 + 0.04 * (n % 7)
        now += time.wait(now)
        busy.append((now, now + slice_seconds))
        now += slice_seconds
        time.spend(slice_seconds, now)
        now += 0.5 * (n % 11 == 0)  # idle: nothing may be saved up
    longest = max(b - a for a, b in busy)
    for i in range(len(busy)):
        for j in range(i, len(busy)):
            spent = sum(b - a for a, b in busy[i : j + 1])
            assert spent <= 0.25 * (busy[j][1] - busy[i][0]) + longest + 1e-9


SHARE, STEP, ROW, SLICE, PUBLICATION = 0.25, 0.2, 0.04, 0.3, 0.5  # a share, and seconds


class Clock:
    """Time that passes in work and in waits only; meanwhile an engine makes a step every STEP."""

    def __init__(self) -> None:
        self.now, self.next_step, self.step = 0.0, STEP, lambda: None
        self.pauses = list[float]()
        self.slices, self.recordings = list[tuple[float, float]](), list[tuple[float, float]]()

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        end = self.now + max(seconds, 1e-6)
        while self.next_step <= end:
            self.now, self.next_step = max(self.now, self.next_step), math.inf
            self.step()
            self.next_step = self.now + STEP
        self.now = max(self.now, end)

    # in place of the learner's condition

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def notify(self) -> None: ...

    def wait(self, timeout: float | None = None) -> None:
        self.pauses += [] if timeout is None else [timeout]
        self.advance(timeout or STEP)


class Uniform(dict):
    """`step.laws[i]` of a root with one drafted token."""

    def __init__(self, vocab: int) -> None:
        super().__init__({-1: np.full(vocab, 1 / vocab)})
        self.rows = Rows(np.zeros((2, vocab), np.float32))


def corrected(seqs: list[Sequence], laws: list[Uniform]) -> Step:
    """A step that corrects the draft of every sequence."""
    trees, starts = [chain([5]) for _ in seqs], [len(seq.tokens) for seq in seqs]
    for seq in seqs:
        seq.tokens.append(9)
        seq.finish = "length" if seq.num_left == 0 else None
    verdicts, emitted = [Verdict([], 9) for _ in seqs], [[9] for _ in seqs]
    plans = [Plan(1) for _ in seqs]
    return Step(seqs, plans, trees, laws, verdicts, emitted, starts=starts)  # type: ignore[arg-type]


def driven(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, num_running: int
) -> tuple[Clock, Learning]:
    """The learner after 400 s of a made clock: real updates and publications of made duration."""
    clock = Clock()
    monkeypatch.setattr("forerun.serving.learning.monotonic", clock)
    model = forerun.load(models[0])
    drafter = Online(model=str(models[1]), tokenizer=model.tokenizer, target=model.target)
    drafter.bind(model.target)
    monkeypatch.setattr(drafter, "class_of", lambda seq: ONE_CLASS)
    options, metrics = OnlineOptions(interval=2), Metrics("tiny")
    learning = Learning(drafter, SHARE, options, metrics, lambda: num_running)
    monkeypatch.setattr(learning, "_wake", clock)

    def lasting(work: Callable[..., Any], seconds: float, *given: Any) -> Any:
        """A slice."""
        start, found = clock.now, work(*given)
        clock.advance(seconds)
        clock.slices.append((start, clock.now))
        return found

    def slices(kind: str, slices: Any = learning.learner.slices) -> Iterator[None]:
        parts = slices(kind)
        while lasting(next, SLICE, parts, parts) is not parts:
            yield

    def stored(*row: Any, stored: Any = learning.learner.listen.stored) -> Any:
        clock.advance(ROW)
        return stored(*row)

    monkeypatch.setattr(learning.learner, "slices", slices)
    monkeypatch.setattr(learning.learner.listen, "stored", stored)
    publish = partial(lasting, drafter.publish, PUBLICATION)
    monkeypatch.setattr(drafter, "publish", publish)

    laws = [Uniform(model.target.vocab_size) for _ in range(4)]
    seqs = [sequence(range(3, 9), 70 + 10 * i, SeededDice(i)) for i in range(4)]

    def step() -> None:
        start = clock.now
        learning.observe(corrected(seqs, laws))
        if clock.now > start:
            clock.recordings.append((start, clock.now))
        for i, seq in enumerate(seqs):
            if seq.finish is not None:
                seqs[i] = sequence(range(3, 9), 100, SeededDice(i))
        if clock.now > 400:
            learning.close()

    clock.step = step
    learning._run()
    assert not learning.error
    return clock, learning


def excess(work: list[tuple[float, float]], share: float) -> float:
    """Seconds of work beyond the share, in the interval in which they are most."""
    starts, ends = np.array(sorted(work)).T
    found = 0.0
    for start in starts:
        for end in ends[ends > start]:
            spent = (ends - starts)[(starts >= start) & (ends <= end)].sum()
            found = max(found, spent - share * (end - start))
    return found


def longest(work: list[tuple[float, float]]) -> float:
    """Seconds of the longest piece of work."""
    return max((end - start for start, end in work), default=0.0)


def test_the_learner_keeps_to_its_share_while_requests_run(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every interval, with updates, publications and recording that would take more."""
    clock, learning = driven(models, monkeypatch, 4)
    work = clock.slices + clock.recordings
    slack = longest(clock.slices) + longest(clock.recordings)
    assert excess(work, SHARE) <= slack + 1e-6
    part = SHARE * RECORDING_PART
    assert excess(clock.recordings, part) <= longest(clock.recordings) + 1e-6
    assert learning.seconds == pytest.approx(sum(end - start for start, end in work))
    for own in (clock.slices, clock.recordings):  # neither starves the other
        assert sum(end - start for start, end in own) > 0.15 * SHARE * clock.now
    assert learning.drafter.versions()[ONE_CLASS] >= 4


def test_the_learner_never_pauses_while_no_request_runs(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, learning = driven(models, monkeypatch, 0)
    assert learning.drafter.versions()[ONE_CLASS] >= 4 and not clock.pauses


def test_what_cannot_learn_is_refused(
    models: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="learn must be a share of time from 0 to 1, got 1.5"):
        Settings(learn=1.5)
    with pytest.raises(ConfigError, match="name one with --drafter online:model=DRAFT"):
        Service(forerun.load(models[0]), Settings(learn=0.5))
    assert main(["serve", str(models[0]), "--learn", "0.5"]) == 2
    assert "comes with none; name one with --drafter online:model=DRAFT" in capsys.readouterr().err
    assert main(["serve", "--learn", "0.5", "--replicas", "2"]) == 2
    assert "--learn works with one engine" in capsys.readouterr().err


def test_a_draft_with_another_tokenizer_learns_too(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    """Drafts of cross_vocab, trained by the hybrid loss; greedy texts stay those of the target."""
    foreign = make_tiny(tmp_path / "foreign", vocab=262, seed=2)
    model = forerun.load(models[0], max_seqs=4)
    how = {"drafter": "none", "temperature": 0, "max_new_tokens": ASK["max_tokens"]}
    expected = model.generate([ASK["prompt"]], **how)[0].text
    with thread(model, **settings(foreign)) as served:
        assert ask(served, temperature=0) == expected
        ask_until(served, 2)
        assert ask(served, temperature=0) == expected
        assert served.get("/learning").json()["error"] is None
