"""ASAp, "Grammar-Aligned Decoding" (2024): the sheet's exact oracles, and convergence to the
conditional law on a trap: a prefix that masking allows although the model would hardly complete it.

Strings are i.i.d. bits with P(0) = p, and the end is sure where the grammar allows only that.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import pytest

from fakes import FakeTarget, run_all, sequence
from forerun import registry
from forerun.constraints._request import RequestConstraint
from forerun.constraints.asap import MAX_BYTES, Asap, AsapMemory, Trie
from forerun.constraints.base import Constraint
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.records import Snapshot
from forerun.core.sampling import Sampling
from forerun.engine.engine import Engine
from forerun.errors import ConfigError

pytestmark = pytest.mark.paper

END = 2
Word = tuple[int, ...]


class Words(Constraint):
    """A finite language of bits; the end token follows a whole word."""

    eos_ids = (END,)

    def __init__(self, words: Many[Word]) -> None:
        self.words = set(words)

    def start(self, seq) -> Word:
        return tuple(seq.generated)

    def advance(self, state: Word, token: int) -> Word:
        return (*state, token)

    def allowed(self, state: Word) -> np.ndarray:
        return np.array([self.allows(state, token) for token in range(3)])

    def allows(self, state: Word, token: int) -> bool:
        if token == END:
            return state[: _end(state)] in self.words
        return any(word[: len(state) + 1] == (*state, token) for word in self.words)

    def is_complete(self, state: Word) -> bool:
        return state[: _end(state)] in self.words

    def begin(self, text: bytes) -> Word:
        raise NotImplementedError


def _end(state: Word) -> int:
    return state.index(END) if END in state else len(state)


def bits(words: Many[str]) -> list[Word]:
    return [tuple(map(int, word)) for word in words]


TRAP3 = bits(["000", *(f"1{a}{b}" for a in "01" for b in "01")])
TRAP5 = bits(["00000", *("1" + "".join(w) for w in itertools.product("01", repeat=4))])


def coin(p: float, length: int) -> Callable[[Many[int]], np.ndarray]:
    """P of a bit string of `length`, then the end."""

    def law(tokens: Many[int]) -> np.ndarray:
        never = 1e-300  # instead of 0, which has no logarithm
        return np.array([p, 1 - p, never] if len(tokens) < length else [never, never, 1.0])

    return law


def visit(
    trie: Trie, words: Many[Word], law: Callable[[Many[int]], np.ndarray], word: Word
) -> None:
    """Expands all prefixes of a word."""
    language = Words(words)
    for length in range(len(word) + 1):
        prefix = word[:length]
        ids = np.flatnonzero(language.allowed(prefix))
        trie.expand(prefix, ids, law(prefix)[ids])


def law_of(
    trie: Trie, words: Many[Word], law: Callable[[Many[int]], np.ndarray]
) -> dict[Word, float]:
    """The probability of every word under the trie's law; masking where nothing was visited."""
    language, found = Words(words), {}
    for word in words:
        prob = 1.0
        for at, token in enumerate(word):
            node, p = trie.find(word[:at]), law(word[:at])
            ids = np.flatnonzero(language.allowed(word[:at]))
            weights = p[ids] * (1.0 if node is None else node.weights(ids))
            prob *= weights[ids == token][0] / weights.sum()
        found[word] = prob
    return found


def conditional(words: Many[Word], law: Callable[[Many[int]], np.ndarray]) -> dict[Word, float]:
    """Q: the model's law given that the text is a word."""
    raw = {w: math.prod(law(w[:i])[t] for i, t in enumerate(w)) for w in words}
    return {w: p / sum(raw.values()) for w, p in raw.items()}


def kl(q: dict[Word, float], other: dict[Word, float]) -> float:
    return sum(p * math.log(p / other[w]) for w, p in q.items())


@pytest.mark.parametrize(
    ("words", "p", "trap", "q", "masked", "before", "bounds"),
    [
        (TRAP3, 0.5, (0, 0, 0), 0.2, 0.5, 0.192745, {(0, 0): 0.5, (0,): 0.25, (): 0.625}),
        (TRAP3, 0.9, (0, 0, 0), 0.879373, 0.9, 0.002233, {(0, 0): 0.9, (0,): 0.81, (): 0.829}),
        (TRAP5, 0.5, (0,) * 5, 1 / 17, 0.5, 0.469429, {(0,): 1 / 16}),
    ],
    ids=["G1", "G2", "G3"],
)
def test_one_visit_of_the_trap_gives_the_conditional_law(
    words, p, trap, q, masked, before, bounds
) -> None:
    """The sheet's numbers: bounds, law and KL before and after the first text in the trap."""
    law = coin(p, len(trap))
    trie, wanted = Trie(), conditional(words, law)
    assert wanted[trap] == pytest.approx(q, abs=1e-6)
    start = law_of(trie, words, law)
    assert start[trap] == pytest.approx(masked) and kl(wanted, start) == pytest.approx(
        before, abs=1e-6
    )
    visit(trie, words, law, trap)
    assert {path: trie.bound(path) for path in bounds} == pytest.approx(bounds)
    assert law_of(trie, words, law) == pytest.approx(wanted, abs=1e-12)


