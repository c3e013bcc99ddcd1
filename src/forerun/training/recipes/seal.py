"""SEAL's generator at small scale: from a question to n-grams of the passage that it is about.

Bevilacqua et al., "Autoregressive Search Engines", 2022, with a causal model of under a million
weights from scratch where the paper tunes BART-large. Pairs: a question and spans of ten words of
its passage, drawn with probability exp(words in common with the question), none of which begins
with one of the most frequent words; a question and the title. And without questions, of every
passage: span to span, span to title, title to span. Questions are made by the rules of
`retrieval/books`; passages that are kept for evaluation give none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from forerun.errors import ConfigError
from forerun.models.tokenizer import Tokenizer
from forerun.retrieval.books import askable, cloze, plain, split
from forerun.retrieval.generator import Generator
from forerun.retrieval.passages import (
    BODY,
    PASSAGE,
    SPECIAL,
    TITLE,
    TITLE_END,
    Passage,
    PassageIndex,
    encode_all,
    read_passages,
    spaced,
    special_ids,
)
from forerun.training.data import Batches, Documents
from forerun.training.export import export
from forerun.training.language_model import LanguageModelRecipe, Size, build_model
from forerun.training.loop import Loop, LoopOptions, Progress
from forerun.training.plans import check_plan, write_plan
from forerun.training.tokenizer import train_tokenizer

CONTEXT, SPAN = 256, 10  # tokens; words
SIZE = Size(hidden=128, layers=3, heads=4, kv_heads=2, inner=352)
FREQUENT = 50  # words that no span begins with
MODEL, INDEX = "model", "passages.fm"  # in the folder of a run


@dataclass(frozen=True)
class Plan:
    """One run, resolved. passages: a file that `retrieval/passages` reads."""

    out: Path
    passages: Path
    minutes: float | None = 10.0
    max_steps: int | None = None
    evaluated: int = 200  # passages whose questions are not trained on
    vocabulary: int = 2048
    spans: int = 5  # per question; the paper has 10
    titles: int = 1  # per question; the paper has 3
    size: Size = SIZE
    micro_tokens: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        if self.evaluated < 1 or self.spans < 1 or self.titles < 0 or self.vocabulary < 300:
            raise ConfigError(
                "expected at least 1 passage to evaluate, 1 span, 0 titles and 300 tokens; got "
                f"{self.evaluated}, {self.spans}, {self.titles} and {self.vocabulary}"
            )

    def settings(self) -> dict[str, object]:
        """What a folder keeps to its end."""
        kept = ("evaluated", "vocabulary", "spans", "titles", "micro_tokens", "seed")
        return {name: getattr(self, name) for name in kept} | {"size": asdict(self.size)}


def run(plan: Plan, on_step: Callable[[Progress], None] | None = None) -> Progress:
    """Tokenizer, index, training, export; goes on from a checkpoint of the same plan."""
    passages = read_passages(plan.passages)
    fit, _ = split(len(passages), plan.evaluated, plan.seed)
    if not len(fit):
        raise ConfigError(
            f"{len(passages)} passages leave none to train on after {plan.evaluated} for "
            "evaluation; give more passages, or evaluate fewer"
        )
    plan.out.mkdir(parents=True, exist_ok=True)
    check_plan(plan.out, plan.settings())
    write_plan(plan.out, plan.settings(), {"minutes": plan.minutes, "max_steps": plan.max_steps})
    inner = make_tokenizer(passages, plan.vocabulary)
    tokenizer = Tokenizer(inner)
    PassageIndex.of(passages, tokenizer).save(plan.out / INDEX)
    documents = pairs(passages, fit, tokenizer, plan)
    model = build_model(plan.size, inner, plan.seed)
    batches = Batches(documents, plan.micro_tokens, pad=inner.pad_token_id, seed=plan.seed)
    options = LoopOptions(max_steps=plan.max_steps, minutes=plan.minutes, seed=plan.seed)
    place = torch.device("cpu")
    recipe = LanguageModelRecipe(model, batches)
    loop = Loop(recipe, options, place, plan.out / "generator.pt", on_step)
    loop.resume()
    progress = loop.run()
    export(model, inner, plan.out / MODEL)
    return progress


def load(folder: Path | str) -> tuple[Generator, PassageIndex]:
    """The generator and the index of a finished run."""
    generator = Generator.load(Path(folder) / MODEL)
    return generator, PassageIndex.load(Path(folder) / INDEX, generator.tokenizer)


def make_tokenizer(passages: list[Passage], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of the passages with the markers."""
    texts = (spaced(text) for p in passages for text in (p.title, p.body))
    inner = train_tokenizer(texts, vocabulary - len(SPECIAL), CONTEXT)
    inner.add_tokens(list(SPECIAL), special_tokens=True)
    return inner


