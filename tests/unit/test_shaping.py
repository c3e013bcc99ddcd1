"""Every node's law is shaped with the history of its own path, and only when looked at."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import NoRepeats, sequence
from forerun.constraints._penalties import FOLD_TOKENS, Adjust
from forerun.core.dice import SeededDice
from forerun.core.logits import TargetProbs, advance
from forerun.core.records import Rows, Sequence
from forerun.core.sampling import Sampling, to_probs
from forerun.core.tree import Tree, TreeBuilder, chain

VOCAB = 6
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=8)


def seq_of(prompt: list[int], sampling: Sampling, shapers=()) -> Sequence:
    seq = sequence(prompt, 100, SeededDice(0), sampling)
    seq.states = tuple(shaper.start(seq) for shaper in shapers)
    return seq


def after(shaper: Adjust, prompt: list[int], generated: list[int], sampling: Sampling):
    """The shaper's state after a prompt and generated tokens."""
    state = shaper.start(seq_of(prompt, sampling))
    for token in generated:
        state = shaper.advance(state, token)
    return state


def formula(x: np.ndarray, s: Sampling, prompt: list[int], generated: list[int]) -> list[float]:
    """Bias, then repetition, then presence and frequency, token by token."""
    counts, seen, found = Counter(generated), {*prompt, *generated}, []
    for token, score in enumerate(x.tolist()):
        score += s.logit_bias.get(token, 0.0)
        if token in seen:
            score = score / s.repetition_penalty if score > 0 else score * s.repetition_penalty
        if counts[token]:
            score -= s.presence_penalty + s.frequency_penalty * counts[token]
        found.append(-np.inf if token in s.banned_tokens else score)
    return found


@settings(deadline=None)
@given(
    st.lists(st.floats(-5, 5), min_size=VOCAB, max_size=VOCAB),
    TOKENS.filter(bool),
    TOKENS,
    st.sampled_from([0.7, 1.0, 1.3]),
    st.sampled_from([-0.5, 0.0, 0.8]),
    st.sampled_from([-0.2, 0.0, 0.4]),
    st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-3, -0.1), max_size=3),
    st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
)
def test_adjusted_logits_equal_the_formula(
    logits, prompt, generated, repetition, presence, frequency, bias, banned
):
    s = Sampling(
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
        banned_tokens=banned,
    )
    if not s.adjusts:
        assert Adjust().start(seq_of(prompt, s)) is None
        return
    logits = np.array(logits)
    before, shaper = logits.copy(), Adjust()
    found = shaper.logits(after(shaper, prompt, generated, s), logits)
    np.testing.assert_allclose(found, formula(logits, s, prompt, generated), atol=1e-12)
    assert np.array_equal(logits, before), "a shaper must not write into its argument"


def test_frequency_counts_generated_tokens_only():
    s, shaper = Sampling(frequency_penalty=1.0), Adjust()
    found = shaper.logits(after(shaper, [2, 2, 2], [3, 3], s), np.zeros(VOCAB))
    assert found.tolist() == [0, 0, 0, -2, 0, 0]


def test_end_tokens_wait_for_min_new_tokens():
    s, shaper = Sampling(min_new_tokens=2, stop_token_ids=(4,)), Adjust(eos_ids=(5,))
    for count, waits in ((0, True), (1, True), (2, False)):
        found = shaper.logits(after(shaper, [0], [1] * count, s), np.zeros(VOCAB))
        assert (np.isneginf(found[[4, 5]]) == waits).all()
        assert np.isfinite(found[:4]).all()


def test_ignored_eos_need_not_wait():
    s, shaper = Sampling(min_new_tokens=2, ignore_eos=True), Adjust(eos_ids=(5,))
    assert np.isfinite(shaper.logits(after(shaper, [0], [], s), np.zeros(VOCAB))).all()


@pytest.mark.parametrize("count", [0, 1, 2])
def test_allows_agrees_with_the_shaped_logits(count):
    s = Sampling(min_new_tokens=2, stop_token_ids=(4,), banned_tokens=(1,))
    shaper = Adjust(eos_ids=(5,))
    state = after(shaper, [0], [2] * count, s)
    shaped = shaper.logits(state, np.zeros(VOCAB))
    allowed = [shaper.allows(state, token) for token in range(VOCAB)]
    assert allowed == np.isfinite(shaped).tolist()


def test_states_are_values():
    s, shaper = Sampling(frequency_penalty=1.0), Adjust()
    state = shaper.start(seq_of([0], s))
    left, right = shaper.advance(state, 1), shaper.advance(state, 2)
    assert (state.generated, left.generated, right.generated) == ({}, {1: 1}, {2: 1})