def test_a_text_outside_of_the_trap_changes_nothing() -> None:
    law, trie = coin(0.5, 3), Trie()
    before = law_of(trie, TRAP3, law)
    visit(trie, TRAP3, law, (1, 0, 1))
    assert trie.bound(()) == trie.bound((1,)) == trie.bound((1, 0, 1)) == 1.0
    assert law_of(trie, TRAP3, law) == before


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_texts_far_below_rounding_keep_their_ratios(order: tuple[int, ...]) -> None:
    """Bounds of 1e-40 that are what is left of 1: differences of doubles would end at 1e-17."""
    words = [(0,) * 40, (0, 1) * 20, (1, *(0,) * 39)]
    law, trie = coin(0.1, 40), Trie()
    wanted = conditional(words, law)
    for number in order:
        visit(trie, words, law, words[number])
    assert trie.bound(()) == pytest.approx(0.09**20, rel=1e-9)
    assert law_of(trie, words, law) == pytest.approx(wanted, rel=1e-9)


def test_bounds_never_rise_and_end_at_the_true_ones() -> None:
    """Random language of words of 1 to 6 bits, i.i.d. law with an end: c by plain recursion."""
    rng = np.random.default_rng(3)
    every = [w for n in range(1, 7) for w in itertools.product((0, 1), repeat=n)]
    words = [every[i] for i in rng.choice(len(every), 25, replace=False)]
    chances = {
        w: rng.dirichlet(np.ones(3))
        for n in range(7)
        for w in [*itertools.product((0, 1), repeat=n)]
    }
    language = Words(words)

    def law(prefix: Many[int]) -> np.ndarray:
        return chances[tuple(prefix)]

    def true_bound(prefix: Word) -> float:
        if END in prefix:
            return 1.0
        p, allowed = law(prefix), np.flatnonzero(language.allowed(prefix)).tolist()
        return sum(p[t] * true_bound((*prefix, t)) for t in allowed)

    trie, last = Trie(), 1.0
    for number in rng.permutation(len(words)):
        visit(trie, words, law, words[number])
        bound = trie.bound(())
        assert true_bound(()) - 1e-12 <= bound <= last + 1e-15
        last = bound
        ids, probs = trie.law(())
        assert probs.sum() == pytest.approx(1.0) and set(ids) <= {0, 1}
    prefixes = {w[:n] for w in words for n in range(len(w) + 1)}
    for prefix in prefixes:
        assert trie.bound(prefix) == pytest.approx(true_bound(prefix), abs=1e-12)


def test_raw_probabilities_are_not_renormalised() -> None:
    """Mass of forbidden tokens leaves the bounds of all prefixes above."""
    trie = Trie()
    trie.expand((), [0, 1], [0.3, 0.4])
    assert trie.bound(()) == pytest.approx(0.7)
    trie.expand((1,), [5], [0.25])
    assert trie.bound(()) == pytest.approx(0.3 + 0.4 * 0.25)
    ids, probs = trie.law(())
    assert ids.tolist() == [0, 1] and probs == pytest.approx([0.75, 0.25])


def test_misuse_has_an_error() -> None:
    trie = Trie()
    with pytest.raises(ConfigError, match="was not visited"):
        trie.expand((1,), [0], [1.0])
    with pytest.raises(ConfigError, match="are not known"):
        trie.law(())
    trie.expand((), [1], [1.0])
    with pytest.raises(ConfigError, match="not allowed"):
        trie.expand((0,), [0], [1.0])


def test_rows_beyond_the_limit_are_dropped_and_bounds_stay_upper_ones() -> None:
    trie = Trie(max_bytes=40)  # two rows of one token
    for path in ((), (7,), (7, 7), (7, 7, 7)):
        trie.expand(path, [7], [0.5])
    assert [trie.bound(path) for path in ((), (7,), (7, 7))] == [0.0625, 0.125, 0.25]
    with pytest.raises(ConfigError, match="are not known"):
        trie.law(())
    assert trie.law((7, 7, 7))[1].tolist() == [1.0]
    assert MAX_BYTES >= 1 << 20


