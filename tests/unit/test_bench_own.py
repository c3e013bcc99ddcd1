"""Our own methods as contestants: names, what is recorded, prompts computed anew."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny

import forerun
from forerun.bench.contestants import Setup, warm_up_sampling
from forerun.bench.local_runner import LocalMethod, Parts, parts_of
from forerun.bench.method_names import check_name, is_local, make, split_methods, split_names
from forerun.bench.metrics import totals
from forerun.core.sampling import Sampling
from forerun.errors import ConfigError, UnknownName
from forerun.tasks.base import Example

EXAMPLE = Example("e", "the cat sat on the mat and", "")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_tiny(tmp_path_factory.mktemp("own") / "tiny", context=256)
    return forerun.load(folder, max_seqs=4)


def test_names_of_a_list() -> None:
    text = "none, stand:context=4,entries=5,nodes=8,prompt_lookup,fuse:parts=stand+prompt_lookup"
    assert split_methods(text) == [
        "plain",
        "stand:context=4,entries=5,nodes=8",
        "prompt_lookup",
        "fuse:parts=stand+prompt_lookup",
    ]
    assert split_names("needles:lengths=600+900,others=1,code", "task") == [
        "needles:lengths=600+900,others=1",
        "code",
    ]
    assert split_methods("vllm:ngram,tokens=3,stand,nodes=4") == [
        "vllm:ngram,tokens=3",
        "stand:nodes=4",
    ]
    with pytest.raises(ConfigError, match="'plain' is named twice"):
        split_methods("plain,stand,none")


def test_parts_of_a_name() -> None:
    assert parts_of("plain") == Parts("none")
    assert parts_of("stand:context=3,nodes=8,batch=4") == Parts(
        "stand:context=3", "fixed:nodes=8", batch=4
    )
    found = parts_of("prompt_lookup:verifier=recursive,controller=fixed,depth=3")
    assert found == Parts("prompt_lookup", "fixed:depth=3", "recursive")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("stnd", "unknown method 'stnd'; did you mean 'stand'"),
        ("plian", "did you mean 'plain'"),
        ("vlm", "did you mean 'vllm'"),
        ("stand:nods=3", "did you mean 'nodes'"),
        ("stand:verifer=greedy", "did you mean 'verifier'"),
        ("stand:verifier=recursve", "unknown verifier 'recursve'; did you mean 'recursive'"),
        ("stand:context=x", "option context takes"),
        ("stand:batch=0", "batch of method 'stand:batch=0' takes a whole number above 0"),
    ],
)
def test_wrong_names_are_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_name(name)
    assert said in str(caught.value)


def test_own_and_peer(tmp_path: Path) -> None:
    assert is_local("plain") and is_local("prompt-lookup") and not is_local("transformers:lookup")
    with pytest.raises(UnknownName):
        is_local("nobody")
    setup = Setup(tmp_path, "auto", 1)

    def unloaded() -> Any:
        raise AssertionError("a name must not load the model")

    assert make("stand", unloaded, setup).name == "stand"
    assert make("transformers:lookup", unloaded, setup).name == "transformers:lookup"


@pytest.mark.parametrize("name", ["plain", "stand", "prompt_lookup", "stand:batch=3,nodes=5"])
def test_an_outcome_adds_up(model: Any, name: str) -> None:
    contestant = LocalMethod(name, lambda: model)
    contestant.start()
    assert contestant.restarts == 0
    sampling = Sampling(n=3, temperature=0.7, max_new_tokens=20, seed=1, ignore_eos=True)
    contestant.warm_up(EXAMPLE, sampling)
    found = contestant.run(EXAMPLE, sampling)
    sums = totals(found.samples)
    assert [sample.tokens for sample in found.samples] == [20] * 3
    assert all(sample.text and sample.finish == "length" for sample in found.samples)
    assert sums.generated == 60 and sums.passes is not None and sums.passes <= 60
    if name == "plain":
        assert (sums.passes, sums.drafted, sums.tau) == (60, 0, 1.0)
    assert sums.tau == sums.predicted_tau
    engine = sum(sum(sample.seconds.values()) for sample in found.samples)
    assert 0 < (found.prefill_seconds or 0.0) < engine < found.seconds
    assert found.memory["weights"] > 0 and found.memory["kv cache"] > 0
    assert ("logit memory" in found.memory) == name.startswith("stand")
    assert not any(": " in part for part in found.memory)


@pytest.mark.parametrize("name", ["suffix:scope=tenant", "stand:scope=tenant"])
def test_a_prompt_never_meets_its_own_answers(model: Any, name: str) -> None:
    """Neither those of an earlier round, nor another method's; other prompts' are learned."""
    sampling = Sampling(temperature=0.0, max_new_tokens=24, ignore_eos=True)

    def passes(contestant: LocalMethod, example: Example) -> int:
        return totals(contestant.run(example, sampling).samples).passes or 0

    first, second = (
        LocalMethod(f"{name},controller=fixed,nodes=8", lambda: model) for _ in range(2)
    )
    first.warm_up(EXAMPLE, sampling)
    alone = passes(first, EXAMPLE)
    assert passes(first, EXAMPLE) == alone == passes(second, EXAMPLE)
    like = Example("like", " " + EXAMPLE.prompt, "")
    assert passes(second, like) < passes(LocalMethod(second.name, lambda: model), like)


def test_the_prompt_is_computed_anew_every_time_and_once(model: Any) -> None:
    contestant, counted = LocalMethod("plain", lambda: model), []
    sampling = Sampling(n=2, temperature=0.7, max_new_tokens=8, seed=1, ignore_eos=True)
    prompt = len(model.tokenizer.encode(EXAMPLE.prompt))
    contestant.warm_up(EXAMPLE, sampling)  # the cost curve is measured once, with passes of its own
    for _ in range(2):
        before = model.target.num_rows
        contestant.run(EXAMPLE, sampling)
        counted.append(model.target.num_rows - before)
    assert counted == [prompt + 15] * 2  # the last prompt row yields a token; 7 and 8 more passes


def test_prefill_is_the_first_pass_only(model: Any) -> None:
    """A prompt that takes most of the time takes most of the seconds, and is counted once."""
    long = Example("l", "the cat sat on the mat and the dog sat on the log " * 6, "")
    sampling = Sampling(n=4, temperature=0.7, max_new_tokens=4, seed=1, ignore_eos=True)
    contestant = LocalMethod("plain", lambda: model)
    contestant.run(long, sampling)
    found = contestant.run(long, sampling)
    forward = [sample.seconds["forward"] for sample in found.samples]
    assert (found.prefill_seconds or 0.0) <= forward[0] + 1e-6


@pytest.mark.parametrize(
    "name",
    ["stand", "draft_model:model=DRAFT,grower=greedy_mix,verifier=transport,controller=fixed"],
)
def test_the_optimum_is_computed_on_request(name: str) -> None:
    import forerun
    from forerun.assets import embedded

    model = forerun.load("reasoner", max_seqs=2)
    contestant = LocalMethod(name.replace("DRAFT", str(embedded("draft"))), lambda: model)
    sampling = Sampling(n=2, temperature=0.7, max_new_tokens=12, seed=1, ignore_eos=True)
    assert contestant.run(EXAMPLE, sampling).headroom is None
    contestant.has_headroom = True
    found = contestant.run(EXAMPLE, sampling).headroom
    assert found is not None and found["examined"] > 0
    assert 0 <= found["accepted"] <= found["examined"] and 0 < found["best"] <= found["examined"]
    plain = LocalMethod("plain", lambda: model)
    plain.has_headroom = True
    assert plain.run(EXAMPLE, sampling).headroom is None


def test_a_prompt_decoded_in_parts_is_the_same(model: Any) -> None:
    """Whoever runs in between on a cache of its own, which has read nothing of the prompt."""
    sampling = Sampling(n=3, temperature=0.7, max_new_tokens=20, seed=1, ignore_eos=True)
    whole, parted, other = (
        LocalMethod("stand:controller=fixed,nodes=8", own)
        for own in (lambda: model, *twins(model, 2))
    )
    expected = whole.run(EXAMPLE, sampling)
    one, two = parted.begin(EXAMPLE, sampling), other.begin(EXAMPLE, replace(sampling, seed=2))
    assert (one.tokens, two.tokens) == (0, 0)
    before = other.model().target.num_rows
    assert one.advance(3) and two.advance(1)
    prompt = len(model.tokenizer.encode(EXAMPLE.prompt))
    assert other.model().target.num_rows - before >= prompt, "it was read by the other alone"
    while one.advance(3):
        two.advance(1)
    assert one.tokens == 60 and 0 < two.tokens < 60 and not one.advance(3)
    found = one.finish()
    two.stop()
    assert not two.advance(1)
    bare = [replace(s, seconds={}) for s in found.samples]
    assert bare == [replace(s, seconds={}) for s in expected.samples]
    assert 0 < (found.prefill_seconds or 0.0) < found.seconds and found.memory["logit memory"] > 0
    assert all(one.model().target.num_held == 0 for one in (whole, parted, other))


def twins(model: Any, num: int) -> list[Any]:
    """Makers of so many models on the same weights."""
    return [cache(model.twin) for _ in range(num)]


def test_warm_up_is_short() -> None:
    few = warm_up_sampling(Sampling(n=16, max_new_tokens=512, min_new_tokens=100))
    assert (few.n, few.max_new_tokens, few.min_new_tokens) == (2, 64, 64)
    assert warm_up_sampling(Sampling(n=16, max_new_tokens=5), 8).n == 8
    assert warm_up_sampling(Sampling(n=3), 10**9).n == 3, "no more than will ever run at once"
