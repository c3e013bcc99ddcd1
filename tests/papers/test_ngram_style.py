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
from pathlib import Path

import numpy as np
import pytest
from convert_stories260k import convert

import forerun
from forerun.constraints.ngram_style import NgramStyle
from forerun.core.records import Sequence, Step
from forerun.core.sampling import softmax
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


def test_held_out_text_of_the_style_is_told_from_other_text(
    model: forerun.Model, style: NgramModel, book: str, data_dir: Path
) -> None:
    file = data_dir / "corpora/tinyshakespeare.txt.gz"
    other = gzip.decompress(file.read_bytes()).decode()
    texts = [book[-120_000:-100_000], other[:20_000]]
    own, foreign = (style.perplexity(model.tokenizer.encode(t, special=False)) for t in texts)
    print(f"style perplexity: held-out {own:.1f}, Shakespeare {foreign:.1f}")
    assert own < 0.7 * foreign