def draw(
    constraint: Asap, law, length: int, count: int, seed: int, drafter: str = "none", t: float = 1.0
):
    """Words drawn one after the other through the engine."""
    request = RequestConstraint(None)  # type: ignore[arg-type]
    engine = Engine(
        FakeTarget(lambda tokens: law(tokens[1:])),
        registry.make("drafter", drafter),
        registry.make("verifier", "speculative"),
        Fixed(nodes=3, depth=3),
        shapers=(request,),
        max_seqs=1,
    )
    sampling = Sampling(temperature=t, constraint=constraint)
    seqs = [sequence((0,), length + 1, SeededDice(seed, i), sampling) for i in range(count)]
    return [words[: words.index(END)] for words in run_all(engine, seqs)]


@pytest.mark.parametrize("drafter", ["none", "stand:context=2,entries=3"])
def test_the_engine_samples_the_conditional_law(drafter: str) -> None:
    """300 texts through the engine: the trap comes with 1/17 (masking: 1/2), within 3.5 s.e."""
    constraint = Asap(Words(TRAP5))
    drawn = draw(constraint, coin(0.5, 5), 5, 300, seed=1, drafter=drafter)
    assert set(drawn) <= set(TRAP5)
    first = drawn.index((0,) * 5)
    later = Counter(drawn[first + 1 :])
    share, num = later[(0,) * 5] / len(drawn[first + 1 :]), len(drawn[first + 1 :])
    assert num > 250 and abs(share - 1 / 17) < 3.5 * math.sqrt(1 / 17 * 16 / 17 / num)
    (trie,) = constraint.memory.tries.values()
    assert law_of(trie, TRAP5, coin(0.5, 5)) == pytest.approx(
        conditional(TRAP5, coin(0.5, 5)), abs=1e-9
    )


def test_the_temperature_belongs_to_the_model() -> None:
    """At T = 0.5 the wanted law is that of P^2, normalised: 0.341 for the trap (masking: 0.692)."""
    constraint, law = Asap(Words(TRAP5)), coin(0.6, 5)
    sharp = coin(0.36 / (0.36 + 0.16), 5)
    drawn = draw(constraint, law, 5, 400, seed=3, t=0.5)
    later = drawn[drawn.index((0,) * 5) + 1 :]
    wanted = conditional(TRAP5, sharp)
    (trie,) = constraint.memory.tries.values()
    assert law_of(trie, TRAP5, sharp) == pytest.approx(wanted, abs=1e-9)
    share, q = later.count((0,) * 5) / len(later), wanted[(0,) * 5]
    assert abs(share - q) < 3.5 * math.sqrt(q * (1 - q) / len(later)) and q < 0.35


def test_kl_falls_tenfold_where_masking_stays() -> None:
    """A language of 60 words with traps; KL(Q || law) after 1, 10, 100, 1000 samples."""
    rng = np.random.default_rng(5)
    every = list(itertools.product((0, 1), repeat=8))
    words = [every[i] for i in rng.choice(len(every), 60, replace=False)]
    law, constraint = coin(0.7, 8), Asap(Words(words))
    wanted, found = conditional(words, law), []
    for count in (1, 9, 90, 900):
        draw(constraint, law, 8, count, seed=len(found))
        (trie,) = constraint.memory.tries.values()
        found.append(kl(wanted, law_of(trie, words, law)))
    masked = kl(wanted, law_of(Trie(), words, law))
    assert masked == pytest.approx(found[0], rel=0.2)
    print("KL after 1, 10, 100, 1000 samples:", found, "masking:", masked)
    assert found[2] < masked and found[3] < masked / 10


def test_an_unfinished_text_sets_no_bound_to_zero() -> None:
    constraint, request = Asap(Words(TRAP5)), RequestConstraint(None)  # type: ignore[arg-type]
    engine = Engine(
        FakeTarget(lambda tokens: coin(0.5, 5)(tokens[1:])),
        registry.make("drafter", "none"),
        registry.make("verifier", "speculative"),
        Fixed(nodes=3, depth=3),
        shapers=(request,),
    )
    seqs = [sequence((0,), 2, SeededDice(i), Sampling(constraint=constraint)) for i in range(8)]
    run_all(engine, seqs)
    (trie,) = constraint.memory.tries.values()
    assert trie.bound((0,)) == 0.5 and trie.bound(()) == 0.75  # as far as it was seen


