"""Who runs, and what the engine does with sequences that are cancelled."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeTarget, TableSource, run_all, sequence, table_law
from forerun.api import Model
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.records import Step
from forerun.core.roles import Drafter, Shaper
from forerun.core.sampling import Sampling
from forerun.core.tree import EMPTY
from forerun.drafters.base import Grown, PerSequence
from forerun.drafters.fuse import Fuse
from forerun.drafters.none import Plain
from forerun.engine.engine import Engine
from forerun.engine.scheduler import Scheduler
from forerun.engine.stopping import Stops, Stream
from forerun.errors import CapacityError, ConfigError, DataError
from forerun.growers.chain import Chain
from forerun.growers.iid import Iid
from forerun.verifiers.greedy import Greedy
from forerun.verifiers.recursive import Recursive


class Diary(Plain):
    """Writes down who came and who went."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.finished: list[int] = []

    def start(self, seq):
        self.started.append(seq.index)

    def finish(self, seq):
        self.finished.append(seq.index)


class Letters:
    """A tokenizer of three letters, as `Model` needs it."""

    eos_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._decode = lambda ids, **options: self.decode(ids)

    def encode(self, text: str) -> list[int]:
        return ["abc".index(letter) for letter in text]

    def decode(self, ids) -> str:
        return "".join("abc"[i] for i in ids)


class Groups(PerSequence):
    """Keeps the groups that it meets."""

    labels = frozenset({"point"})  # who never drafts is never asked

    def __init__(self) -> None:
        self.groups: list = []

    def start(self, seq):
        self.groups.append(seq.group)

    def draft(self, seq, plan, dice):
        return EMPTY


def model_of(**options) -> Model:
    return Model(FakeTarget(table_law(1)), Letters(), **options)  # type: ignore[arg-type]


def engine_of(drafter: Drafter | None = None, max_seqs: int = 1, **options) -> Engine:
    return Engine(
        FakeTarget(table_law(1)),
        drafter or Plain(),
        Recursive(),
        Fixed(),
        max_seqs=max_seqs,
        **options,
    )


def chain_drafter() -> Drafter:
    return Grown(TableSource(table_law(2)), Chain())


def seqs_of(count: int, length: int = 5):
    return [sequence([0], length, SeededDice(9, k), index=k) for k in range(count)]


@settings(deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(1, 5), max_size=8))
def test_first_come_first_served_and_never_too_many(max_seqs, lengths):
    scheduler, order = Scheduler(max_seqs), []
    waiting = [sequence([0], n, SeededDice(0), index=k) for k, n in enumerate(lengths)]
    for seq in waiting:
        scheduler.add(seq)
    gone = []
    while not scheduler.is_idle:
        scheduler.admit(lambda seq: order.append(seq.index))
        assert 0 < len(scheduler.running) <= max_seqs
        for seq in scheduler.running:
            seq.tokens.append(0)
            seq.finish = "length" if seq.num_left == 0 else None
        gone += scheduler.retire()[0]
    assert order == list(range(len(lengths)))
    assert sorted(seq.index for seq in gone) == order


def test_parts_hear_of_every_sequence_once():
    diary = Diary()
    run_all(engine_of(diary, max_seqs=2), seqs_of(5))
    assert diary.started == [0, 1, 2, 3, 4]
    assert sorted(diary.finished) == [0, 1, 2, 3, 4]


def test_a_seed_means_the_same_text_whatever_shares_the_batch():
    alone = [run_all(engine_of(chain_drafter()), [seq])[0] for seq in seqs_of(4)]
    together = run_all(engine_of(chain_drafter(), max_seqs=3), seqs_of(4))
    assert list(together) == alone


def test_a_cancelled_waiting_sequence_never_starts():
    diary, seqs = Diary(), seqs_of(2)
    engine = engine_of(diary)
    for seq in seqs:
        engine.submit(seq)
    engine.cancel(seqs[1])
    engine.run()
    assert diary.started == [0]
    assert (seqs[1].finish, seqs[1].generated) == ("cancelled", [])


def test_a_cancelled_running_sequence_gets_no_more_tokens():
    (seq,), engine = seqs_of(1), engine_of()
    engine.submit(seq)
    engine.step()
    before = list(seq.tokens)
    engine.cancel(seq)
    engine.run()
    assert seq.finish == "cancelled"
    assert seq.tokens == before


def test_a_queue_of_cancelled_sequences_drains():
    (seq,) = seqs_of(1)
    engine = engine_of(Fuse(parts=(chain_drafter(), chain_drafter())))
    engine.submit(seq)
    engine.cancel(seq)
    engine.run()
    assert engine.scheduler.is_idle


