"""The Python API on a real (tiny, random) checkpoint: the same text with drafts and without."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import forerun
from forerun import api
from forerun.core.sampling import Sampling
from forerun.errors import CapacityError, ConfigError, DataError, ForerunError, UnknownName
from forerun.verifiers.speculative import Speculative

PROMPT = "the cat sat on the mat and the dog sat on the log and the cat"
DRAFTERS = ["stand", "prompt_lookup", "fuse:parts=prompt_lookup+stand"]


@pytest.fixture(scope="module")
def model(tiny_folder):
    return forerun.load(str(tiny_folder), dtype="fp32")


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory):
    from tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("draft"), seed=1)


GREEDY = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "bias": {"logit_bias": {40: 2.0, 41: -3.0}},
    "bans": {"banned_tokens": (32, 220, 83, 72)},
    "least": {"min_new_tokens": 30, "logit_bias": {0: 3.0}},
    "no end": {"ignore_eos": True, "logit_bias": {0: 3.0}},
}


@pytest.mark.parametrize("name", GREEDY)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_text_is_the_same_with_drafts(model, drafter: str, name: str) -> None:
    options = {"temperature": 0, "max_new_tokens": 40, "logprobs": 3, **GREEDY[name]}
    (plain,) = model.generate(PROMPT, drafter="none", **options)
    (first, second) = model.generate([PROMPT, PROMPT], drafter=drafter, **options)
    for result in (first, second):
        assert result.samples[0].tokens == plain.samples[0].tokens
        assert result.text == plain.text
        pairs = zip(result.samples[0].logprobs, plain.samples[0].logprobs, strict=True)
        for ours, theirs in pairs:
            assert ours.keys() == theirs.keys()
            assert all(abs(ours[t] - theirs[t]) < 1e-3 for t in ours)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"drafter": None},
            r'name of a drafter or a Drafter object, got None; drafter="none" deco',
        ),
        ({"drafter": 3}, "name of a drafter or a Drafter object, got 3"),
        ({"verifier": None}, "name of a verifier or a Verifier object, got None"),
        ({"controller": 3}, "name of a controller or a Controller object, got 3"),
        ({"drafter": Speculative()}, "or a Drafter object, got <forerun.verifiers"),
        ({"constraint": 5}, "constraint must be one object or a list, got 5"),
        ({"constraint": None}, r"constraint must be .*, got None; pass \(\) for none"),
        ({"constraint": [5]}, "name of a constraint or a Shaper object, got 5"),
        ({"shapers": 5}, "shapers must be one object or a list, got 5"),
    ],
)
def test_what_is_no_part_is_refused(model, options: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        model.generate(PROMPT, max_new_tokens=2, **options)
    if "drafter" in options:
        with pytest.raises(ConfigError, match=said):
            model.memory("a.mem", **options)


def test_the_parts_of_a_run_are_warmed_up(model, monkeypatch) -> None:
    """Their kernels, which may be cold, are compiled before the first step is timed."""
    warmed = []
    for part in (model.target, Speculative):
        monkeypatch.setattr(part, "warm_up", lambda *_, part=part: warmed.append(part))
    model.run(PROMPT)
    assert warmed == [model.target, Speculative]


def test_greedy_text_is_the_same_with_a_draft_model(model, draft_folder) -> None:
    (plain,) = model.generate(PROMPT, drafter="none", temperature=0, max_new_tokens=40)
    for grower in ("chain", "template", "gumbel"):
        spec = f"draft_model:model={draft_folder},grower={grower},dtype=fp32"
        (drafted,) = model.generate(
            PROMPT, drafter=spec, controller="fixed", temperature=0, max_new_tokens=40
        )
        assert drafted.samples[0].tokens == plain.samples[0].tokens
        assert drafted.stats.drafted > 0


def test_the_target_as_its_own_draft_is_always_accepted(model, tiny_folder) -> None:
    spec = f"draft_model:model={tiny_folder},dtype=fp32"
    (result,) = model.generate(
        PROMPT,
        drafter=spec,
        controller="fixed:nodes=4,depth=4",
        temperature=1.0,
        seed=1,
        max_new_tokens=50,
        ignore_eos=True,
    )
    assert result.stats.tau == pytest.approx(5.0, abs=0.01)


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_a_seed_means_the_same_samples_at_any_batch_size(model, batch: int) -> None:
    options = {
        "n": 4,
        "temperature": 0.8,
        "seed": 11,
        "max_new_tokens": 24,
        "drafter": "stand:scope=request",
        "controller": "fixed:nodes=4",  # the default one plans by what else is in the batch
    }
    (alone,) = model.generate(PROMPT, batch=1, **options)
    (shared,) = model.generate(PROMPT, batch=batch, **options)
    assert [s.tokens for s in shared.samples] == [s.tokens for s in alone.samples]
    assert len({tuple(s.tokens) for s in shared.samples}) > 1
    assert [s.index for s in shared.samples] == [0, 1, 2, 3]


def test_a_call_can_be_reproduced_from_its_seed(model) -> None:
    (first,) = model.generate(PROMPT, n=2, max_new_tokens=16)
    (again,) = model.generate(PROMPT, n=2, max_new_tokens=16, seed=first.seed)
    assert [s.tokens for s in first.samples] == [s.tokens for s in again.samples]


def test_tau_counts_what_it_says(model) -> None:
    (result,) = model.generate(
        PROMPT, n=8, temperature=0.3, seed=3, max_new_tokens=40, controller="fixed"
    )
    stats = result.stats
    assert stats.generated == sum(len(s.tokens) for s in result.samples)
    assert stats.tau == pytest.approx(stats.generated / stats.passes)
    assert stats.tau > 1.2
    assert 0 < stats.acceptance_rate <= stats.examined_rate <= 1
    assert stats.per_position[0] >= stats.per_position[-1]
    assert set(stats.seconds) == {"draft", "forward", "verify", "other"}
    (plain,) = model.generate(PROMPT, n=2, drafter="none", max_new_tokens=20, ignore_eos=True)
    assert plain.stats.tau == 1.0


def test_streamed_text_is_the_whole_text(model) -> None:
    options = {"n": 3, "seed": 5, "temperature": 0.9, "max_new_tokens": 30}
    (whole,) = model.generate(PROMPT, **options)
    for batch in (1, 3):
        pieces: dict[int, str] = {}
        for event in model.stream(PROMPT, batch=batch, drafter="stand:scope=request", **options):
            pieces[event.index] = pieces.get(event.index, "") + event.text
            if event.sample:
                assert pieces[event.index] == event.sample.text
        assert set(pieces) == {0, 1, 2}
    assert len(whole.samples) == 3


@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
def test_stop_strings_cut_ids_text_and_logprobs_together(model, drafter: str) -> None:
    (free,) = model.generate(PROMPT, temperature=0, max_new_tokens=40, drafter="none")
    stop = free.text[9:12]
    assert stop
    (cut,) = model.generate(
        PROMPT, temperature=0, max_new_tokens=40, drafter=drafter, stop=(stop,), logprobs=1
    )
    sample = cut.samples[0]
    assert sample.finish == "stop"
    assert sample.text == free.text[: free.text.index(stop)]
    assert sample.tokens == free.samples[0].tokens[: len(sample.tokens)]
    assert len(sample.logprobs) == len(sample.tokens)
    assert model.tokenizer.decode(sample.tokens).startswith(sample.text)


def test_stopping_a_stream_early_leaves_nothing_behind(model) -> None:
    stream = model.stream(PROMPT, n=4, batch=2, max_new_tokens=40)
    next(stream)
    stream.close()
    assert all(slot.is_free for slot in model.target.cache.slots)
    (result,) = model.generate(PROMPT, temperature=0, max_new_tokens=5)
    assert len(result.samples[0].tokens) == 5


def test_a_run_that_was_left_says_so_instead_of_ending(model) -> None:
    prompts, few = [[5, 6, 7]], Sampling(n=4, max_new_tokens=4)
    run = model.run(prompts, few, batch=1)
    first = iter(run)
    next(first)
    assert len(list(run)) == 3 and list(run) == []  # while the first lives, and at the end
    first.close()
    assert list(run) == []
    run = model.run(prompts, few, batch=1)
    next(first := iter(run))
    first.close()
    for again in (run, run.steps(), run.events()):
        with pytest.raises(ConfigError, match="closed before it finished"):
            next(iter(again))


def test_trajectories_of_one_prompt_cost_one_prefill(model) -> None:
    prompt = PROMPT + " while the rain fell on the plain"
    length = len(model.tokenizer.encode(prompt))
    before = model.target.num_rows
    model.generate(prompt, n=4, drafter="none", max_new_tokens=1)
    assert model.target.num_rows - before <= length + 4


def test_bad_requests_are_refused(model, tmp_path) -> None:
    with pytest.raises(DataError, match="empty"):
        model.generate("")
    with pytest.raises(DataError, match="no prompt"):
        model.generate([])
    for prompts in (5, None):
        with pytest.raises(DataError, match=f"expected a prompt or a list of them, got {prompts}"):
            model.generate(prompts)
    for sampling in ("greedy", 0, [Sampling(), 0.6]):
        with pytest.raises(ConfigError, match="expected a Sampling, or a list with one for each"):
            model.generate(PROMPT, sampling)
    with pytest.raises(DataError, match="the prompt has token"):
        model.generate([[5, 100000]])
    with pytest.raises(CapacityError, match="context"):
        model.generate(PROMPT * 20)
    with pytest.raises(UnknownName, match="temperature"):
        model.generate(PROMPT, temprature=1.0)
    with pytest.raises(UnknownName, match="stand"):
        model.generate(PROMPT, drafter="stnad")
    with pytest.raises(UnknownName, match="context"):
        model.generate(PROMPT, drafter="stand:contxt=3")
    with pytest.raises(ConfigError, match="batch"):
        model.generate(PROMPT, batch=0)
    with pytest.raises(ConfigError, match="temperature 0"):
        model.generate(PROMPT, verifier="greedy")
    with pytest.raises(ForerunError):
        model.generate(PROMPT, drafter=f"draft_model:model={tmp_path}")
    for wrong in ({"temperature": -1}, {"top_p": 0}, {"n": 0}, {"min_p": 2}, {"max_new_tokens": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            model.generate(PROMPT, **wrong)


def test_a_draft_with_another_vocabulary_is_refused(model, tmp_path_factory) -> None:
    from tiny import make_tiny

    other = make_tiny(tmp_path_factory.mktemp("other"), vocab=300)
    with pytest.raises(ConfigError, match="different vocabularies"):
        model.generate(PROMPT, drafter=f"draft_model:model={other}")


def test_logprobs_match_the_models_own(model) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    (result,) = model.generate(
        PROMPT, seed=2, temperature=0.7, top_k=5, logprobs=2, max_new_tokens=12, ignore_eos=True
    )
    sample = result.samples[0]
    theirs = AutoModelForCausalLM.from_pretrained(model.name, dtype=torch.float32)
    ids = model.tokenizer.encode(PROMPT) + sample.tokens
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits[0].double()
    expected = torch.log_softmax(logits, -1).numpy()
    first = len(ids) - len(sample.tokens) - 1
    assert len(sample.logprobs) == len(sample.tokens) == 12
    for at, reported in enumerate(sample.logprobs):
        for token, value in reported.items():
            assert np.isclose(value, expected[first + at, token], atol=2e-3)


def test_memory_report_names_its_parts(model) -> None:
    model.generate(PROMPT, max_new_tokens=5, drafter="stand", controller="fixed")
    report = model.memory_report()
    assert report["weights"] > 0
    assert any("stand" in part for part in report)
    assert all(isinstance(size, int) and size >= 0 for size in report.values())


def test_one_call_gives_the_samples_of_the_longer_way(model, tiny_folder, monkeypatch) -> None:
    options = {"n": 2, "seed": 4, "max_new_tokens": 6, "drafter": "stand:scope=request"}
    (expected,) = model.generate(PROMPT, **options)
    loads = []
    load = api.load
    monkeypatch.setattr(api, "load", lambda *a, **k: loads.append(a) or load(*a, **k))
    for _ in range(2):
        found = forerun.generate(PROMPT, model=str(tiny_folder), dtype="fp32", **options)
        assert [s.tokens for s in found.samples] == [s.tokens for s in expected.samples]
    assert len(loads) == 1, "the second call finds the model loaded"
    ids = model.tokenizer.encode(PROMPT)
    (again,) = forerun.generate(ids, Sampling(temperature=0, max_new_tokens=3), model=model).samples
    assert len(again.tokens) == 3
    with pytest.raises(DataError, match="Model.generate takes a list"):
        forerun.generate(["one", "two"], model=model)  # type: ignore[list-item]
    with pytest.raises(
        ConfigError, match="it cannot take dtype=.fp16., device=.auto.; pass them to"
    ):
        forerun.generate(PROMPT, model=model, dtype="fp16")


def test_conversations_that_take_turns_compute_their_prefixes_once(tmp_path) -> None:
    from tiny import make_tiny

    model = forerun.load(str(make_tiny(tmp_path, context=512)), dtype="fp32")
    chats = [[token] * 100 for token in (40, 41)]
    for turn in range(3):
        for chat in chats:
            before = model.target.num_rows
            (result,) = model.generate([chat], temperature=0, max_new_tokens=2, drafter="none")
            computed = model.target.num_rows - before
            assert computed < 20 or turn == 0, f"{computed} rows for {len(chat)} tokens"
            chat += result.samples[0].tokens + [7] * 8


def test_sampling_objects_and_overrides_combine(model) -> None:
    sampling = Sampling(temperature=0, max_new_tokens=6)
    (result,) = model.generate(PROMPT, sampling, max_new_tokens=3)
    assert len(result.samples[0].tokens) == 3


def test_fewer_run_at_once_where_there_is_no_room(tiny_folder, caplog) -> None:
    model = forerun.load(str(tiny_folder), max_seqs=3)
    sampling = Sampling(n=4, max_new_tokens=4, ignore_eos=True, seed=0)
    streaming = model.stream("the cat", sampling)
    next(streaming)  # holds one of the three
    most = 0

    def count(step) -> None:
        nonlocal most
        most = max(most, len(step.seqs))

    (found,) = model.generate(["the dog"], sampling, on_step=count)
    assert len(found.samples) == 4 and most == 2
    assert not any("at once" in message for message in caplog.messages)
    model.generate(["the dog"], sampling, on_step=count, batch=4)
    assert "2 of 4 sequences run at once" in caplog.text and most == 2
    assert sum(event.sample is not None for event in streaming) == 4


def test_target_and_draft_are_given_room_together(tiny_folder, monkeypatch) -> None:
    model = forerun.load(str(tiny_folder))
    drafter = model.drafter(f"draft_model:model={tiny_folder}")
    caches = model.target.cache, drafter.runner.cache
    for cache in caches:  # as if nothing had been measured
        cache.slots.clear()
        cache._hold(cache.data[:, :0, :0])
    one = caches[0].check_room(1, 20)
    monkeypatch.setattr("forerun.runner.kv_cache.available_bytes", lambda device: 3 * one)
    run = model.run([[5] * 10], n=2, max_new_tokens=10, drafter=drafter)
    assert run.engine.scheduler.max_seqs == 1, "two of each would be four"
    assert drafter.check_room(1, 20, 2 * one) == one
    with pytest.raises(CapacityError, match="tokens of each: 20"):
        drafter.check_room(1, 20, 2 * one + 1)


def test_who_has_no_slot_yet_has_a_place(tiny_folder, caplog) -> None:
    """Five samples of a prompt share a slot while they say the same; three more calls fit in."""
    model = forerun.load(str(tiny_folder), max_seqs=8)
    options = {"temperature": 1.0, "max_new_tokens": 20, "drafter": "none"}
    first = model.run("abc", n=5, batch=5, seed=1, **options)
    steps = first.steps()
    next(steps)
    second = model.run("bcd", n=8, batch=8, seed=2, **options)
    assert second.engine.scheduler.max_seqs == 3
    assert "3 of 8 sequences run at once" in caplog.text
    both = itertools.zip_longest(steps, second.steps(), fillvalue=[])
    assert sum(len(ended) for pair in both for ended in pair) == 5 + 8


def test_a_step_tells_what_its_samples_have_in_common(tiny_folder) -> None:
    model = forerun.load(str(tiny_folder), max_seqs=8)
    rows, told = [0], []

    def hear(step) -> None:
        rows.append(model.target.num_rows)
        told.append(len(step.seqs) - step.num_common)

    options = {"n": 6, "batch": 6, "seed": 1, "temperature": 0.5, "max_new_tokens": 12}
    model.generate("abc", drafter="none", on_step=hear, **options)
    computed = np.diff(rows)
    assert told[0] == 1 and max(told) > 1, "they part"
    assert told[1:] == computed[1:].tolist()


def test_any_number_of_samples_begins_at_once(model) -> None:
    options = {"batch": 2, "max_new_tokens": 2, "seed": 3, "drafter": "none"}
    with pytest.raises(ConfigError, match=r"n must be at most 65536 .*; iterate over model\.run"):
        model.generate(PROMPT, n=10**12, **options)
    run = model.run(PROMPT, n=10**12, **options)
    events = run.events()
    samples = (event.sample for event in events if event.sample)
    found = {sample.index: sample.tokens for sample in itertools.islice(samples, 6)}
    assert len(run.engine.scheduler.waiting) <= 2
    events.close()
    assert all(slot.is_free for slot in model.target.cache.slots)
    (few,) = model.generate(PROMPT, n=6, **options)
    assert found == {sample.index: sample.tokens for sample in few.samples}


def test_a_prompt_alone_has_the_randomness_of_its_place_in_a_batch(model) -> None:
    options = {"n": 2, "max_new_tokens": 8, "seed": 5, "drafter": "none"}
    many = model.generate([PROMPT] * 4, **options)
    alone = sorted(model.run([PROMPT], numbers=[3], **options), key=lambda sample: sample.index)
    assert [sample.tokens for sample in alone] == [sample.tokens for sample in many[3].samples]
    assert [sample.tokens for sample in alone] != [sample.tokens for sample in many[0].samples]
    given = np.array([3])
    as_array = sorted(model.run([PROMPT], numbers=given, **options), key=lambda one: one.index)
    assert [sample.tokens for sample in as_array] == [sample.tokens for sample in alone]
    for numbers in ([-1], ["a"], [True], [1.0]):
        with pytest.raises(
            ConfigError, match="each number of a prompt must be a whole number of at least 0, got"
        ):
            model.run([PROMPT], numbers=numbers, **options)
    assert {sample.prompt_index for sample in alone} == {0}


def test_a_verifier_that_changes_what_is_said_is_told_of_once(tiny_folder, caplog) -> None:
    model = forerun.load(str(tiny_folder), dtype="fp32")
    for verifier in ("speculative", "typical", "typical"):
        model.generate([PROMPT], verifier=verifier, max_new_tokens=4, seed=0)
    told = [message for message in caplog.messages if "changes the output distribution" in message]
    assert len(told) == 1 and "typical" in told[0] and "speculative" in told[0]


@pytest.mark.parametrize("given", [{"prompt": PROMPT}, b"abc"])
def test_what_is_neither_a_prompt_nor_a_list_of_them_is_refused(model, given) -> None:
    with pytest.raises(DataError, match="expected a prompt or a list of them"):
        model.generate(given, max_new_tokens=1)


def test_texts_that_are_too_long_by_far_are_not_tokenised(model, monkeypatch) -> None:
    monkeypatch.setattr(model.tokenizer.inner, "encode", lambda *_, **__: pytest.fail("tokenised"))
    with pytest.raises(CapacityError, match=r"the prompt has at least \d+ tokens, but the context"):
        model.run("the cat " * 1_000_000)
