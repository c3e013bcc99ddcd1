"""Prompt positions teach, too, where that is asked; and the law with memories from elsewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fakes import FakeTarget, table_law
from forerun import registry
from forerun.api import Model, load
from forerun.core.dice import SeededDice
from forerun.core.growing import Path as TokenPath
from forerun.core.records import Plan, Sequence
from forerun.core.sampling import Sampling
from forerun.core.tree_template import grid
from forerun.drafters.stand import Stand
from forerun.errors import ConfigError
from harness import distance


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> Model:
    return load(tiny_folder, dtype="fp32")


def sequence(tokens: list[int], group: object = 0, **sampling: float) -> Sequence:
    asked = Sampling(**sampling)
    return Sequence(list(tokens), len(tokens), asked, SeededDice(0), limit=99, group=group)


class RowsTarget(FakeTarget):
    """Gives rows after draft paths, as a runner does; counts them."""

    def rows_at(self, requests: list[tuple[Sequence, TokenPath]]) -> torch.Tensor:
        self.num_rows = getattr(self, "num_rows", 0) + len(requests)
        laws = [self.law([*seq.tokens, *path]) for seq, path in requests]
        return torch.from_numpy(np.log(np.stack(laws)))


@pytest.mark.parametrize("length", [1, 2, 64, 65, 66, 150])
def test_every_prompt_position_but_the_last_teaches_once(length: int) -> None:
    law, tokens = table_law(5), np.random.default_rng(length).integers(0, 3, length).tolist()
    drafter = Stand(context=2, seed_from_prompt=True)
    target = RowsTarget(law)
    drafter.bind(target)
    seq = sequence(tokens)
    drafter.start(seq)
    drafter.start(sequence(tokens))  # another trajectory of the group
    memory = drafter.memory(seq)
    counts, keys = memory.table.counts, memory.table.keys
    assert counts[keys != 0].sum() == sum(min(at, 2) for at in range(1, length))
    assert memory.observed == length - 1 == getattr(target, "num_rows", 0)
    for at in range(2, length):  # the law hangs on two tokens, so its means are itself
        q, dense = memory.lookup(tokens[:at]), np.zeros(3)
        assert q is not None
        dense[q.ids] = q.probs
        np.testing.assert_allclose(dense, law(tokens[:at]), atol=1e-5)


def test_prompts_are_learned_as_sampled_from_or_as_the_model_says() -> None:
    law = table_law(7)
    for options, expected in (
        ({}, lambda p: p**2 / (p**2).sum()),
        ({"scope": "tenant"}, lambda p: p),
    ):
        drafter = Stand(seed_from_prompt=True, **options)
        drafter.bind(RowsTarget(law))
        seq = sequence([0, 1, 2], temperature=0.5)
        drafter.start(seq)
        slot = drafter.memory(seq).rows()
        found = {round(float(p), 5) for p in slot.probs[slot.counts == 1].ravel() if p > 0}
        assert found == {round(float(p), 5) for t in ([0], [0, 1]) for p in expected(law(t))}


def test_a_forgotten_group_may_be_seeded_again() -> None:
    drafter = Stand(seed_from_prompt=True, scope="tenant")
    target = RowsTarget(table_law(5))
    drafter.bind(target)
    for expected in (2, 4):
        drafter.start(seq := sequence([0, 1, 2], group="g"))
        drafter.finish(seq)
        drafter.forget("g")
        assert target.num_rows == expected


def test_a_target_without_such_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="seed_from_prompt needs a target with rows"):
        Stand(seed_from_prompt=True).bind(FakeTarget(table_law(1)))


def test_seeding_a_real_model_changes_no_greedy_text(tiny: Model) -> None:
    prompt = "one two three four five six seven eight nine ten and " * 2
    options = {"temperature": 0.0, "max_new_tokens": 20}
    for batch in (1, 3):
        plain = tiny.generate([prompt, "the cat"], drafter="none", batch=batch, **options)
        seeded = tiny.generate(
            [prompt, "the cat"], drafter="stand:seed_from_prompt=true", batch=batch, n=2, **options
        )
        assert [r.text for r in plain] == [r.text for r in seeded]


def test_a_real_model_teaches_its_own_laws_at_the_prompt(tiny: Model) -> None:
    drafter = Stand(seed_from_prompt=True, scope="tenant", context=1, entries=256)
    tokens = tiny.tokenizer.encode("the cat sat on the dog " * 4)
    tiny.generate([tokens], drafter=drafter, controller="fixed", max_new_tokens=1, seed=0)
    memory = drafter.memory(sequence(tokens)).fallback
    assert memory is not None
    assert memory.observed == len(tokens)  # the prompt's, and the first step's
    (first,) = tiny.generate([tokens[:1]], drafter="none", max_new_tokens=1, logprobs=5, seed=0)
    wanted = {t: np.exp(p) for t, p in first.samples[0].logprobs[0].items()}
    rows = memory.rows()
    laws = [dict(zip(*pair, strict=True)) for pair in zip(rows.ids, rows.probs, strict=True)]
    assert any(all(abs(p - law.get(t, 0)) < 1e-4 for t, p in wanted.items()) for law in laws)


# tokens of the prompt, without a pass


def top(drafter: Stand, seq: Sequence, tokens: list[int]) -> dict[int, float]:
    found = drafter.memory(seq).lookup(tokens)
    return {} if found is None else dict(zip(found.ids.tolist(), found.probs.tolist(), strict=True))


def test_prompt_tokens_are_learned_where_they_stand() -> None:
    drafter = Stand(context=2, copy_prompt=True)
    drafter.bind(FakeTarget(table_law(1)))
    tokens = [0, 1, 2, 0, 1, 3, 2]
    seq = sequence(tokens)
    drafter.start(seq)
    assert top(drafter, seq, [0]) == {1: 1.0}
    assert top(drafter, seq, [0, 1]) == top(drafter, seq, [1]) == {2: 0.5, 3: 0.5}
    assert top(drafter, seq, [2, 0]) == {1: 1.0}
    assert top(drafter, seq, [1, 3]) == {2: 1.0}
    assert drafter.memory(seq).observed == len(tokens) - 1
    drafter.start(sequence(tokens))  # another trajectory of the group
    assert drafter.memory(seq).observed == len(tokens) - 1


def test_every_request_with_a_memory_of_its_own_copies_its_prompt() -> None:
    drafter = Stand(copy_prompt=True, scope="request")
    drafter.bind(FakeTarget(table_law(1)))
    seqs = [sequence([0, 1, 2]), sequence([0, 1, 2])]
    for seq in seqs:
        drafter.start(seq)
        assert top(drafter, seq, [0, 1]) == {2: 1.0}


def test_a_wide_memory_holds_no_copied_prompt() -> None:
    drafter = Stand(copy_prompt=True, scope="tenant")
    drafter.bind(FakeTarget(table_law(1)))
    seq = sequence([0, 1, 2])
    drafter.start(seq)
    assert top(drafter, seq, [0, 1]) == {2: 1.0}
    assert drafter.snapshot().counts["tokens"] == 0
    assert not len(drafter.snapshot().arrays["keys"].nonzero()[0])
    assert top(drafter, sequence([3, 0, 1], group="other"), [0, 1]) == {}


@pytest.mark.parametrize("length", [1, 2])
def test_short_prompts_are_copied_too(length: int) -> None:
    drafter = Stand(copy_prompt=True)
    drafter.bind(FakeTarget(table_law(1)))
    seq = sequence([0, 1, 2][:length])
    drafter.start(seq)
    assert drafter.memory(seq).observed == length - 1


def test_a_copied_prompt_changes_no_greedy_text(tiny: Model) -> None:
    prompt = "one two three four five six seven eight nine ten and " * 2
    options = {"temperature": 0.0, "max_new_tokens": 20}
    (plain,) = tiny.generate([prompt], drafter="none", **options)
    spec = "stand:copy_prompt=true"
    (copied,) = tiny.generate([prompt], drafter=spec, controller="fixed", n=2, **options)
    assert {sample.text for sample in copied.samples} == {plain.text}


# laws


def restored() -> Stand:
    """A drafter whose memory came from elsewhere, and is wrong about everything."""
    source = Stand(scope="tenant", context=1, entries=3, template=grid(2, 1))
    for token in range(3):
        law = np.random.default_rng(token).dirichlet(np.ones(3))
        source.memory(sequence([1])).update([token], [0, 1, 2], law)
    drafter = Stand(context=1, entries=3, template=grid(2, 1))
    drafter.restore(source.snapshot())
    return drafter


def seeded() -> Stand:
    return Stand(context=1, entries=3, template=grid(2, 1), seed_from_prompt=True)


def copied() -> Stand:
    return Stand(context=1, entries=3, template=grid(2, 1), copy_prompt=True)


@pytest.mark.parametrize("make", [restored, seeded, copied])
@pytest.mark.parametrize(
    ("plan", "lengths"), [(Plan(2, 2), (3,)), (Plan(3, 2), (3,)), (Plan(1, 1), (1, 2))]
)
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.5, top_k=2)], ids=["free", "top-k 2"]
)
def test_the_law_is_kept(
    monkeypatch: pytest.MonkeyPatch, make, plan: Plan, lengths: tuple[int, ...], sampling: Sampling
) -> None:
    monkeypatch.setattr(FakeTarget, "rows_at", RowsTarget.rows_at, raising=False)
    rule = registry.make("verifier", "recursive")
    error = distance(table_law(1), make, rule, plan=plan, lengths=lengths, sampling=sampling)
    assert error <= 1e-12