def test_a_step_that_fails_does_not_undo_a_cancel():
    """Another thread may cancel at any moment of a step, also of one that takes its tokens back."""

    class Interrupted(Shaper):
        def start(self, seq):
            return "calm"

        def advance(self, state, token):
            engine.cancel(seq)
            raise RuntimeError("a shaper failed")

        def logits(self, state, logits):
            return logits

    (seq,), engine = seqs_of(1), engine_of(shapers=(Interrupted(),))
    engine.submit(seq)
    with pytest.raises(RuntimeError, match="a shaper failed"):
        engine.step()
    assert engine.step() == [seq]
    assert seq.finish == "cancelled" and engine.scheduler.is_idle


def test_cancelling_does_not_rename_a_finish():
    (seq,), engine = seqs_of(1, length=1), engine_of()
    run_all(engine, [seq])
    engine.cancel(seq)
    engine.retire()
    assert seq.finish == "length"


def test_a_pair_that_cannot_work_is_refused_when_built():
    class OnlyPoints(Recursive):
        judges = frozenset({"point"})

    drafter = Grown(TableSource(table_law(2)), Iid())
    with pytest.raises(ConfigError, match=r"does not accept the drafts of .* \(iid\)"):
        Engine(FakeTarget(table_law(1)), drafter, OnlyPoints(), Fixed())


def test_a_request_that_the_verifier_cannot_serve_is_refused_at_the_door():
    engine = Engine(FakeTarget(table_law(1)), Plain(), Greedy(), Fixed())
    with pytest.raises(ConfigError, match="'greedy' needs temperature 0"):
        engine.submit(sequence([0], 3, SeededDice(0), Sampling(temperature=0.5)))
    assert engine.scheduler.is_idle


def test_needs_are_the_union_of_what_the_parts_declare():
    class Judge(Recursive):
        needs = frozenset({"hidden"})

    seen = []

    class Asked(FakeTarget):
        def forward(self, batch):
            seen.append(batch.needs)
            return super().forward(batch)

    run_all(Engine(Asked(table_law(1)), Plain(), Judge(), Fixed()), seqs_of(1, length=2))
    assert seen == [frozenset({"hidden"})] * 2


def test_a_model_gives_samples_in_order_with_their_statistics():
    results = model_of().generate(["ab", "c"], drafter="none", n=3, max_new_tokens=4, seed=1)
    assert [r.prompt for r in results] == ["ab", "c"]
    for i, result in enumerate(results):
        assert [(s.prompt_index, s.index) for s in result.samples] == [(i, k) for k in range(3)]
        assert all(len(s.tokens) == 4 and s.finish == "length" for s in result.samples)
        assert result.stats.generated == 12
        assert result.stats.tau == 1.0
        assert result.text == result.samples[0].text


def test_streamed_pieces_are_the_text():
    model = model_of()
    options = {"drafter": "none", "n": 2, "batch": 2, "max_new_tokens": 6, "seed": 3}
    texts, finals = {0: "", 1: ""}, {}
    for event in model.stream("a", stop="cc", **options):
        texts[event.index] += event.text
        if event.sample:
            finals[event.index] = event.sample.text
    assert texts == finals
    (result,) = model.generate("a", stop="cc", **options)
    assert {s.index: s.text for s in result.samples} == finals


def test_a_stop_string_cuts_ids_text_and_logprobs_together():
    (result,) = model_of().generate(
        "a", drafter="none", n=20, max_new_tokens=8, seed=5, stop="b", logprobs=1
    )
    assert any(sample.finish == "stop" for sample in result.samples)
    for sample in result.samples:
        assert "b" not in sample.text
        assert len(sample.text) == len(sample.tokens) == len(sample.logprobs)
        for token, logprobs in zip(sample.tokens, sample.logprobs, strict=True):
            assert token in logprobs


def test_prompts_of_different_calls_never_share_a_group():
    model, groups = model_of(), Groups()
    for _ in range(100):
        model.generate("a", drafter=groups, max_new_tokens=3, ignore_eos=True)
    assert len(set(groups.groups)) == 100


