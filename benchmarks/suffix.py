"""Costs of the drafters `suffix` and `sam`: drafting, observing a step, growing, evicting.

    python benchmarks/suffix.py [--tokens 1000000] [--vocab 128000] [--budget-mb 4096]

A shared memory is filled with responses of 1000 tokens. Then a sequence continues in its style. Two
styles: "phrases", repeated phrases mixed with new words (long matches, few branches), and
"branches", each word followed by one of four (short matches, many branches). With a small budget
the time of filling includes eviction.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from time import perf_counter

import numpy as np
import scripts

from forerun import registry
from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Sequence, Step
from forerun.core.roles import Drafter
from forerun.core.sampling import Sampling
from forerun.ngrams.tables.suffix import automaton
from forerun.ngrams.tables.suffix import tree as suffix_tree

RESPONSE = 1000  # tokens
DRAFTERS = ("suffix", "suffix:factor=8", "sam:tokens=64", "sam:tokens=64,place=latest")
Style = Callable[[np.random.Generator, int], Iterator[list[int]]]


def phrases(rng: np.random.Generator, vocab: int) -> Iterator[list[int]]:
    """Pieces of a text: known phrases, the first ones more often, and fresh words."""

    def words(count: int) -> list[int]:
        return (rng.zipf(1.2, count) % vocab).tolist()

    known = [words(int(rng.integers(5, 60))) for _ in range(8000)]
    while True:
        yield known[int(8000 * rng.random() ** 3)] if rng.random() < 0.7 else words(20)


def branches(rng: np.random.Generator, vocab: int) -> Iterator[list[int]]:
    """Pieces of a text in which every one of 5000 words is followed by one of four, unevenly."""
    names = rng.choice(vocab, 5000, replace=False)
    following = rng.integers(0, 5000, (5000, 4))
    word = 0
    while True:
        piece = []
        for choice in rng.choice(4, 20, p=[0.5, 0.25, 0.15, 0.1]):
            word = int(following[word, choice])
            piece.append(int(names[word]))
        yield piece


def response(pieces: Iterator[list[int]]) -> list[int]:
    """A text of RESPONSE tokens."""
    text: list[int] = []
    while len(text) < RESPONSE:
        text += next(pieces)
    return text[:RESPONSE]


def sequence(tokens: list[int]) -> Sequence:
    return Sequence(list(tokens), 1, Sampling(), SeededDice(0), limit=10**9)


def step_of(seq: Sequence) -> Step:
    """What a drafter that reads texts needs of a step."""
    return Step([seq], [Plan()], [], [], [], [])


def fill(drafter: Drafter, pieces: Iterator[list[int]], tokens: int) -> None:
    """Responses that have ended; prints the cost per token as the memory grows."""
    held, marks = 0, [tokens // 100, tokens // 10, tokens]
    start, before = perf_counter(), 0
    while held < tokens:
        seq = sequence(response(pieces))
        drafter.start(seq)
        drafter.propose([seq], [Plan(nodes=1)], [seq.dice])
        drafter.finish(seq)
        held += RESPONSE
        if held >= marks[0]:
            per_token = 1e6 * (perf_counter() - start) / (held - before)
            print(f"  own and shared memory, up to {held:>8} tokens: {per_token:5.1f} us per token")
            start, before = perf_counter(), held
            marks.pop(0)
    size = sum(drafter.memory_report().values())
    print(f"  {size / 2**20:.0f} MiB, {size / held:.0f} bytes per token")


def measure(drafter: Drafter, pieces: Iterator[list[int]], rounds: int) -> None:
    """Drafts and steps of five tokens, alternately, in a sequence that goes on."""
    seq = sequence(response(pieces))
    drafter.start(seq)
    drafts, steps, sizes, ahead = [], [], [], []
    for _ in range(rounds):
        while len(ahead) < 5:
            ahead += next(pieces)
        start = perf_counter()
        tree = drafter.propose([seq], [Plan(nodes=64, depth=64)], [seq.dice])[0]
        middle = perf_counter()
        seq.tokens += ahead[:5]
        step, ahead = step_of(seq), ahead[5:]
        begin = perf_counter()
        drafter.observe(step)
        steps.append(perf_counter() - begin)
        drafts.append(middle - start)
        sizes.append(len(tree))
    full = np.array(sizes) == 64
    print(f"  {'microseconds':<44} median    p90    p99")
    show(f"draft, at most 64 nodes ({np.mean(sizes):.0f} filled)", np.array(drafts))
    if full.sum() > 20:
        show(f"draft, trees of 64 nodes ({full.sum()})", np.array(drafts)[full])
    show("observe a step of 5 tokens, own and shared", np.array(steps))
    drafter.finish(seq)


def show(what: str, seconds: np.ndarray) -> None:
    median, p90, p99 = 1e6 * np.quantile(seconds, [0.5, 0.9, 0.99])
    print(f"  {what:<44} {median:6.1f} {p90:6.1f} {p99:6.1f}")


def main() -> None:
    parser = scripts.parser(__doc__)
    parser.add_argument(
        "--tokens", type=scripts.count, default=1_000_000, help="tokens of the shared memory"
    )
    parser.add_argument("--vocab", type=scripts.count, default=128_000)
    parser.add_argument("--budget-mb", type=scripts.measure, default=4096)
    parser.add_argument("--rounds", type=scripts.count, default=2000)
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS))
    options = parser.parse_args()
    suffix_tree.warm_up()
    automaton.warm_up()
    print(f"machine: {platform.processor() or platform.machine()}, numpy {np.__version__}")
    styles: tuple[Style, ...] = (phrases, branches)
    for spec in options.drafters:
        for style in styles:
            print(f"{spec}, {style.__name__}")
            pieces = style(np.random.default_rng(0), options.vocab)
            drafter = registry.make("drafter", spec, budget_mb=options.budget_mb)
            fill(drafter, pieces, options.tokens)
            measure(drafter, pieces, options.rounds)


if __name__ == "__main__":
    scripts.run(main)
