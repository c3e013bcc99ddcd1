"""n-gram style (arXiv 2601.16224): what lambda does to the style, the base model and the text.

stories260K, greedy, 6 prompts of 48 tokens, 1-3-grams of the first nine tenths of Don Quixote. Of
the sheet's claims: divergence grows with lambda, and the published form lowers how much of the
style is in the text instead of raising it. The floored form raises it. Measured when written, style
perplexity and trigrams seen at lambda 0, 0.3, 1: floored 35, 16, 13 and .74, .98, 1.00; published
35, 50, 52 and .74, .66, .63; JSD at 1: floored .11, published .10 bits; held-out text of the book
15, Shakespeare 28. The paper's figures need TinyLlama-1.1B; `benchmarks/style.py` prints the whole
sweep for three corpora.
"""

from __future__ import annotations

import gzip
import math
from collections import Counter, defaultdict
from collections.abc import Sequence as Many
from pathlib import Path

import numpy as np
import pytest
from convert_stories260k import convert

import forerun
from forerun.constraints.ngram_style import NgramStyle
from forerun.core.records import Sequence, Step
from forerun.core.sampling import softmax, to_probs
from forerun.ngrams.index.counts.trie import NgramModel

pytestmark = pytest.mark.paper

PROMPTS = [
    "Once upon a time there was an old man who lived alone by the sea.",
    '"Where are you going?" asked the boy. "I am',
    "Rain falls from the clouds when the air",
    "The machine stops when the wheel",
    "One day the king lost his crown in the forest.",
    "The computer keeps the names in a table so that",
]
STRENGTHS = (0.0, 0.3, 1.0)
VOCAB = 600  # of the random text: more ids than the 512 entries of a context
FORMS = ("floored", "paper")
Tables = dict[tuple[int, ...], Counter[int]]  # context of 0 to 2 tokens -> counts of the next one


def skewed_text(size: int = 4000) -> list[int]:
    """Token ids with few frequent and many rare ones; all below VOCAB - 10."""
    rng = np.random.default_rng(0)
    return (rng.random(size) ** 2 * (VOCAB - 10)).astype(int).tolist()


def tables_of(text: Many[int]) -> Tables:
    """1- to 3-gram counts, in plain Python."""
    found: Tables = defaultdict(Counter)
    for at, token in enumerate(text):
        for length in range(min(at, 2) + 1):
            found[tuple(text[at - length : at])][token] += 1
    return found


def expected_shift(
    tables: Tables, context: Many[int], form: str, strength: float, vocab: int
) -> dict[int, float]:
    """lambda sum_n w_n (log P_n - log floor_n), or without the floor; the published constants."""
    k, weights, most = 0.001, (0.1, 0.3, 0.6), 512
    shift: dict[int, float] = defaultdict(float)
    for length, weight in enumerate(weights):
        known = length <= len(context)
        counts = tables.get(tuple(context[len(context) - length :])) if known else None
        if not counts:
            continue
        total = sum(counts.values()) + k * vocab
        for token, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]:
            log_floor = math.log(k / total) if form == "floored" else 0.0
            shift[token] += strength * weight * (math.log((count + k) / total) - log_floor)
    return shift


@pytest.fixture(scope="module")
def book(data_dir: Path) -> str:
    return gzip.decompress((data_dir / "corpora/don_quixote_pg996.txt.gz").read_bytes()).decode()