def test_a_caller_who_stops_early_leaves_nothing_behind():
    diary = Diary()
    run = model_of().run("a", drafter=diary, n=4, batch=2, max_new_tokens=5)
    events = run.events()
    next(events)
    events.close()
    assert run.engine.scheduler.is_idle
    assert sorted(diary.finished) == sorted(diary.started)


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ("", DataError, "the prompt is empty"),
        ([], DataError, "there is no prompt"),
        (["a", ""], DataError, "prompt 1 is empty"),
        ([[0, 3]], DataError, "the prompt has token 3 at position 1; ids of this model are 0 to 2"),
        ([[0] * 10_000], CapacityError, "keep 9999 or fewer"),
        ([0, 1], DataError, "prompt"),
    ],
)
def test_bad_prompts_are_refused_in_words(prompts, error, message):
    with pytest.raises(error, match=message):
        model_of().generate(prompts, drafter="none")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1.0}, "unknown option 'temprature'; did you mean 'temperature'"),
        ({"batch": 0}, "batch must be a whole number of at least 1, got 0"),
        ({"batch": 1.5}, "batch must be a whole number of at least 1, got 1.5"),
        ({"batch": True}, "batch must be a whole number of at least 1, got True"),
        ({"tenant": ["x"]}, r"tenant must be a string, got \['x'\]"),
        ({"n": 0}, "n must be an integer >= 1"),
        ({"logit_bias": {3: 1.0}}, "logit_bias"),
        ({"banned_tokens": (0, 1, 2)}, "banned_tokens"),
    ],
)
def test_bad_options_are_refused_in_words(options, message):
    with pytest.raises(ConfigError, match=message):
        model_of().generate("a", **{"drafter": "none", **options})


class Spelling(Stream):
    """A detokenizer that fails at some letters as long as it is told to."""

    broken: bool = False

    def __init__(self, letters: Letters) -> None:
        self.letters = letters

    def push(self, token: int) -> str:
        if self.broken and token == 2:
            raise RuntimeError("no such letter")
        return self.letters.decode([token])


def test_an_error_in_one_text_leaves_all_texts_as_they_were(monkeypatch):
    """The texts of a step grow together or not at all; the step can then be done again."""
    stops = Stops(stream=lambda: Spelling(Letters()))
    engine = engine_of(chain_drafter(), max_seqs=4, stops=stops)
    watched = Sampling(stop=("#",))  # so that text is made token by token
    seqs = [sequence([0], 12, SeededDice(9, k), watched, index=k) for k in range(4)]
    for seq in seqs:
        engine.submit(seq)
    faults = 0
    while not engine.scheduler.is_idle:
        before = [list(seq.tokens) for seq in seqs]
        monkeypatch.setattr(Spelling, "broken", faults < 3)
        try:
            engine.step()
        except RuntimeError:
            faults += 1
            assert [seq.tokens for seq in seqs] == before
            assert [seq.finish for seq in engine.scheduler.running] == [None] * len(
                engine.scheduler.running
            )
            for seq in engine.scheduler.running:
                assert stops.text(seq) == Letters().decode(seq.generated)
                assert len(stops.token_starts(seq)) == seq.num_generated
    assert faults == 3
    assert [stops.text(seq) for seq in seqs] == [Letters().decode(seq.generated) for seq in seqs]
    assert [seq.num_generated for seq in seqs] == [12] * 4


def test_all_listeners_hear_a_step_whatever_one_of_them_does():
    heard = []

    def fail(step):
        raise RuntimeError("deaf")

    engine, (seq,) = engine_of(listeners=(fail, heard.append)), seqs_of(1)
    engine.submit(seq)
    with pytest.raises(RuntimeError, match="deaf"):
        engine.step()
    assert [step.emitted for step in heard] == [[seq.generated]] and seq.num_generated == 1


@pytest.mark.parametrize("num", [1, 3])
def test_parts_that_answer_for_too_few_or_too_many_end_the_step_before_a_text_grows(num: int):
    class Verifier(Recursive):
        def verify_all(self, trees, laws, dice):
            return (super().verify_all(trees, laws, dice) * 2)[:num]

    class Target(FakeTarget):
        def forward(self, batch):
            return (super().forward(batch) * 2)[:num]

    for target, verifier in ((FakeTarget, Verifier), (Target, Recursive)):
        parts = target(table_law(1)), Plain(), verifier(), Fixed()
        engine = Engine(*parts, max_seqs=2)
        seqs = [sequence([0], 4, SeededDice(i), index=i) for i in range(2)]
        for seq in seqs:
            engine.submit(seq)
        with pytest.raises(ValueError, match="zip"):
            engine.step()
        assert [seq.tokens for seq in seqs] == [[0], [0]]


def test_who_is_ended_by_a_listener_takes_part_in_no_further_step() -> None:
    """Not the documented way, which is `cancel`; no token may come behind it all the same."""
    seqs = [sequence((0, 1), 9, SeededDice(i), index=i) for i in range(2)]

    def end_first(step: Step) -> None:
        seqs[0].finish = "stop"

    engine = Engine(
        FakeTarget(table_law(1)), Plain(), Recursive(), Fixed(), listeners=[end_first], max_seqs=2
    )
    made = run_all(engine, seqs)
    assert [len(tokens) for tokens in made] == [1, 9]
