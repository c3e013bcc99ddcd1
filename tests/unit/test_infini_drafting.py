"""The kernel that drafts from an index equals the grower over its source, node by node."""

from __future__ import annotations

import numpy as np
import pytest

from fakes import PlainDice, sequence
from forerun.core.dice import SeededDice
from forerun.core.records import Plan
from forerun.core.sampling import Sampling
from forerun.core.tree import Tree
from forerun.drafters.infini import Infini
from forerun.ngrams.index.query.engine import Index

VOCAB = 12
OPTIONS: dict[str, dict[str, int]] = {
    "defaults": {},
    "few tokens are looked for": {"context": 2},
    "one token is": {"context": 1},
    "long matches only": {"min_length": 3},
    "frequent ones only": {"min_count": 5},
    "few next tokens are kept": {"entries": 3},
    "occurrences are sampled": {"max_support": 4},
}


def documents(rng: np.random.Generator) -> list[list[int]]:
    """Short texts of few words, so that every kind of end is near; the first words prevail."""
    return [
        np.minimum(rng.geometric(0.3, rng.integers(1, 30)), VOCAB - 2).tolist() for _ in range(40)
    ]


def drafter(eos: int | None, **options: object) -> Infini:
    made = Infini(index=Index.of(documents(np.random.default_rng(0)), eos=eos), **options)
    made.source.vocab_size = VOCAB  # as after bind
    return made


def both(made: Infini, text: list[int], plan: Plan, temperature: float) -> tuple[Tree, Tree]:
    """By the kernel and by the grower; the dice must have come equally far."""
    fast, plain = (
        sequence(list(text), 50, SeededDice(7), Sampling(temperature=temperature)) for _ in range(2)
    )
    assert made._has_kernel(fast)
    (tree,) = made.propose([fast], [plan], [fast.dice])
    (oracle,) = made.propose([plain], [plan], [PlainDice(plain.dice)])
    assert fast.dice.uniform() == plain.dice.uniform()
    return tree, oracle


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("eos", [None, 0, 5, VOCAB - 1])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_kernel_equals_the_grower(name: str, eos: int | None, temperature: float) -> None:
    rng, sizes = np.random.default_rng(1), []
    made = drafter(eos, **OPTIONS[name])
    texts = [*documents(rng), [VOCAB - 1], [3, 5], [99], [1, 99]]
    for i, text in enumerate(texts):
        plan = Plan(nodes=(1, 6, 40)[i % 3], depth=(1, 3, 16)[i // 3 % 3])
        tree, oracle = both(made, text, plan, temperature)
        assert tree.tokens.tolist() == oracle.tokens.tolist()
        for field in ("parents", "laws", "rows", "starts", "q_ids"):
            assert np.array_equal(getattr(tree, field), getattr(oracle, field)), field
        assert np.allclose(tree.q_probs, oracle.q_probs, rtol=1e-12, atol=0)
        sizes.append(len(tree))
    assert max(sizes) > 8  # trees with branches were compared


def test_ids_beyond_the_vocabulary_are_left_out() -> None:
    made = drafter(None)
    made.source.vocab_size = 4
    tree, oracle = both(made, [1, 2], Plan(nodes=40), 1.0)
    assert tree.tokens.tolist() == oracle.tokens.tolist() and tree.tokens.max() == 3


def test_a_text_that_ends_after_the_match_proposes_the_end() -> None:
    made = Infini(index=Index.of([[1, 2, 3]], eos=9))
    tree, oracle = both(made, [2, 3], Plan(nodes=40), 1.0)
    assert tree.tokens.tolist()[:1] == [9] == oracle.tokens.tolist()[:1]
    assert tree.tokens.tolist() == oracle.tokens.tolist()


def test_several_shards_are_left_to_the_grower() -> None:
    made = Infini(index=Index.of(documents(np.random.default_rng(0)), shards=2, eos=5))
    seq, alone = (sequence([1, 2], 50, SeededDice(7), Sampling()) for _ in range(2))
    assert not made._has_kernel(seq)
    (tree,) = made.propose([seq], [Plan(nodes=20)], [seq.dice])
    (oracle,) = made.propose([alone], [Plan(nodes=20)], [PlainDice(alone.dice)])
    assert tree.tokens.tolist() == oracle.tokens.tolist() and len(tree) > 10


def test_before_the_target_is_known_the_end_may_be_no_id_of_it() -> None:
    made = Infini(index=Index.of(documents(np.random.default_rng(0))))
    tree, oracle = both(made, [2, 3], Plan(nodes=60), 1.0)
    assert tree.tokens.tolist() == oracle.tokens.tolist()
    assert tree.tokens.max() == made.index.separator


def test_a_weight_too_small_to_be_drawn_is_none() -> None:
    made = Infini(index=Index.of([[1, 2], [1, 2], [1, 3]]))  # .5 ** 1040 is more than 0
    tree, oracle = both(made, [1], Plan(nodes=2, depth=1), 1 / 1040)
    assert tree.tokens.tolist() == oracle.tokens.tolist() == [2]
