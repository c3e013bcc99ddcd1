"""Costs of STAND in microseconds: drafting, learning, top-10 selection, verification.

    python benchmarks/memory.py [--contexts 1000000] [--vocab 32000]
    python benchmarks/memory.py --part lookups [--sizes 1000 10000000]
    python benchmarks/memory.py --part bytes [--problems 4]

A memory is filled from random text up to about a million contexts. Most long contexts are missing
there, so each look-up backs off through several cache misses: the worst case. `lookups` shows the
cost of a look-up as the table grows to ten million contexts (1.5 GB). `bytes` shows the memory per
generated token while the embedded reasoner solves problems. Prints the median and the minimum of
repeated calls.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from time import perf_counter

import numpy as np
import scripts
from numba import njit

from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Sequence, Step, Verdict
from forerun.core.sampling import Sampling
from forerun.core.tree import Tree, chain
from forerun.drafters.stand import Stand
from forerun.ngrams.tables.logits import kernels
from forerun.ngrams.tables.logits.kernels import Table
from forerun.ngrams.tables.logits.table import NEUTRAL, LogitMemory, warm_up
from forerun.ngrams.tables.logits.top_k import select_top
from forerun.verifiers import speculative
from forerun.verifiers.recursive import Recursive

ENTRIES = 10
TEXT_VOCAB = 5000
SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
BATCH = 100_000  # look-ups that are timed together


class OneLaw(dict):
    """The same law at every node."""

    def __init__(self, p: np.ndarray, nodes: int) -> None:
        super().__init__(dict.fromkeys(range(-1, nodes), p))
        self.sampling, self.top_entries = Sampling(), None

    def unshaped(self) -> None:
        """No logits: the law is there."""

    def at(self, nodes: list[int]) -> list[np.ndarray]:
        return [self[node] for node in nodes]


def measure(work: Callable[[int], object], repeats: int) -> str:
    """Median and least time of work(i) in microseconds."""
    times = []
    for i in range(repeats):
        start = perf_counter()
        work(i)
        times.append(perf_counter() - start)
    return f"{1e6 * np.median(times):9.1f} {1e6 * min(times):9.1f}"


def show(what: str, figures: str) -> None:
    print(f"{what:<58}{figures}")


def fill(memory: LogitMemory, text: np.ndarray, rng: np.random.Generator) -> None:
    """Learns a whole text: the token that came next leads each observation, others of it follow."""
    for start in range(0, len(text) - 1, 20_000):
        part = text[start : start + 20_001]
        ids = rng.choice(text, (len(part) - 1, ENTRIES)).astype(np.int32)  # so that trees are full
        ids[:, 0] = part[1:]
        probs = np.sort(rng.random((len(ids), ENTRIES)).astype(np.float32))[:, ::-1] / ENTRIES
        nodes = np.arange(len(ids), dtype=np.int32)
        memory.learn(memory.context([]), chain(part[:-1]), nodes, ids, np.ascontiguousarray(probs))


def filled_drafter(contexts: int, rng: np.random.Generator) -> tuple[Stand, Sequence, np.ndarray]:
    """A drafter with a memory of about `contexts` contexts, a sequence, and the learned text."""
    drafter = Stand(budget_mb=4096)
    seq = Sequence([0], 1, Sampling(), SeededDice(0), limit=10**9, group=0)
    memory, text = drafter.memory(seq), rng.integers(0, TEXT_VOCAB, contexts // 3)
    start = perf_counter()
    fill(memory, text, rng)
    per_token = (perf_counter() - start) / len(text)
    print(
        f"memory: {len(memory)} contexts, {memory.nbytes / 2**20:.0f} MiB, "
        f"{1e6 * per_token:.1f} us per token to fill (4 contexts each, growth included)"
    )
    return drafter, seq, text


def drafting(drafter: Stand, seq: Sequence, text: np.ndarray, rng: np.random.Generator) -> None:
    for nodes in (16, 64, 256):
        plan, sizes = Plan(nodes=nodes), []

        def draft(i: int, plan: Plan = plan, sizes: list[int] = sizes) -> None:
            at = int(rng.integers(4, len(text)))
            seq.tokens = text[at - 4 : at].tolist()
            sizes.append(len(drafter.propose([seq], [plan], [seq.dice])[0]))

        figures = measure(draft, 2000)
        show(f"draft, {nodes}-node template ({np.mean(sizes):.0f} nodes filled)", figures)


def learning(drafter: Stand, seq: Sequence, rng: np.random.Generator) -> None:
    memory = drafter.memory(seq)
    ids = np.arange(ENTRIES, dtype=np.int32)[None].repeat(5, axis=0)
    probs = np.linspace(0.3, 0.01, ENTRIES, dtype=np.float32)[None].repeat(5, axis=0)
    nodes = np.arange(-1, 4, dtype=np.int32)
    trees = [chain(rng.integers(0, TEXT_VOCAB, 5)) for _ in range(2000)]

    def learn(i: int) -> None:
        memory.learn(memory.context([1, 2, 3, 4]), trees[i], nodes, ids, probs)

    show("update after a step of 5 tokens (20 contexts)", measure(learn, 2000))


def rows(drafter: Stand, seq: Sequence, vocab: int, rng: np.random.Generator) -> None:
    """What depends on the vocabulary: selection, the whole observe, verification."""
    p = rng.dirichlet(np.full(vocab, 0.05)).astype(np.float32)
    ids, probs = np.zeros(ENTRIES, np.int32), np.zeros(ENTRIES, np.float32)
    show(
        f"top-10 selection of one row, V = {vocab}",
        measure(lambda i: select_top(p, ids, probs), 500),
    )
    select_then_learn = observed_step(drafter, seq, p, rng)
    show(f"observe a step of 5 tokens, V = {vocab} (selection included)", select_then_learn)
    tree = drafter.propose([seq], [Plan(nodes=64)], [seq.dice])[0]
    laws, dice = OneLaw(p, len(tree)), SeededDice(1)
    for verifier, count in ((speculative.Speculative(), 500), (Recursive(), 50)):
        name = type(verifier).__name__.lower()
        figures = measure(lambda i, v=verifier: v.verify(tree, laws, dice), count)
        show(f"verify one 64-node tree, V = {vocab}, {name}", figures)


def observed_step(drafter: Stand, seq: Sequence, p: np.ndarray, rng: np.random.Generator) -> str:
    tree: Tree = chain(rng.integers(0, TEXT_VOCAB, 4))
    verdict = Verdict([0, 1, 2, 3], 7)
    emitted = verdict.tokens(tree)
    seq.tokens = [1, 2, 3, 4, *emitted]
    step = Step([seq], [Plan()], [tree], [OneLaw(p, 4)], [verdict], [emitted])
    return measure(lambda i: drafter.observe(step), 500)


@njit(nogil=True)
def look_up_all(
    near: Table,
    far: Table,
    lengths: np.ndarray,
    contexts: np.ndarray,
    ids: np.ndarray,
    probs: np.ndarray,
) -> int:
    """Looks up every context [m, longest]; returns how many are known at some length."""
    found, hashes = 0, np.empty(contexts.shape[1], np.uint64)  # room as drafting has it
    for i in range(len(contexts)):
        context = contexts[i]
        size, _ = kernels.look_up(near, far, lengths, 0, context, NEUTRAL, hashes, ids, probs, 0)
        found += size > 0
    return found


def lookups(sizes: list[int], rng: np.random.Generator) -> None:
    """Time of a look-up as one memory grows: of contexts that it holds, and of random ones."""
    memory = LogitMemory(budget=16 << 30)
    ids, probs = np.empty(ENTRIES, np.int32), np.empty(ENTRIES)
    texts: list[np.ndarray] = []
    heads = "contexts", "MiB", "held: ns", "least", "random: ns", "least", "template: us", "nodes"
    heads += "dynamic: us", "nodes"
    print(*(f"{head:>12}" for head in heads))
    for size in sorted(sizes):
        while len(memory) < size:
            left = (size - len(memory)) // 4
            texts.append(rng.integers(0, TEXT_VOCAB, max(400, min(left, 500_000))))
            fill(memory, texts[-1], rng)
        row = [f"{len(memory)}", f"{memory.nbytes / 2**20:.0f}"]
        for contexts_of in (_held, _random):
            times = []
            for _ in range(5):  # other contexts every time: no line of the table is warm by chance
                contexts = contexts_of(texts, memory.longest, rng)
                start = perf_counter()
                look_up_all(*memory.tables, memory.lengths, contexts, ids, probs)
                times.append(1e9 * (perf_counter() - start) / BATCH)
            row += [f"{np.median(times[1:]):.0f}", f"{min(times):.0f}"]
        for is_dynamic in (False, True):
            row += _drafts(memory, _held(texts, memory.longest, rng)[:1000], is_dynamic, rng)
        print(*(f"{cell:>12}" for cell in row), flush=True)


def _held(texts: list[np.ndarray], longest: int, rng: np.random.Generator) -> np.ndarray:
    """Contexts int32 [BATCH, longest] of the learned texts, most recent token first."""
    counts = rng.multinomial(BATCH, [len(t) / sum(map(len, texts)) for t in texts])
    found = []
    for text, count in zip(texts, counts, strict=True):
        ends = rng.integers(longest, len(text), count)
        found.append(text[ends[:, None] - 1 - np.arange(longest)])
    return np.ascontiguousarray(rng.permutation(np.concatenate(found)), np.int32)


def _random(texts: list[np.ndarray], longest: int, rng: np.random.Generator) -> np.ndarray:
    """Contexts that mostly back off to the last token."""
    return rng.integers(0, TEXT_VOCAB, (BATCH, longest)).astype(np.int32)


def _drafts(
    memory: LogitMemory, contexts: np.ndarray, is_dynamic: bool, rng: np.random.Generator
) -> list[str]:
    """Median time of drafting 64 nodes after contexts [m, longest], and how many there were."""
    shape, plan, uniforms = Stand().template.first(64), Plan(nodes=64), rng.random(65 * ENTRIES)
    times, nodes = [], 0
    for context in contexts[:, ::-1].tolist():
        start = perf_counter()
        if is_dynamic:
            tree, _ = memory.grow(context, plan, NEUTRAL, uniforms)
        else:
            tree, _ = memory.draft(context, shape, plan.depth, NEUTRAL, uniforms)
        times.append(perf_counter() - start)
        nodes += len(tree)
    return [f"{1e6 * np.median(times):.1f}", f"{nodes / len(contexts):.0f}"]


def bytes_per_token(problems: int) -> None:
    """What memories hold per token that the embedded reasoner generates, temperature 0.6.

    Under a controller that always drafts, as others let it rest, and learn nothing, where that does
    not pay.
    """
    import forerun
    from forerun.tasks import get_task

    model, task = forerun.load(), get_task("reasoning")
    prompts = [task.example(i).prompt for i in range(problems)]
    shared = Stand(scope="tenant")
    heads = "samples", "memory", "tokens", "contexts", "held: bytes", "table: bytes"
    print(*(f"{head:>12}" for head in heads), "(per token)")
    for n in (1, 4, 16):
        own = [Stand(scope="tenant") for _ in prompts]
        for drafter, prompt in zip(own, prompts, strict=True):
            model.generate(
                [prompt], n=n, temperature=0.6, seed=0, controller="fixed", drafter=drafter
            )
        _show_bytes(n, "per prompt", own)
    model.generate(prompts, n=16, temperature=0.6, seed=0, controller="fixed", drafter=shared)
    _show_bytes(16, "one for all", [shared])


def _show_bytes(n: int, what: str, drafters: list[Stand]) -> None:
    held = [drafter.snapshot() for drafter in drafters]
    tokens = sum(snapshot.counts["tokens"] for snapshot in held)
    contexts = sum(snapshot.counts["contexts"] for snapshot in held)
    table = sum(drafter.memory_report()["logit memory"] for drafter in drafters)
    nbytes = sum(snapshot.nbytes for snapshot in held)
    row = n, what, tokens, contexts, f"{nbytes / tokens:.0f}", f"{table / tokens:.0f}"
    print(*(f"{cell:>12}" for cell in row), flush=True)


def costs(contexts: int, vocabs: list[int], rng: np.random.Generator) -> None:
    """Drafting, learning, selection and verification on one large memory."""
    speculative.Speculative().warm_up()
    drafter, seq, text = filled_drafter(contexts, rng)
    show("microseconds", f"{'median':>9} {'least':>9}")
    drafting(drafter, seq, text, rng)
    learning(drafter, seq, rng)
    for vocab in vocabs:
        rows(drafter, seq, vocab, rng)


def main() -> None:
    parser = scripts.parser(__doc__)
    parser.add_argument("--contexts", type=scripts.count, default=1_000_000)
    parser.add_argument("--vocab", type=scripts.count, nargs="+", default=[8_000, 32_000, 128_000])
    parser.add_argument("--part", choices=["costs", "lookups", "bytes"])
    parser.add_argument("--sizes", type=scripts.count, nargs="+", default=list(SIZES))
    parser.add_argument("--problems", type=scripts.count, default=4)
    options = parser.parse_args()
    if min(options.vocab) < TEXT_VOCAB:
        parser.error(f"--vocab must be at least {TEXT_VOCAB}, the tokens of the random text")
    warm_up()
    rng = np.random.default_rng(0)
    print(f"machine: {platform.processor() or platform.machine()}, numpy {np.__version__}")
    if options.part in (None, "costs"):
        costs(options.contexts, options.vocab, rng)
    if options.part in (None, "lookups"):
        lookups(options.sizes, rng)
    if options.part in (None, "bytes"):
        bytes_per_token(options.problems)


if __name__ == "__main__":
    scripts.run(main)
