"""Microseconds per draft tree of REST, by size of the datastore and length of the match.

    python benchmarks/rest.py [--tokens 1000000,10000000] [--vocab 128000] [--nodes 64]

The datastore has tokens drawn by Zipf's law. Half of them are repeated passages with some tokens
changed, so matches of every length have several continuations. Queries are cut from other text of
the same kind. A dense query is one of the most frequent pairs, with thousands of places.
"""

from __future__ import annotations

import argparse
from time import perf_counter

import numpy as np
import scripts

from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Sequence
from forerun.core.sampling import Sampling
from forerun.drafters.rest import Rest
from forerun.ngrams.index.query.datastore import in_memory

PASSAGE, CHANGED = 200, 0.02


def text_of(rng: np.random.Generator, count: int, vocab: int, stock: np.ndarray) -> np.ndarray:
    """Half new tokens, half passages of the stock [n, PASSAGE] with some tokens changed."""
    pieces = []
    for _ in range(count // (2 * PASSAGE) + 1):
        passage = stock[rng.integers(len(stock))].copy()
        spots = rng.random(PASSAGE) < CHANGED
        passage[spots] = zipf(rng, int(spots.sum()), vocab)
        pieces += [passage, zipf(rng, PASSAGE, vocab)]
    return np.concatenate(pieces)[:count]


def zipf(rng: np.random.Generator, count: int, vocab: int) -> np.ndarray:
    """Token ids by Zipf's law."""
    return np.minimum(rng.zipf(1.2, count), vocab) - 1


def measure(drafter: Rest, contexts: list[list[int]], nodes: int) -> tuple[float, float, float]:
    """Median and 99th percentile of microseconds, and the mean size of the trees."""
    plan, dice = Plan(nodes, 16), SeededDice(0)
    seqs = [Sequence(c, len(c), Sampling(), dice, limit=1) for c in contexts]
    spent, sizes = [], []
    for seq in seqs:
        start = perf_counter()
        tree = drafter.propose([seq], [plan], [dice])[0]
        spent.append(1e6 * (perf_counter() - start))
        sizes.append(len(tree))
    return float(np.median(spent)), float(np.percentile(spent, 99)), float(np.mean(sizes))


def run(tokens: int, vocab: int, nodes: int, queries: int) -> None:
    rng = np.random.default_rng(0)
    stock = zipf(rng, tokens // 10, vocab)[: tokens // 10 // PASSAGE * PASSAGE].reshape(-1, PASSAGE)
    text = text_of(rng, tokens, vocab, stock)
    text[-1] = vocab - 1
    start = perf_counter()
    drafter = Rest(index=in_memory([text], None))
    print(f"{tokens} tokens: built in {perf_counter() - start:.1f} s, {drafter.memory_report()}")
    asked = text_of(rng, queries * 40, vocab, stock).tolist()
    ends = np.sort(rng.integers(20, len(asked), queries))
    any_text = [asked[max(0, end - 100) : end] for end in ends]
    pairs, counts = np.unique(text[:-1] * vocab + text[1:], return_counts=True)
    common = pairs[np.argsort(-counts)[:200]]
    dense = [[vocab - 2, int(pair) // vocab, int(pair) % vocab] for pair in common]
    print(f"  the commonest pairs have {counts.max()} to {np.sort(counts)[-200]} places")
    for name, contexts in {"text": any_text, "dense": dense}.items():
        measure(drafter, contexts[:50], nodes)
        median, slow, size = measure(drafter, contexts, nodes)
        print(f"  {name}: p50 {median:.0f} us, p99 {slow:.0f} us, {size:.1f} nodes")
        matches = [
            drafter.retrieve(Sequence(c, len(c), Sampling(), SeededDice(0), 1), Plan(nodes, 16))
            for c in contexts
        ]
        lengths, places = [m.match for m in matches], [m.places for m in matches]
        print(f"    match {np.mean(lengths):.1f} tokens at {np.median(places):.0f} places (median)")


def sizes(text: str) -> list[int]:
    """Numbers of tokens, joined by commas, each with room for a passage of the stock."""
    found = [scripts.count(one) for one in text.split(",")]
    if min(found) < 10 * PASSAGE:
        raise argparse.ArgumentTypeError(f"expected {10 * PASSAGE} tokens or more, got {text}")
    return found


def main() -> None:
    parser = scripts.parser(__doc__)
    parser.add_argument("--tokens", type=sizes, default="1000000,10000000")
    parser.add_argument("--vocab", type=scripts.count, default=128_000)
    parser.add_argument("--nodes", type=scripts.count, default=64)
    parser.add_argument("--queries", type=scripts.count, default=2000)
    given = parser.parse_args()
    for tokens in given.tokens:
        run(tokens, given.vocab, given.nodes, given.queries)


if __name__ == "__main__":
    scripts.run(main)
