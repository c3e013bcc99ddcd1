"""n-gram style control over a range of lambda: effect on style, model and text.

    python benchmarks/style.py [--data-dir ../shared/data] [--tokens 96] [--plot FOLDER]

The model is stories260K (260 thousand parameters, trained on children's stories). The styles are
Don Quixote, Shakespeare's plays and Python code. Twenty prompts of four kinds are continued with
both forms and every lambda, greedily (or --temperature 1 --top-p 0.9). Printed for each:

style     perplexity of the written text under the style's mixed 1-3-grams
cv        its standard deviation over its mean, over prompts
base      perplexity under the plain model
JSD       divergence of the shaped distribution from the plain one, bits, mean over steps
words     share of written words among the 5000 most frequent of the style
bigrams   share of written token pairs that occur in the style; trigrams the same
repeated  share of written 4-grams that occurred earlier in the same text; loops improve all others

--plot draws a picture for each style. The first line of each table is plain decoding.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import tarfile
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import numpy as np
import scripts

import forerun
from forerun.constraints.ngram_style import FORMS, NgramStyle
from forerun.core.records import Sequence, Step
from forerun.core.sampling import softmax
from forerun.ngrams.index.counts.corpus import documents
from forerun.ngrams.index.counts.trie import NgramModel

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from convert_stories260k import convert  # noqa: E402 - it lies among the tests

STRENGTHS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)
CORPORA = {
    "don_quixote": "corpora/don_quixote_pg996.txt.gz",
    "shakespeare": "corpora/tinyshakespeare.txt.gz",
    "python": "corpora/python_code.tar.gz",
}
MODEL = ("models/stories260K/stories260K.bin", "models/stories260K/tok512.bin")
PROMPTS = (
    "Once upon a time there was an old man who lived alone by the sea.",
    "The little girl found a key under the big tree and",
    "It was a dark night and the wind was loud. Tom",
    "One day the king lost his crown in the forest.",
    "The dog ran away from home because",
    '"Where are you going?" asked the boy. "I am',
    '"Please help me," said the bird. The cat said,',
    'Mom said, "Do not open that box." Lily asked,',
    '"I have never seen a ship so big," said the sailor.',
    '"What is your name?" the stranger asked. "My name',
    "Rain falls from the clouds when the air",
    "A horse is a big animal. It eats",
    "People build houses to",
    "The moon is smaller than the earth and",
    "Bread is made from flour and water. First you",
    "To make the list longer, you add",
    "The machine stops when the wheel",
    "A number is even if",
    "First read the file, then count the words and",
    "The computer keeps the names in a table so that",
)


@dataclass
class Tally:
    """Listener: what was emitted by each sequence, and how far its laws are from plain ones."""

    texts: dict[Sequence, list[int]] = field(default_factory=dict)
    base: list[float] = field(default_factory=list)  # log-probabilities under the plain model
    divergences: list[float] = field(default_factory=list)

    def __call__(self, step: Step) -> None:
        for i, (seq, law) in enumerate(zip(step.seqs, step.laws, strict=True)):
            self.texts.setdefault(seq, seq.tokens)
            for node, token in zip(step.visited(i), step.emitted[i], strict=True):
                self.base.append(float(law.logprobs(node)[token]))
                plain = law.rows.row(node).astype(np.float64)
                self.divergences.append(jsd(softmax(plain), softmax(law.logits(node))))


def jsd(p: np.ndarray, q: np.ndarray) -> float:
    """Jensen-Shannon divergence in bits."""
    mean = (p + q) / 2
    halves = [x[x > 0] * np.log2(x[x > 0] / mean[x > 0]) for x in (p, q)]
    return max(0.0, float(sum(half.sum() for half in halves)) / 2)


def words(text: str) -> list[str]:
    """Lower-case words."""
    return re.findall(r"[a-z']+", text.lower())


@dataclass(frozen=True)
class Style:
    """A corpus, counted."""

    name: str
    model: NgramModel
    frequent: frozenset[str]  # its 5000 most frequent words

    @classmethod
    def read(cls, name: str, file: Path, tokenizer: object) -> Style:
        model = NgramModel.of_files([file], tokenizer)  # type: ignore[arg-type]
        counts: Counter[str] = Counter()
        for text in documents(file):
            counts.update(words(text))
        return cls(name, model, frozenset(word for word, _ in counts.most_common(5000)))


def text_of(archive: Path, folder: Path) -> Path:
    """An archive of files as one file of documents; any other file is given as it is."""
    if not archive.name.endswith(".tar.gz"):
        return archive
    made = folder / f"{archive.name}.jsonl.gz"
    with tarfile.open(archive) as tar, gzip.open(made, "wt", encoding="utf-8") as out:
        for member in tar:
            file = tar.extractfile(member)
            if file is not None:
                out.write(json.dumps({"text": file.read().decode("utf-8", "replace")}) + "\n")
    return made


def measure(
    model: forerun.Model, style: Style, strength: float, form: str, how: argparse.Namespace
) -> dict[str, float]:
    """All columns of one row."""
    tally = Tally()
    results = model.generate(
        list(PROMPTS),
        temperature=how.temperature,
        top_p=how.top_p,
        seed=1,
        max_new_tokens=how.tokens,
        drafter="none",
        batch=len(PROMPTS),
        shapers=[NgramStyle(style.model, strength=strength, form=form)],
        on_step=tally,
    )
    own = [(tokens, seq.num_prompt) for seq, tokens in tally.texts.items()]
    ppl = [style.model.perplexity(tokens, num) for tokens, num in own]
    sizes = [len(tokens) - num for tokens, num in own]
    written = [word for r in results for s in r.samples for word in words(s.text)]
    return {
        "style": float(np.exp(np.average(np.log(ppl), weights=sizes))),
        "cv": float(np.std(ppl) / np.mean(ppl)),
        "base": float(np.exp(-np.mean(tally.base))),
        "JSD": float(np.mean(tally.divergences)),
        "words": float(np.mean([word in style.frequent for word in written])) if written else 0.0,
        "bigrams": seen(style.model, own, 2),
        "trigrams": seen(style.model, own, 3),
        "repeated": repeated([tokens[num:] for tokens, num in own]),
    }


def seen(model: NgramModel, texts: list[tuple[list[int], int]], size: int) -> float:
    """Share of n-grams of the written tokens that the corpus has."""
    found = [
        model.knows(tokens[i : i + size])
        for tokens, num in texts
        for i in range(num, len(tokens) - size + 1)
    ]
    return float(np.mean(found)) if found else 0.0


def repeated(texts: list[list[int]], size: int = 4) -> float:
    """Share of n-grams that came earlier in the same text."""
    total = again = 0
    for tokens in texts:
        grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
        total, again = total + len(grams), again + len(grams) - len(set(grams))
    return again / max(1, total)


def sweep(
    model: forerun.Model, style: Style, how: argparse.Namespace
) -> dict[str, dict[float, dict[str, float]]]:
    """Rows by form and lambda, printed as they come."""
    plain = measure(model, style, 0.0, FORMS[0], how)
    print(f"\n{style.name}: {style.model.counts[0]} tokens, {len(style.model)} distinct n-grams")
    print(f"{'form':<8}{'lambda':>7}" + "".join(f"{name:>10}" for name in plain))
    show("plain", 0.0, plain)
    found: dict[str, dict[float, dict[str, float]]] = {}
    for form in FORMS:
        found[form] = {0.0: plain}
        for strength in STRENGTHS:
            found[form][strength] = measure(model, style, strength, form, how)
            show(form, strength, found[form][strength])
    return found


def show(form: str, strength: float, row: dict[str, float]) -> None:
    figures = "".join(f"{v:10.1f}" if v >= 10 else f"{v:10.4f}" for v in row.values())
    print(f"{form:<8}{strength:7.2f}{figures}", flush=True)


COLOURS = ("#0b5fc2", "#b35900", "#137a52", "#8a3ba8")
LEFT, RIGHT, TOP, BOTTOM = 40, 470, 40, 260  # of the plot, in units of the picture


def picture(name: str, found: dict[str, dict[float, dict[str, float]]]) -> str:
    """An SVG of perplexities over lambda, as their decimal logarithms."""
    series = {
        f"{column} perplexity, {form}": {x: float(np.log10(row[column])) for x, row in rows.items()}
        for form, rows in found.items()
        for column in ("style", "base")
    }
    xs = sorted({x for points in series.values() for x in points})
    most = max(max(points.values()) for points in series.values())
    across, down = (RIGHT - LEFT) / max(xs[-1] - xs[0], 1e-9), (BOTTOM - TOP) / max(most, 1e-9)
    parts = [_text(4, 18, f"n-gram style of {name}: log10 of perplexity over lambda")]
    parts += [_text(LEFT + (x - xs[0]) * across, BOTTOM + 18, f"{x:g}") for x in xs]
    parts += [_text(4, BOTTOM - y * down, f"{y:.1f}") for y in (0.0, most / 2, most)]
    for i, (label, points) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        places = " ".join(
            f"{LEFT + (x - xs[0]) * across:.1f},{BOTTOM - y * down:.1f}"
            for x, y in sorted(points.items())
        )
        parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}"/>')
        parts.append(_text(LEFT, BOTTOM + 40 + 18 * i, label, colour))
    size = f"0 0 480 {BOTTOM + 40 + 18 * len(series)}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}">{"".join(parts)}</svg>\n'


def _text(x: float, y: float, words: str, colour: str = "#1f2328") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" fill="{colour}"'
    return f'<text {place} font-size="13" font-family="sans-serif">{escape(words)}</text>'


def main() -> None:
    parser = scripts.parser(__doc__)
    parser.add_argument("--data-dir", type=Path, default=Path("../shared/data"))
    parser.add_argument("--tokens", type=scripts.count, default=96)
    parser.add_argument("--temperature", type=scripts.measure, default=0.0)
    parser.add_argument("--top-p", type=scripts.measure, default=1.0)
    parser.add_argument(
        "--only",
        type=scripts.pattern,
        default="",
        help="only styles that match this regular expression",
    )
    parser.add_argument("--plot", type=Path, help="folder for pictures")
    how = parser.parse_args()
    chosen = {name: file for name, file in CORPORA.items() if how.only.search(name)}
    for name in (*MODEL, *chosen.values()):
        if not (here := how.data_dir / name).exists():
            scripts.skip(f"there is no {here}; give --data-dir a folder that has it")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as held:
        folder = Path(held)
        convert(*(how.data_dir / name for name in MODEL), folder / "model")
        model = forerun.load(str(folder / "model"))
        for name, file in chosen.items():
            text = text_of(how.data_dir / file, folder)
            found = sweep(model, Style.read(name, text, model.tokenizer), how)
            if how.plot:
                how.plot.mkdir(parents=True, exist_ok=True)
                (how.plot / f"style_{name}.svg").write_text(picture(name, found), "utf-8")
    print(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    scripts.run(main)