def plain(x: np.ndarray, s: Sampling, prompt: list[int], generated: list[int]) -> np.ndarray:
    """The formula again, token by token in the logits' own float type."""
    x, r, counts = x.copy(), s.repetition_penalty, Counter(generated)
    for token, bias in s.logit_bias.items():
        x[token] += bias
    for token in {*prompt, *generated}:
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token, count in counts.items():
        x[token] -= s.presence_penalty + s.frequency_penalty * count
    return x


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1.1),
        Sampling(presence_penalty=0.3, frequency_penalty=0.07),
        Sampling(repetition_penalty=0.9, frequency_penalty=-0.2, logit_bias={3: 1.5}),
    ],
    ids=lambda s: f"r{s.repetition_penalty}",
)
def test_states_of_long_branching_texts_equal_the_plain_version(sampling, dtype):
    """Bit for bit, past several summaries, and whatever its siblings did."""
    rng, shaper, vocab = np.random.default_rng(0), Adjust(), 40
    prompt = rng.integers(0, 30, 20).tolist()
    states = [([], shaper.start(seq_of(prompt, sampling)))]
    for _ in range(5 * FOLD_TOKENS):
        text, state = states[-1 - rng.integers(0, min(3, len(states)))]  # often not the last one
        token = int(rng.integers(0, vocab))
        states.append(([*text, token], shaper.advance(state, token)))
    assert max(len(text) for text, _ in states) > 2 * FOLD_TOKENS
    for text, state in states:
        logits = rng.normal(0, 4, vocab).astype(dtype)
        found = shaper.logits(state, logits)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, plain(logits, sampling, prompt, text))
        assert state.generated == Counter(text) and state.num_generated == len(text)


def test_a_state_shares_what_was_counted_before():
    s, shaper = Sampling(frequency_penalty=1.0), Adjust()
    seq = seq_of([0], s)
    seq.tokens += [1, 2, 3] * 200
    first = shaper.start(seq)
    second = shaper.advance(first, 4)
    assert second.past is first.past, "no count is copied for a node"
    assert (second.generated[4], first.generated[4]) == (1, 0)


def test_advance_leaves_idle_shapers_alone():
    shapers = (Adjust(), NoRepeats())
    seq = seq_of([3], Sampling(), shapers)
    assert seq.states == (None, 3)
    assert advance(shapers, seq.states, 5) == (None, 5)


def forked() -> Tree:
    """Root -> 1 -> 2, and root -> 3."""
    builder = TreeBuilder()
    builder.add(2, builder.add(1))
    builder.add(3)
    return builder.build()


def laws_of(s: Sampling, shapers, logits: np.ndarray) -> tuple[TargetProbs, Tree]:
    tree = forked()
    rows = Rows(torch.from_numpy(logits))
    return TargetProbs(rows, seq_of([0], s, shapers), tree, shapers), tree


def test_every_node_is_shaped_with_its_own_path():
    s = Sampling(temperature=0.7, repetition_penalty=1.5, frequency_penalty=0.5, top_k=4)
    logits = np.random.default_rng(0).normal(size=(4, VOCAB)) * 2
    laws, tree = laws_of(s, (Adjust(),), logits)
    for node in (2, 1, -1, 0):  # in any order
        shaped = np.array(formula(logits[node + 1], s, [0], tree.path(node)))
        np.testing.assert_allclose(laws[node], to_probs(shaped, s), atol=1e-12)


def test_shapers_act_one_after_the_other():
    s = Sampling(banned_tokens=(5,))
    laws, _ = laws_of(s, (Adjust(), NoRepeats()), np.zeros((4, VOCAB)))
    assert np.flatnonzero(laws[-1] == 0).tolist() == [0, 5]
    assert np.flatnonzero(laws[1] == 0).tolist() == [2, 5]


def test_only_nodes_that_are_looked_at_cost_anything(monkeypatch):
    asked: list[int] = []
    row = Rows.row
    monkeypatch.setattr(Rows, "row", lambda self, node: asked.append(node) or row(self, node))
    laws, _ = laws_of(Sampling(banned_tokens=(5,)), (Adjust(),), np.zeros((4, VOCAB)))
    assert asked == []
    for _ in range(3):
        laws[1], laws.logits(1)
    assert asked == [1]


def test_logprobs_are_the_models_own():
    s = Sampling(temperature=0.3, top_k=1, banned_tokens=(2,))
    logits = np.log(np.tile([0.1, 0.2, 0.3, 0.2, 0.1, 0.1], (4, 1)))
    laws, _ = laws_of(s, (Adjust(),), logits)
    np.testing.assert_allclose(laws.logprobs(0), logits[1], atol=1e-12)
    assert laws[0][2] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rows_of_any_float_type_become_numpy(dtype):
    row = Rows(torch.zeros(2, 5, dtype=dtype)).row(-1)
    assert row.shape == (5,)
    assert row.dtype == (np.float64 if dtype is torch.float64 else np.float32)


def test_laws_that_a_verifier_held_are_one_array_and_others_are_not() -> None:
    """A prefix of what was held comes as it lies; any other order is looked up node by node."""
    tree = chain([0, 1, 2])
    rows = Rows(np.random.default_rng(0).normal(size=(4, VOCAB)).astype(np.float32))
    laws = TargetProbs(rows, seq_of([0], Sampling(temperature=1.0)), tree, ())
    plain = TargetProbs(rows, seq_of([0], Sampling(temperature=1.0)), tree, ())
    probs = np.stack([plain[node] for node in (-1, 0, 1, 2)])
    laws.set_probs([-1, 0], probs)  # with room for more than was visited
    for nodes in ([-1], [-1, 0], [], [0], [-1, 1], [-1, 0, 1], [-1, 0, 2, 1]):
        found = laws.at(nodes)
        assert isinstance(found, np.ndarray) == (nodes in ([-1], [-1, 0], []))
        assert len(found) == len(nodes)
        for node, law in zip(nodes, found, strict=True):
            np.testing.assert_allclose(law, plain[node], rtol=1e-6)
    other = laws.with_rows(Rows(rows.logits.flip(1)))
    assert not np.allclose(other.at([-1])[0], laws[-1])