@pytest.fixture(scope="module")
def model(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> forerun.Model:
    source, folder = data_dir / "models" / "stories260K", tmp_path_factory.mktemp("stories")
    convert(source / "stories260K.bin", source / "tok512.bin", folder)
    return forerun.load(str(folder))


@pytest.fixture(scope="module")
def style(model: forerun.Model, book: str, tmp_path_factory: pytest.TempPathFactory) -> NgramModel:
    file = tmp_path_factory.mktemp("book") / "book.txt"
    file.write_text(book[: len(book) * 9 // 10], "utf-8")
    return NgramModel.of_files([file], model.tokenizer)


@pytest.mark.parametrize("form", FORMS)
def test_shifts_equal_plain_counting(form: str) -> None:
    """Every order, weight, floor and cut; unlisted tokens keep their logits exactly."""
    text = skewed_text()
    tables, model = tables_of(text), NgramModel.count([np.array(text)], vocab_size=VOCAB)
    z = np.random.default_rng(1).normal(size=VOCAB)
    contexts = [tuple(text[i : i + 2]) for i in range(0, 200, 7)]
    contexts += [(), (text[3],), (VOCAB - 1, text[3]), (text[3], VOCAB - 1), (text[9], text[0])]
    shaper = NgramStyle(model, form=form)
    assert len(tables[()]) > 512 and any(len(tables[c]) == 0 for c in contexts)
    for context in contexts:
        shift = expected_shift(tables, context, form, 0.3, VOCAB)
        listed = np.array(sorted(shift))
        changed = shaper.logits(context, z) - z
        np.testing.assert_allclose(changed[listed], [shift[i] for i in listed], atol=1e-12)
        assert np.flatnonzero(changed).tolist() == listed.tolist()


def test_known_tokens_lose_in_the_published_form_and_gain_in_the_floored_one() -> None:
    """The sheet's example of the sign, with counts: token 1 is known to all orders, 2 to unigrams
    only, 3 to none. The published form ranks them 3, 2, 1, the floored one 1, 2, 3."""
    text = [0, 0, 1, 0, 0, 5] * 5 + [2] + [4] * 69
    model = NgramModel.count([np.array(text)], vocab_size=6)
    for form, order in (("paper", [3, 2, 1]), ("floored", [1, 2, 3])):
        z = NgramStyle(model, strength=1, form=form).logits((0, 0), np.zeros(6))
        assert sorted((1, 2, 3), key=lambda token: -z[token]) == order
        assert z[3] == 0


def test_perplexity_is_that_of_the_linear_mixture() -> None:
    """P_mix = sum w P_n / sum w over the orders with a known context; all counts, no cut."""
    text, k = skewed_text(), 0.001
    tables, model = tables_of(text), NgramModel.count([np.array(text)], vocab_size=VOCAB)
    other = skewed_text(300)[::-1]
    other[5] = other[6] = VOCAB - 1
    logs = []
    for at, token in enumerate(other):
        parts = mass = 0.0
        for length, weight in enumerate((0.1, 0.3, 0.6)):
            counts = tables.get(tuple(other[at - length : at])) if length <= at else None
            if counts:
                mass += weight
                parts += weight * (counts[token] + k) / (sum(counts.values()) + k * VOCAB)
        logs.append(math.log(parts / mass))
    assert model.perplexity(other) == pytest.approx(math.exp(-np.mean(logs)))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_every_node_of_a_draft_is_shifted_by_its_own_context(temperature: float) -> None:
    """Embedded reasoner with look-up drafts: law = softmax((z + shift) / T), with the last two
    tokens of the node's path; without drafts the greedy text is the same."""
    model = forerun.load()
    encode, vocab = model.tokenizer.encode, model.tokenizer.vocab_size
    text = encode("The red fox has 7 red hens. The red fox has 9 red hens and a dog. " * 3)
    tables = tables_of(text)
    shaper = NgramStyle(NgramModel.count([np.array(text)], vocab_size=vocab), strength=0.9)
    depths: list[int] = []

    def watch(step: Step) -> None:
        seq, tree, law = step.seqs[0], step.trees[0], step.laws[0]
        before = seq.tokens[: step.start(0)]
        for node in step.visited(0):
            path = tree.path(node) if node >= 0 else []
            z = law.rows.row(node).astype(np.float64)
            for token, value in expected_shift(
                tables, [*before, *path][-2:], "floored", 0.9, vocab
            ).items():
                z[token] += value
            np.testing.assert_allclose(law[node], to_probs(z, seq.sampling), atol=1e-5)
            depths.append(len(path))

    given = {"temperature": temperature, "max_new_tokens": 40, "shapers": [shaper], "seed": 3}
    prompt = "The red fox has 7 red hens. The red fox"
    drafted = model.generate(prompt, drafter="prompt_lookup", on_step=watch, **given)[0]
    assert max(depths) >= 2 and drafted.stats.accepted > 0
    if not temperature:
        plain = model.generate(prompt, drafter="none", **given)[0]
        free = model.generate(prompt, drafter="none", temperature=0, max_new_tokens=40)[0]
        assert drafted.text == plain.text != free.text


def jsd(p: np.ndarray, q: np.ndarray) -> float:
    m = (p + q) / 2
    return float(sum(np.sum(x * np.log2(np.maximum(x, 1e-300) / m)) for x in (p, q)) / 2)


def swept(model: forerun.Model, style: NgramModel, form: str, strength: float) -> list[float]:
    """Style perplexity, share of trigrams seen, divergence."""
    gaps: list[float] = []
    texts: dict[Sequence, list[int]] = {}

    def watch(step: Step) -> None:
        for i, (seq, law) in enumerate(zip(step.seqs, step.laws, strict=True)):
            texts[seq] = seq.tokens
            for node in step.visited(i):
                plain = softmax(law.rows.row(node).astype(np.float64))
                gaps.append(jsd(plain, softmax(law.logits(node))))

    shapers = [NgramStyle(style, strength=strength, form=form)]
    model.generate(
        PROMPTS,
        temperature=0,
        max_new_tokens=48,
        drafter="none",
        batch=6,
        shapers=shapers,
        on_step=watch,
    )
    logs = [np.log(style.perplexity(t, seq.num_prompt)) for seq, t in texts.items()]
    seen = [
        style.knows(t[i : i + 3])
        for seq, t in texts.items()
        for i in range(seq.num_prompt, len(t) - 2)
    ]
    return [float(np.exp(np.mean(logs))), float(np.mean(seen)), float(np.mean(gaps))]


def test_lambda_does_what_the_forms_predict(model: forerun.Model, style: NgramModel) -> None:
    found = {
        form: np.array([swept(model, style, form, x) for x in STRENGTHS])
        for form in ("floored", "paper")
    }
    for form, table in found.items():
        print(form, table.round(3).tolist())
        assert table[0, 2] == pytest.approx(0, abs=1e-9)
        assert (np.diff(table[:, 2]) > 0).all() and table[-1, 2] < 1
    floored, paper = found["floored"], found["paper"]
    assert (np.diff(floored[:, 0]) < 0).all() and floored[-1, 0] < 0.7 * floored[0, 0]
    assert floored[-1, 1] > floored[0, 1]
    assert paper[-1, 0] > paper[0, 0] and paper[-1, 1] < paper[0, 1]


def test_held_out_text_of_the_style_is_likelier_than_other_text(
    model: forerun.Model, style: NgramModel, book: str, data_dir: Path
) -> None:
    file = data_dir / "corpora/tinyshakespeare.txt.gz"
    other = gzip.decompress(file.read_bytes()).decode()
    texts = [book[-120_000:-100_000], other[:20_000]]
    own, foreign = (style.perplexity(model.tokenizer.encode(t, special=False)) for t in texts)
    print(f"style perplexity: held-out {own:.1f}, Shakespeare {foreign:.1f}")
    assert own < 0.7 * foreign
