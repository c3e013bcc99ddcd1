"""Superposed Decoding compared with nucleus sampling, greedy decoding and beam search.

    python benchmarks/superposed.py [--prompts 200] [--k 3] [--tokens 10] [--model FOLDER]

The embedded reasoner (or with --model one padded from it) continues beginnings of held-out problems
and solutions. The n-grams, 2 to 6 tokens, were counted in problems of the training split. Printed
for each way of making k drafts:

passes    of the model per prompt, with the prompt's
ms, least per prompt, median and minimum: k runs one after another, or k at once ("batch")
mean, best perplexity of the drafts under the plain model (the coherence proxy): all, and the best
n-gram    perplexity under the mixed 1-6-grams of the training split
distinct  share of drafts that differ from all others of their prompt
known     share of written 4-grams that occur in the training split

Superposed rows: as published; a = 0 without n-grams; a = 1 by n-grams alone. `law` is the distance
(total variation) of the superposed answer from the weighted mean of the drafts' own distributions,
by step; the method assumes 0.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scripts

import forerun
from forerun.core.forward_batch import ForwardBatch
from forerun.core.sampling import softmax
from forerun.ngrams.index.counts import trie
from forerun.ngrams.index.counts.trie import NgramModel
from forerun.runner.soft_embeddings import MixedStream
from forerun.search import _superposition as method
from forerun.search.superposed import ORDER, Draft, Settings, rescored, superposed
from forerun.tasks.reasoning import ReasoningTask

MIX = (0.05, 0.1, 0.15, 0.2, 0.25, 0.25)  # orders 1 .. 6 of the n-gram perplexity


@dataclass(frozen=True)
class Setup:
    """Everything that all ways share."""

    model: forerun.Model
    ngrams: NgramModel
    prompts: list[list[int]]
    k: int
    tokens: int


Made = tuple[list[Draft], int]  # drafts and passes


def begin(how: argparse.Namespace) -> Setup:
    """Loads the model, counts the training split, cuts held-out texts."""
    model = forerun.load(how.model)
    encode = model.tokenizer.encode
    train, held = ReasoningTask("train"), ReasoningTask("heldout")
    texts = [train.example(i) for i in range(how.corpus)]
    documents = [np.array(encode(e.prompt + e.reference), dtype=np.int32) for e in texts]
    vocab = model.tokenizer.vocab_size
    ngrams = NgramModel.count(documents, vocab_size=vocab, order=ORDER)
    print(f"{how.corpus} training problems: {ngrams.counts[0]} tokens, {len(ngrams)} n-grams")
    rng, prompts = np.random.default_rng(0), []
    for i in range(how.prompts):
        example = held.example(i)
        ids = encode(example.prompt + example.reference)
        prompts.append(ids[: int(rng.integers(15, len(ids) - how.tokens))])
    return Setup(model, ngrams, prompts, how.k, how.tokens)


def ways(setup: Setup) -> dict[str, Callable[[list[int]], Made]]:
    """What makes k drafts (greedy: one) of a prompt."""
    k, tokens, model = setup.k, setup.tokens, setup.model

    def superpose(**options: object) -> Callable[[list[int]], Made]:
        def run(prompt: list[int]) -> Made:
            how = {"ngrams": setup.ngrams, "k": k, "max_new_tokens": tokens} | options
            found = superposed(model, prompt, **how)  # type: ignore[arg-type]
            return found.drafts, found.num_passes

        return run

    def sample(n: int, batch: int, **options: float) -> Callable[[list[int]], Made]:
        def run(prompt: list[int]) -> Made:
            given = {"n": n, "max_new_tokens": tokens, "seed": 1, **options}
            result = model.generate([prompt], batch=batch, drafter="none", **given)[0]
            drafts = [Draft(tuple(s.tokens)) for s in result.samples]
            return drafts, max(s.stats.passes for s in result.samples) * (n // batch)

        return run

    nucleus = {"temperature": 0.6, "top_p": 0.9}
    return {
        "superposed": superpose(),
        "superposed, a = 0": superpose(ngram_weight=0.0),
        "superposed, a = 1": superpose(ngram_weight=1.0),
        "nucleus, k runs": sample(k, 1, **nucleus),
        "nucleus, batch": sample(k, k, **nucleus),
        "greedy, one draft": sample(1, 1, temperature=0.0),
        "beam": lambda prompt: beam(model, prompt, k, tokens),
    }


def beam(model: forerun.Model, prompt: list[int], k: int, num_tokens: int) -> Made:
    """Plain beam search of width k, scored by one tree pass a token."""
    alive: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(num_tokens):
        last = model.tokenizer.eos_ids
        open_ = [(s, t) for s, t in alive if not (t and t[-1] in last)]
        found = [(s, t) for s, t in alive if t and t[-1] in last]
        for (score, tokens), logits in zip(open_, leaves(model, prompt, open_), strict=True):
            logp = np.log(softmax(logits.astype(np.float64)))
            best = np.argsort(-logp)[:k]
            found += [(score + float(logp[t]), (*tokens, int(t))) for t in best]
        alive = sorted(found, reverse=True)[:k]
    return [Draft(tokens, score) for score, tokens in alive], num_tokens


def leaves(
    model: forerun.Model, prompt: list[int], paths: list[tuple[float, tuple[int, ...]]]
) -> list[np.ndarray]:
    """Logits [V] after each path, one pass over their trie."""
    from forerun.core.dice import SeededDice
    from forerun.core.records import Sequence
    from forerun.core.sampling import Sampling
    from forerun.core.tree import TreeBuilder

    seq = Sequence(prompt, len(prompt), Sampling(), SeededDice(0), limit=1)
    builder, where = TreeBuilder(), {(): -1}
    for _, tokens in paths:
        for i in range(1, len(tokens) + 1):
            if tokens[:i] not in where:
                where[tokens[:i]] = builder.add(tokens[i - 1], where[tokens[: i - 1]])
    rows = model.target.forward(ForwardBatch([seq], [builder.build()]))[0]
    model.target.release(seq)
    return [rows.row(where[tokens]) for _, tokens in paths]


def shown(values: list[float], unit: Callable[[float], float] = float) -> str:
    """A mean in its unit, or "-" of nothing."""
    return f"{unit(float(np.mean(values))):.2f}" if values else "-"


def perplexity(logp: float) -> float:
    return math.exp(-logp)


def measure(setup: Setup, run: Callable[[list[int]], Made]) -> str:
    """One row of the table."""
    run(setup.prompts[0])
    times, passes, mean, best, ngram, distinct, known = [], [], [], [], [], [], []
    for prompt in setup.prompts:
        start = time.perf_counter()
        drafts, num = run(prompt)
        times.append(1e3 * (time.perf_counter() - start))
        passes.append(num)
        logps = [np.mean(row) for row in rescored(setup.model, prompt, drafts)]
        mean.append(np.mean(logps))
        best.append(max(logps))
        distinct.append(len({d.tokens for d in drafts}) / len(drafts))
        for draft in drafts:
            text = [*prompt, *draft.tokens]
            ngram.append(-np.log(setup.ngrams.perplexity(text, len(prompt), weights=MIX)))
            places = range(len(prompt), len(text) - 3)
            known += [setup.ngrams.knows(text[i : i + 4]) for i in places]
    cells = [shown(passes), f"{statistics.median(times):.2f}", f"{min(times):.2f}"]
    cells += [shown(logp, perplexity) for logp in (mean, best, ngram)]
    cells += [shown(distinct), shown(known)]
    return "".join(f"{cell:>10}" for cell in cells)


def distances(setup: Setup, num: int) -> list[list[float]]:
    """Total variation between superposed answers and mixed plain laws, by step."""
    found: list[list[float]] = [[] for _ in range(setup.tokens - 1)]
    mixes: list[list[Draft]] = []
    kept = method.superposition

    def watched(drafts: list[Draft]) -> tuple[list[int], list[float]]:
        mixes.append(list(drafts))
        return kept(drafts)

    class Watch(MixedStream):
        def step(self, tokens: list[int], weights: list[float]) -> np.ndarray:  # type: ignore[override]
            logits = super().step(tokens, weights)
            plain = leaves(setup.model, prompt, [(d.score, d.tokens) for d in mixes[-1]])
            g = softmax(np.array([d.score for d in mixes[-1]]))
            law = sum(w * softmax(z.astype(np.float64)) for w, z in zip(g, plain, strict=True))
            gap = np.abs(softmax(logits.astype(np.float64)) - law).sum() / 2
            found[len(mixes[-1][0].tokens) - 1].append(float(gap))
            return logits

    method.superposition = watched  # type: ignore[assignment]
    try:
        for prompt in setup.prompts[:num]:
            how = Settings(k=setup.k)
            method.drafts_of(Watch(setup.model.target), prompt, setup.ngrams, how, setup.tokens)
    finally:
        method.superposition = kept
    return found


def main() -> None:
    parser = scripts.parser(__doc__)
    parser.add_argument("--model", default="reasoner")
    parser.add_argument("--prompts", type=scripts.count, default=200)
    parser.add_argument(
        "--corpus", type=scripts.count, default=2000, help="training problems to count"
    )
    parser.add_argument("--k", type=scripts.count, default=3)
    parser.add_argument("--tokens", type=scripts.count, default=10)
    setup = begin(how := parser.parse_args())
    trie.warm_up()
    print(f"{how.prompts} prompts, k {setup.k}, {setup.tokens} tokens, model {how.model}")
    names = ("passes", "ms", "least", "mean", "best", "n-gram", "distinct", "known")
    print(f"{'':<20}" + "".join(f"{name:>10}" for name in names))
    for name, run in ways(setup).items():
        print(f"{name:<20}{measure(setup, run)}", flush=True)
    gaps = distances(setup, min(50, how.prompts))
    print("law  " + (" ".join(map(shown, gaps)) or "-"))


if __name__ == "__main__":
    scripts.run(main)
