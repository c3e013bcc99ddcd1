"""Sampling parameters as tensors: the laws of the host, row by row, and no word to the host."""

from __future__ import annotations

from copy import deepcopy
from itertools import product

import numpy as np
import pytest
import torch
from fake_device import AWAY, Watch
from test_speculative import random_tree

from forerun.constraints._penalties import FOLD_TOKENS, Adjust
from forerun.core.dice import SeededDice
from forerun.core.logits import TargetProbs
from forerun.core.records import Rows, Sequence
from forerun.core.sampling import Sampling, to_probs
from forerun.core.tree import EMPTY, Tree
from forerun.errors import ConfigError, LawError
from forerun.verifiers import _gpu_law
from forerun.verifiers.speculative import Speculative

EOS = 49
TRUNCATED = [
    Sampling(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in product((0.3, 1.0), (0, 1, 5, 5000), (0.05, 0.9, 1.0), (0.0, 0.1))
]
ADJUSTED = {
    "bias": {"logit_bias": {3: 4.0, 7: -100.0, 11: 0.5}},
    "bans": {"banned_tokens": (0, 1, 2)},
    "repetition": {"repetition_penalty": 1.4},
    "rewarded": {"repetition_penalty": 0.7},
    "counts": {"presence_penalty": 0.4, "frequency_penalty": 0.3},
    "frequency": {"frequency_penalty": -0.2},
    "short": {"min_new_tokens": 7, "stop_token_ids": (5,)},
    "all": {
        "logit_bias": {3: 4.0, 40: 2.0},
        "banned_tokens": (0, 1),
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "min_new_tokens": 6,
        "top_k": 12,
        "top_p": 0.9,
    },
}


def some_logits(rows: int, vocab: int, seed: int, *, has_ties: bool) -> torch.Tensor:
    """Random logits; with ties they are whole numbers."""
    found = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    return found.round() if has_ties else found


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("vocab", [7, 50, 3000])
def test_each_row_has_the_law_of_the_host(vocab: int, has_ties: bool) -> None:
    """The same tokens are kept, among ties the lowest ids."""
    logits = some_logits(6, vocab, vocab, has_ties=has_ties)
    logits[1, 3:] = -torch.inf
    for sampling in TRUNCATED:
        found = _gpu_law.probabilities(logits, sampling).numpy()
        for row, given in zip(found, logits.numpy(), strict=True):
            expected = to_probs(given, sampling)
            np.testing.assert_array_equal(row > 0, expected > 0, err_msg=str(sampling))
            np.testing.assert_allclose(row, expected, rtol=2e-5, atol=1e-9)


def test_top_p_counts_rounding_as_the_host_does() -> None:
    """Four equal tokens: half the mass takes two, and a little more takes three."""
    logits = torch.zeros(1, 4)
    for p, num in ((0.5, 2), (0.5001, 3), (0.25, 1), (0.75, 3), (0.9999999, 4)):
        kept = _gpu_law.probabilities(logits, Sampling(top_p=p)) > 0
        assert kept.tolist() == [[i < num for i in range(4)]]
        assert np.count_nonzero(to_probs(np.zeros(4, np.float32), Sampling(top_p=p))) == num


def laws_of(
    logits: torch.Tensor, tree: Tree, sampling: Sampling, generated: int = 4
) -> TargetProbs:
    """Laws with penalties after a prompt of 6 tokens and some generated ones."""
    tokens = np.random.default_rng(generated).integers(0, logits.shape[1], 6 + generated).tolist()
    seq = Sequence(tokens, 6, sampling, SeededDice(0), 99)
    shaper = Adjust((EOS,))
    seq.states = (shaper.start(seq),)
    for token in (3, 3, 9):  # generated since the summary of the state
        seq.tokens.append(token)
        seq.states = tuple(state and shaper.advance(state, token) for state in seq.states)
    return TargetProbs(Rows(logits), seq, tree, (shaper,))


@pytest.mark.parametrize("name", ADJUSTED)
@pytest.mark.parametrize("generated", [0, 4, FOLD_TOKENS - 5])
def test_shaped_logits_are_those_of_the_host_bit_by_bit(name: str, generated: int) -> None:
    """Along every path of random trees; long ones cross the fold of a history."""
    for seed in range(8):
        tree = random_tree(np.random.default_rng(seed), 50)
        logits = some_logits(len(tree) + 1, 50, seed, has_ties=False)
        laws = laws_of(logits, tree, Sampling(**ADJUSTED[name]), generated)
        before = logits.clone()
        found = laws.tensor_logits(logits).numpy()
        for node in range(-1, len(tree)):
            np.testing.assert_array_equal(found[node + 1], laws.logits(node))
        assert torch.equal(logits, before), "the model's logits are not written to"


def test_a_path_longer_than_a_summary_is_counted_once() -> None:
    from forerun.core.tree import chain

    tree = chain([3, 8, 3] * (FOLD_TOKENS // 2))
    logits = some_logits(len(tree) + 1, 50, 0, has_ties=False)
    laws = laws_of(logits, tree, Sampling(**ADJUSTED["all"]))
    found = laws.tensor_logits(logits).numpy()
    for node in range(-1, len(tree)):
        np.testing.assert_array_equal(found[node + 1], laws.logits(node))


SOME = [
    Sampling(temperature=0.0, **ADJUSTED["repetition"]),
    Sampling(temperature=0.7, top_k=9, top_p=0.8),
    Sampling(temperature=0.7, top_k=9, top_p=0.8, seed=1),
    Sampling(**ADJUSTED["all"]),
    Sampling(temperature=0.0),
    Sampling(temperature=0.4, min_p=0.2, **ADJUSTED["counts"]),
    Sampling(temperature=1.3),
]


def test_verdicts_and_entries_of_a_mixed_batch_are_those_of_the_host() -> None:
    """Greedy and sampled requests with and without penalties, together."""
    for seed in range(25):
        rng = np.random.default_rng(seed)
        trees = [random_tree(rng, 50) for _ in SOME[:-1]] + [EMPTY]
        logits = [
            some_logits(len(t) + 1, 50, seed + i, has_ties=False) for i, t in enumerate(trees)
        ]
        groups = []
        for tensors in (True, False):
            laws = [laws_of(*one) for one in zip(logits, trees, SOME, strict=True)]
            for law in laws:
                law.num_top_logits = 6
            dice = [SeededDice(seed, i) for i in range(len(trees))]
            found = Speculative(tensors=tensors).verify_all(trees, laws, dice)
            groups.append((found, [one.uniform() for one in dice]))
            if tensors:
                device = laws
        assert groups[0] == groups[1]
        for law, host, tree in zip(device, laws, trees, strict=True):
            nodes = list(range(-1, len(tree)))
            assert law.top_entries is not None
            ids, raw = law.top_entries.entries(nodes, 6, is_raw=True)
            _, own = law.top_entries.entries(nodes, 6, is_raw=False)
            for node in nodes:
                at_1 = to_probs(host.logits(node), Sampling())[ids[node + 1]]
                np.testing.assert_allclose(raw[node + 1], at_1, atol=2e-6)
                used = at_1 if law.sampling.is_greedy else host[node][ids[node + 1]]
                np.testing.assert_allclose(own[node + 1], used, atol=2e-6)


@pytest.mark.parametrize("sampling", SOME, ids=str)
def test_a_law_on_a_device_says_nothing_to_the_host_but_its_verdict(sampling: Sampling) -> None:
    tree = random_tree(np.random.default_rng(3), 50)
    logits = some_logits(len(tree) + 1, 50, 3, has_ties=False)
    expected = Speculative(tensors=False).verify(
        tree, laws_of(logits, tree, sampling), SeededDice(5)
    )
    with Watch() as watch:
        there = logits.to(AWAY, non_blocking=True)
        watch.events.clear()
        laws = laws_of(there, tree, sampling)
        (found,) = Speculative().verify_all([tree], [laws], [SeededDice(5)])
    assert found == expected
    waits = [kind for kind, _ in watch.events if kind not in ("to device", "product")]
    assert waits == ["to host"]


def test_a_constraint_on_the_host_is_verified_there() -> None:
    """Only its sequence; the laws are the same."""

    class Host(Adjust):
        has_tensors = False

    tree = random_tree(np.random.default_rng(1), 50)
    logits = some_logits(len(tree) + 1, 50, 1, has_ties=False)
    laws = [laws_of(logits, tree, SOME[3]) for _ in range(2)]
    laws[0]._shapers = (Host((EOS,)),)
    assert [law.has_tensors for law in laws] == [False, True]
    dice = [SeededDice(2), SeededDice(2)]
    one, other = Speculative(tensors=True).verify_all([tree, tree], laws, dice)
    assert one == other


@pytest.mark.parametrize(
    ("sampling", "fill", "error", "said"),
    [
        (Sampling(top_k=3), torch.nan, LawError, "expected a finite number"),
        (Sampling(top_p=0.5), torch.inf, LawError, "expected a finite number"),
        (Sampling(banned_tokens=tuple(range(50))), 0.0, ConfigError, "no token is allowed"),
        (Sampling(temperature=0.0, banned_tokens=tuple(range(50))), 0.0, ConfigError, "no token"),
        (Sampling(banned_tokens=(50,)), 0.0, IndexError, "50"),
    ],
)
def test_errors_are_those_of_the_host_and_leave_the_dice(
    sampling: Sampling, fill: float, error: type[Exception], said: str
) -> None:
    logits = torch.full((1, 50), fill)
    good = laws_of(torch.zeros(1, 50), EMPTY, Sampling())
    dice = [SeededDice(1), SeededDice(2)]
    before = deepcopy(dice)
    with pytest.raises(error, match=said):
        laws = [good, laws_of(logits, EMPTY, sampling)]
        Speculative(tensors=True).verify_all([EMPTY, EMPTY], laws, dice)
    assert [one.uniform() for one in dice] == [one.uniform() for one in before]