def test_prompts_tenants_and_settings_have_tries_of_their_own() -> None:
    constraint = Asap(Words(TRAP3))
    for prompt, tenant, temperature in (
        ((0,), "", 1.0),
        ((1,), "", 1.0),
        ((0,), "b", 1.0),
        ((0,), "", 0.5),
    ):
        seq = sequence(prompt, 3, SeededDice(0), Sampling(temperature=temperature))
        seq.tenant = tenant
        constraint.start(seq)
    assert len(constraint.memory.tries) == 4


def test_what_was_learned_is_saved_and_loaded() -> None:
    """A copy goes on where the first one was: same bounds, same law, same next texts."""
    law, words = coin(0.5, 5), Words(TRAP5)
    words.key = lambda: "trap"  # type: ignore[method-assign]
    constraint, other = Asap(words), Asap(words)
    draw(constraint, law, 5, 20, seed=1)
    kept = constraint.memory.snapshot()
    settings = json.loads(json.dumps(kept.settings))
    other.memory.restore(Snapshot(kept.kind, kept.arrays, settings, kept.counts))
    (trie,), (loaded,) = constraint.memory.tries.values(), other.memory.tries.values()
    prefixes = {word[:n] for word in TRAP5 for n in range(6)}
    for path in prefixes:
        assert loaded.bound(path) == pytest.approx(trie.bound(path), abs=1e-15)
    assert (
        constraint.memory.tries.keys() == other.memory.tries.keys()
        and loaded.num_nodes == trie.num_nodes
    )
    assert draw(constraint, law, 5, 30, seed=2) == draw(other, law, 5, 30, seed=2)


def reloaded(trie: Trie) -> Trie:
    """A trie after a file."""
    memory, other = AsapMemory(), AsapMemory()
    memory.tries["words", "", (0,), 1.0] = trie
    other.restore(memory.snapshot())
    (found,) = other.tries.values()
    return found


def test_bounds_far_below_rounding_survive_a_file() -> None:
    """What is left of 1 is 1e-40: the masses alone would give 0, which forbids all texts."""
    words = [(0,) * 40, (0, 1) * 20, (1, *(0,) * 39)]
    law, trie = coin(0.1, 40), Trie()
    for number in (0, 2):
        visit(trie, words, law, words[number])
    loaded = reloaded(trie)
    prefixes = {word[:n] for word in words for n in range(41)}
    assert all(loaded.bound(path) == trie.bound(path) > 0 for path in prefixes)
    for one in (trie, loaded):
        visit(one, words, law, words[1])
        assert law_of(one, words, law) == pytest.approx(conditional(words, law), rel=1e-9)


def test_bounds_without_their_probabilities_stay_above_the_true_ones() -> None:
    """Subtractions alone lose all digits; a bound of 0 would forbid allowed texts."""
    words = [(0,) * 40, (0, 1) * 20, (1, *(0,) * 39)]
    law, trie = coin(0.1, 40), Trie()
    for word in words:
        for length in range(21):
            prefix = word[:length]
            ids = np.flatnonzero(Words(words).allowed(prefix))
            trie.expand(prefix, ids, law(prefix)[ids])
    trie.clear()
    for word in words:
        for length in range(20, 41):
            prefix = word[:length]
            ids = np.flatnonzero(Words(words).allowed(prefix))
            trie.expand(prefix, ids, law(prefix)[ids])
    chances = {w: math.prod(law(w[:i])[t] for i, t in enumerate(w)) for w in words}
    for path in {word[:n] for word in words for n in range(20)}:
        weight = math.prod(law(path[:i])[t] for i, t in enumerate(path))
        true = sum(p for w, p in chances.items() if w[: len(path)] == path) / weight
        assert trie.bound(path) >= true * (1 - 1e-9) > 0


def test_restored_tries_take_the_place_of_old_ones() -> None:
    """The probabilities of replaced tries no longer count."""
    constraint = Asap(Words(TRAP3))
    draw(constraint, coin(0.5, 3), 3, 5, seed=1)
    fresh, kept = AsapMemory(), constraint.memory.snapshot()
    for memory in (fresh, constraint.memory):
        memory.restore(kept)
    for memory in (fresh, constraint.memory):  # bytes are counted when a sequence starts
        memory.trie(constraint.inner, "", sequence((0,), 4, SeededDice(0)))
    assert constraint.memory.num_bytes == fresh.num_bytes > 0
