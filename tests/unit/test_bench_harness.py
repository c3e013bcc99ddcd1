"""The harness with fake contestants: order, failures, resuming, turns that build on answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.bench import cpu_load, hardware_limits, planning
from forerun.bench.contestants import CacheDemand, Outcome, PeerError, SkippedPeer
from forerun.bench.harness import Harness
from forerun.bench.planning import (
    ChosenExamples,
    RunRequest,
    choose,
    prompts_hash,
    units,
)
from forerun.bench.progress import Progress
from forerun.bench.results import Record, SampleRecord, read_run
from forerun.bench.run_writer import RunWriter
from forerun.bench.scoring import last_lines, majority_score
from forerun.core.sampling import Sampling
from forerun.errors import CapacityError, DataError
from forerun.tasks.base import Example

TEXTS = ["2 Answer: 1", "Answer: 2", "none", "Answer: 2"]


class Words:
    """A tokenizer: a word is a token."""

    has_chat_template = False

    def encode(self, text: str) -> list[str]:
        return text.split()

    def decode(self, ids: list[str]) -> str:
        return " ".join(ids)


class Sums:
    """A task of six prompts in two categories; the later one builds on the answer to the first."""

    def __init__(self, after: bool = False) -> None:
        self.after = after

    def __len__(self) -> int:
        return 6

    def example(self, i: int) -> Example:
        prompt, category = f"what is number {i}", "odd" if i % 2 else "even"
        if self.after and i:
            turns = ("first", "", prompt)
            return Example(f"s{i}", prompt, "2", category=category, turns=turns, after=(0,))
        return Example(f"s{i}", prompt, "2", category=category)

    def score(self, example: Example, text: str) -> float:
        return float(self.read(text) == example.answer)

    def read(self, text: str) -> str | None:
        _, found, number = text.partition("Answer: ")
        return number if found else None


class Growing(Sums):
    """Its third prompt is the longest."""

    def example(self, i: int) -> Example:
        example = super().example(i)
        return replace(example, prompt=example.prompt + " and more" * (i == 2))


class Turning(Sums):
    """Its second prompt is a second turn; its third is longer."""

    def example(self, i: int) -> Example:
        turns = ("first", "", "more") if i == 1 else ()
        return Example(
            f"s{i}", " ".join(turns) or "w " * (3 + 9 * i), "2", turns=turns, after=(0,) * (i == 1)
        )


class Fake:
    """A contestant that notes what it is asked; `act` may break it."""

    def __init__(self, name: str, log: list[Any], act: Callable[[Fake, Example], Any] = id) -> None:
        self.name, self.log, self.act = name, log, act
        self.starts, self.closes, self.runs = 0, 0, 0
        self.prompts: list[str] = []

    @property
    def host(self) -> str:
        return self.name

    is_batched = False

    @property
    def restarts(self) -> int:
        return self.starts - 1

    def size_for(self, demand: CacheDemand) -> None:
        self.demand = demand

    def memory_needed(self) -> int:
        return 0

    def memory_plan(self) -> dict[str, int]:
        return {}

    def versions(self) -> dict[str, str]:
        return {self.name: "1.0"}

    def start(self) -> None:
        self.starts += 1

    def warm_up(self, example: Example, sampling: Sampling) -> None:
        self.log.append(("warm", self.name, example.id))

    def run(self, example: Example, sampling: Sampling) -> Outcome:
        self.runs += 1
        self.prompts.append(example.prompt)
        self.log.append((self.name, example.id, sampling.seed))
        if self.act is not id:
            self.act(self, example)
        samples = [SampleRecord(3, 2, 4, 1, 2, [1], text=text) for text in TEXTS[: sampling.n]]
        return Outcome(1.5, samples, 0.25, {"weights": 7})

    def close(self) -> None:
        self.closes += 1


@pytest.fixture(autouse=True)
def no_measurements(monkeypatch: pytest.MonkeyPatch, short_collections: None) -> None:
    """No memory is read, and a full garbage collection is short."""
    monkeypatch.setattr(hardware_limits, "read_bandwidth", lambda threads, **options: 12.5)
    monkeypatch.setattr(cpu_load, "lost_share", lambda *measured: 0.25)
    monkeypatch.setattr(cpu_load, "cpu_seconds", lambda: (9.0, 4.0))


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., tuple[Progress, list[Record]]]:
    """Runs contestants in one run folder; gives the progress and the records."""

    def run(
        contestants: list[Fake],
        *,
        examples: int = 4,
        rounds: int = 1,
        task: Sums | None = None,
        context: int = 1000,
        **options: Any,
    ) -> tuple[Progress, list[Record]]:
        task = task or Sums()
        part = ChosenExamples("sums", task, [(i, task.example(i)) for i in range(examples)])
        plan = planning.Manifest(
            "now", "0.1.0", "", "", {"hash": "h"}, "float32", 1, 0, {"n": 4},
            [c.name for c in contestants], {"sums": part.to_dict()}, rounds,
        )  # fmt: skip
        model: Any = SimpleNamespace(tokenizer=Words(), target=SimpleNamespace(context=context))
        with RunWriter(tmp_path / "run", plan) as writer:
            given = {"sampling": Sampling(n=4, temperature=0.5), "seed": 7} | options
            harness = Harness(units([part], rounds), contestants, writer, model, **given)
            progress = harness.run()
        return progress, read_run(tmp_path / "run")[1]

    return run


def test_order_alternates_within_every_category_and_from_round_to_round(bench: Any) -> None:
    log: list[Any] = []
    _, records = bench([Fake("a", log), Fake("b", log), Fake("c", log)], rounds=2)
    ran = [entry[0] for entry in log if entry[0] != "warm"]
    turns = ["".join(ran[i : i + 3]) for i in range(0, len(ran), 3)]
    # examples 0 (even), 1 (odd), 2 (even), 3 (odd); then the same the other way round
    assert turns == ["abc", "cba", "cba", "abc", "cba", "abc", "abc", "cba"]
    assert [record.order for record in records] == list(range(24))
    for label in ("even", "odd"):
        for rounds in ({0}, {1}):
            mine = [r for r in records if r.category == label and r.round in rounds]
            firsts = [r.method for r in mine if r.order % 3 == 0]
            assert sorted(firsts) == ["a", "c"]


def test_a_record_says_what_came(bench: Any) -> None:
    log: list[Any] = []
    _, records = bench([Fake("a", log)], examples=1)
    (record,) = records
    assert record == Record(
        task="sums",
        index=0,
        id="s0",
        category="even",
        method="a",
        round=0,
        order=0,
        num_prompt_tokens=4,
        seconds=1.5,
        generated=12,
        samples=[SampleRecord(3, 2, 4, 1, 2, [1], score=score) for score in (0.0, 1.0, 0.0, 1.0)],
        prefill_seconds=0.25,
        score=0.5,
        majority=1.0,
        memory={"weights": 7},
        limits={"read_gb_s": 12.5},  # it took no time in which ticks would tell who took the cores
    )


@pytest.mark.parametrize(
    ("clock", "spent", "told"),
    [((9.0, 4.0), 0.8, {}), ((9.0, 4.0), 1.5, {"taken": 0.25}), ((0.0, 4.0), 1.5, {})],
)
def test_what_others_took_is_told_where_ticks_can_tell(
    bench: Any,
    monkeypatch: pytest.MonkeyPatch,
    clock: tuple[float, float],
    spent: float,
    told: dict[str, float],
) -> None:
    """Neither of a short record nor of a system that tells no processor time."""
    now = [0.0]

    def act(contestant: Fake, example: Example) -> None:
        now[0] += spent

    monkeypatch.setattr("forerun.bench.harness.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(cpu_load, "cpu_seconds", lambda: clock)
    _, (record,) = bench([Fake("a", [], act)], examples=1)
    assert record.limits == {"read_gb_s": 12.5} | told


def test_seeds_are_those_of_the_prompt_and_the_round(bench: Any) -> None:
    log: list[Any] = []
    bench([Fake("a", log), Fake("b", log)], examples=2, rounds=2)
    seeds = {(entry[1], entry[2]) for entry in log if entry[0] != "warm"}
    assert seeds == {("s0", 7), ("s1", 8), ("s0", 100_010), ("s1", 100_011)}


def test_all_are_warmed_up_on_the_longest_prompt(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[Any] = []
    asked: list[str] = []
    encode = Words.encode
    monkeypatch.setattr(
        Words, "encode", lambda self, text: asked.append(text) or encode(self, text)
    )
    bench([Fake("a", log), Fake("b", log)], task=Growing(), rounds=2)
    assert log[:2] == [("warm", "a", "s2"), ("warm", "b", "s2")]
    assert len(asked) == 4 + 4 + 16, "sized, searched for the longest, then in each record"


@pytest.mark.parametrize(("context", "length"), [(1000, 48), (150, 20)])
def test_warm_up_holds_answers_as_long_as_can_be(bench: Any, context: int, length: int) -> None:
    class Brief(Fake):
        def warm_up(self, example: Example, sampling: Sampling) -> None:
            self.log.append(("warm", example.id, len(example.turns[1].split())))

    log: list[Any] = []
    sampling = Sampling(n=4, max_new_tokens=48)
    bench([Brief("a", log)], task=Turning(), context=context, sampling=sampling)
    assert log[0] == ("warm", "s1", length), "a later turn, though its own words are fewer"


def test_a_peer_that_breaks_on_the_longest_prompt_is_started_on_the_first(bench: Any) -> None:
    log: list[Any] = []

    class Brief(Fake):
        def warm_up(self, example: Example, sampling: Sampling) -> None:
            super().warm_up(example, sampling)
            if "more" in example.prompt:
                raise PeerError("too long")

    peer = Brief("a", log)
    _, records = bench([peer], task=Growing())
    assert [entry for entry in log if entry[0] == "warm"] == [
        ("warm", "a", "s2"),
        ("warm", "a", "s0"),
    ]
    assert (peer.starts, len(records)) == (2, 4)


def test_texts_are_kept_on_request(bench: Any) -> None:
    _, records = bench([Fake("a", [])], examples=1, texts=True)
    assert [sample.text for sample in records[0].samples] == TEXTS


def test_a_failure_is_recorded_with_its_last_lines_and_the_run_goes_on(bench: Any) -> None:
    def act(self: Fake, example: Example) -> None:
        if example.id == "s1":
            raise PeerError("Traceback\nline\nSegmentation fault")

    log: list[Any] = []
    broken = Fake("b", log, act)
    progress, records = bench([Fake("a", log), broken])
    failed = [record for record in records if record.error]
    assert len(records) == 8 == progress.done == progress.total
    assert [(r.method, r.index) for r in failed] == [("b", 1)]
    assert failed[0].error == "Traceback\nline\nSegmentation fault"
    assert (failed[0].samples, failed[0].seconds, failed[0].generated) == ([], 0.0, 0)
    assert (broken.starts, broken.runs) == (2, 4)  # started again after it had failed


def test_how_often_a_peer_began_anew_is_told(bench: Any, tmp_path: Path) -> None:
    def act(self: Fake, example: Example) -> None:
        if example.id == "s1":
            raise PeerError("it broke")

    log: list[Any] = []
    said: list[str] = []
    bench([Fake("a", log), Fake("b", log, act)], examples=2, notice=said.append)
    assert said == ["starting a", "starting b", "restarting b"]
    assert read_run(tmp_path / "run")[0].peers == {
        "a": {"a": "1.0"},
        "b": {"b": "1.0", "restarts": 1},
    }

    def shared(self: Fake, example: Example) -> None:
        self.starts += 1  # as where another mode ended the worker of both

    bench([Fake("a", log), Fake("b", log, shared)], examples=2, rounds=2)
    assert read_run(tmp_path / "run")[0].peers["b"] == {"b": "1.0", "restarts": 1 + 2}


def test_a_peer_that_was_left_out_begins_anew(bench: Any, tmp_path: Path) -> None:
    def act(self: Fake, example: Example) -> None:
        raise PeerError("it broke")

    log: list[Any] = []
    bench([Fake("a", log), Fake("b", log, act)], examples=3)
    assert isinstance(read_run(tmp_path / "run")[0].peers["b"], str)
    bench([Fake("a", log), Fake("b", log)], examples=3, retry=True)
    assert read_run(tmp_path / "run")[0].peers["b"] == {"b": "1.0", "restarts": 1}


def test_missing_samples_are_a_failure(bench: Any) -> None:
    class Odd(Fake):
        def run(self, example: Example, sampling: Sampling) -> Outcome:
            found = super().run(example, sampling)
            return replace(found, samples=found.samples[1:])

    _, records = bench([Fake("a", []), Odd("b", [])], examples=1)
    assert [r.error for r in records] == [None, "b returned 3 of 4 samples"]


def test_a_peer_that_keeps_failing_drops_out(bench: Any, tmp_path: Path) -> None:
    def act(self: Fake, example: Example) -> None:
        raise ValueError("no")

    said: list[str] = []
    log: list[Any] = []
    broken = Fake("b", log, act)
    progress, records = bench([Fake("a", log), broken], notice=said.append)
    assert [r.index for r in records if r.method == "b"] == [0, 1]
    assert sum(r.method == "a" for r in records) == 4
    assert progress.done == progress.total == 6
    why = read_run(tmp_path / "run")[0].peers["b"]
    assert why.startswith("failed 2 times in a row") and why.endswith("ValueError: no")
    assert any("b is left out" in text for text in said)


def test_who_cannot_start_is_skipped_with_the_reason_also_later(bench: Any, tmp_path: Path) -> None:
    class Missing(Fake):
        def start(self) -> None:
            raise SkippedPeer("it is not installed")

    class Odd(Fake):
        def start(self) -> None:
            raise OSError("no such file")

    log: list[Any] = []
    _, records = bench([Fake("a", log), Missing("b", log), Odd("c", log)])
    assert {record.method for record in records} == {"a"}
    peers = read_run(tmp_path / "run")[0].peers
    assert peers["a"] == {"a": "1.0"} and peers["b"] == "it is not installed"
    assert peers["c"].startswith("failed to start: ") and peers["c"].endswith("no such file")
    later = Fake("b", log)  # it can be installed later, but would no longer be paired
    (tmp_path / "run" / "records.jsonl").write_bytes(b"")
    _, records = bench([Fake("a", log), later, Fake("c", log)])
    assert later.starts == 0 and {record.method for record in records} == {"a"}
    again = Fake("a", log)  # all that can be run is there: nobody is started
    bench([again, later, Fake("c", log)])
    assert again.starts == later.starts == 0
    _, records = bench([Fake("a", log), later, Fake("c", log)], retry=True)
    assert later.starts == 1 and {record.method for record in records} == {"a", "b", "c"}
    assert read_run(tmp_path / "run")[0].peers["b"] == {"b": "1.0"}


def test_an_interrupted_run_goes_on_where_it_stopped(bench: Any) -> None:
    log: list[Any] = []
    a, b = Fake("a", log), Fake("b", log)

    def interrupt(self: Fake, example: Example) -> None:
        if example.id == "s2":
            raise KeyboardInterrupt

    b.act = interrupt
    with pytest.raises(KeyboardInterrupt):
        bench([a, b])
    assert (a.closes, b.closes) == (1, 1)
    again = Fake("a", log), Fake("b", log)
    progress, records = bench(list(again))
    assert [c.runs for c in again] == [2, 2]  # s2 and s3: prompt s2 was interrupted in b, the first
    assert len({record.key for record in records}) == 8 == progress.done
    assert sorted(record.order for record in records) == list(range(8))
    whole = Fake("a", log), Fake("b", log)
    bench(list(whole))
    assert [c.starts for c in whole] == [0, 0]


def test_a_full_disk_ends_the_run_and_closes_everybody(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RunWriter, record: Record) -> None:
        raise CapacityError("no space left")

    monkeypatch.setattr(RunWriter, "append", full)
    fake = Fake("a", [])
    with pytest.raises(CapacityError, match="no space left"):
        bench([fake])
    assert fake.closes == 1


def test_later_turns_are_shown_the_first_methods_answer(bench: Any) -> None:
    log: list[Any] = []
    contestants = [Fake("a", log), Fake("b", log)]
    _, records = bench(contestants, task=Sums(after=True), examples=2)
    shown = "User: first\n\nAssistant: 2 Answer: 1\n\nUser: what is number 1\n\nAssistant:"
    assert [c.prompts[1] for c in contestants] == [shown, shown]
    texts = {r.index: [s.text for s in r.samples] for r in records if r.method == "a"}
    assert texts == {0: TEXTS, 1: [None] * 4}  # kept where a later prompt needs them


def test_what_builds_on_an_answer_that_failed_is_tried_again_with_it(bench: Any) -> None:
    def fails(self: Fake, example: Example) -> None:
        raise ValueError("no")

    log: list[Any] = []
    task = Sums(after=True)
    first, second = Fake("a", log, fails), Fake("b", log)
    _, records = bench([first, second], task=task, examples=2)
    assert {(r.method, r.index) for r in records if r.error} == {("a", 0), ("a", 1)}
    mended, again = Fake("a", log), Fake("b", log)
    _, records = bench([mended, again], task=task, examples=2, retry=True)
    assert len(records) == 4 and not any(r.error for r in records)
    assert (mended.runs, again.runs) == (2, 1)  # b's first answer is kept, its second was built on
    assert again.prompts == mended.prompts[1:]


def test_answers_survive_a_restart(bench: Any, tmp_path: Path) -> None:
    log: list[Any] = []
    task = Sums(after=True)

    def interrupt(self: Fake, example: Example) -> None:
        if example.id == "s1":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench([Fake("a", log, interrupt)], task=task, examples=2)
    again = Fake("a", log)
    bench([again], task=task, examples=2)
    assert "Assistant: 2 Answer: 1\n" in again.prompts[0]


def test_progress_knows_what_is_left() -> None:
    progress = Progress(6)
    progress.left.update({"a": 3, "b": 3})
    assert progress.eta is None
    progress.finish("a", 1.0)
    assert progress.eta == 2 * 1.0 + 3 * 1.0
    progress.finish("b", 3.0)
    assert progress.eta == 2 * 1.0 + 2 * 3.0
    progress.left.pop("b")  # as one that is left out
    assert (progress.eta, progress.done) == (2.0, 2)


def test_majority() -> None:
    task, example = Sums(), Sums().example(0)
    assert majority_score(task, example, TEXTS) == 1.0
    assert majority_score(task, example, ["Answer: 1", "Answer: 2"]) == 0.0  # ties: the first
    assert majority_score(task, example, ["nothing"]) is None  # nobody knows what it reads
    assert majority_score(task, replace(example, reference="so Answer: 2"), ["nothing"]) == 0.0
    assert majority_score(task, replace(example, answer=""), TEXTS) is None
    assert majority_score(task, example, [*TEXTS, None]) is None


def test_last_lines_of_errors() -> None:
    assert last_lines(DataError("one\ntwo")) == "one\ntwo"
    try:
        raise RuntimeError("deep\n" + "\n".join(str(i) for i in range(50)))
    except RuntimeError as error:
        lines = last_lines(error).splitlines()
    assert len(lines) == 12 and lines[-1] == "49"


def test_prompts_that_do_not_fit_are_left_out() -> None:
    class Lengths(Sums):
        def example(self, i: int) -> Example:
            return replace(super().example(i), prompt="word " * (10 * (i + 1)))

    model: Any = SimpleNamespace(tokenizer=Words(), target=SimpleNamespace(context=50))
    asked = RunRequest(["plain"], ["sums"], sampling=Sampling(max_new_tokens=25), examples=4)
    looks: list[tuple[str, int, int]] = []
    found = choose("sums", Lengths(), asked, model, lambda *look: looks.append(look))
    assert looks == [("sums", i, 4) for i in (1, 2, 3, 4)]
    assert [i for i, _ in found.examples] == [0, 1] and found.left_out == 2
    assert found.to_dict()["left_out"] == 2
    asked = replace(asked, sampling=Sampling(max_new_tokens=45))
    with pytest.raises(DataError, match="lower --max-new-tokens"):
        choose("sums", Lengths(), asked, model)


def test_the_hash_is_that_of_the_prompts() -> None:
    first = [(0, Example("a", "p", "1"))]
    assert prompts_hash(first) == prompts_hash([(0, Example("a", "p", "2"))])
    others = [[(1, Example("a", "p", "1"))], [(0, Example("a", "q", "1"))], []]
    assert len({prompts_hash(x) for x in [first, *others]}) == 4