def pairs(passages: list[Passage], fit: np.ndarray, tokenizer: Tokenizer, plan: Plan) -> Documents:
    """All training pairs as documents whose prompt is the source."""
    ids, rng = special_ids(tokenizer), np.random.default_rng((plan.seed, 1))
    frequent = frequent_words(passages)
    texts: list[tuple[str, list[int], str, bool]] = []  # source, markers, target, is a title
    for number in fit.tolist():
        passage = passages[number]
        for question in _questions(passage, rng):
            for span in spans(question, passage.body, plan.spans, frequent, rng):
                texts.append((question, [ids[BODY]], span, False))
            texts += [(question, [ids[TITLE]], passage.title, True)] * plan.titles
    for passage in passages:
        one, other = (spans("", passage.body, 1, frequent, rng)[0] for _ in range(2))
        texts.append((one, [ids[PASSAGE], ids[BODY]], other, False))
        texts.append((one, [ids[PASSAGE], ids[TITLE]], passage.title, True))
        texts.append((passage.title, [ids[PASSAGE], ids[BODY]], other, False))
    sources, targets = (encode_all(tokenizer, [str(text[k]) for text in texts]) for k in (0, 2))
    parts, prompts = [], []
    for (_, markers, _, is_title), source, target in zip(texts, sources, targets, strict=True):
        end = [ids[TITLE_END]] if is_title else []
        parts.append([*source, *markers, *target, *end][:CONTEXT])
        prompts.append(len(source) + len(markers))
    starts = np.cumsum([0] + [len(part) for part in parts])
    tokens = np.concatenate([np.array(part, np.uint16) for part in parts])
    return Documents(tokens, starts.astype(np.int64), np.array(prompts, np.int64))


def frequent_words(passages: list[Passage]) -> set[str]:
    """The most frequent words of the passages."""
    counts = Counter(word for p in passages for word in plain(p.body).split())
    return {word for word, _ in counts.most_common(FREQUENT)}


def spans(
    question: str, body: str, count: int, frequent: set[str], rng: np.random.Generator
) -> list[str]:
    """Runs of ten words of a body, drawn by how many words they share with a question."""
    words = body.split()
    bare = [plain(word) for word in words]
    starts = np.arange(max(1, len(words) - SPAN + 1))
    asked = set(question.split()) - frequent
    shared = np.array([word in asked for word in bare], float)
    scores = np.convolve(shared, np.ones(min(SPAN, len(words))), "valid")[: len(starts)]
    scores[[bare[s] in frequent for s in starts]] -= 20
    chances = np.exp(scores - scores.max())
    chosen = rng.choice(starts, count, p=chances / chances.sum())
    return [" ".join(words[s : s + SPAN]) for s in chosen.tolist()]


def _questions(passage: Passage, rng: np.random.Generator) -> Iterator[str]:
    """One of every sentence with words left out; and with the sentence that was taken out."""
    for sentence in askable(passage.body):
        yield cloze(sentence, rng)
    if passage.held_out:
        yield plain(passage.held_out)
        yield cloze(passage.held_out, rng)
