"""Labels of draft tokens for recipe `judge_head`: correct or wrong, by the checker of a task.

Three sources. Swaps: in a correct text of the target one token is replaced by a draft token that
the standard rule would have rejected. The target continues greedily; the token is correct if the
answer is (as in AutoJudge). Replies: correct texts of the draft model; all tokens are correct.
Slips: reference solutions with one digit changed; the old digit is correct, the new one wrong.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

import numpy as np

import forerun
from forerun.api import Model
from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Rows, Sequence
from forerun.core.roles import Target
from forerun.core.sampling import Sampling, to_probs
from forerun.core.tree import Tree, TreeBuilder, chain
from forerun.models.load import load_target
from forerun.models.paths import located
from forerun.tasks.reasoning import MIX, Example, ReasoningTask
from forerun.training.progress import Watch, counted

SWAP, REPLY, SLIP = 0, 1, 2
DIGITS = set("0123456789")
HIDDEN = frozenset({"hidden"})
LAST_PROBLEM = 900_000  # the training problems up to this number are used


class Settings(Protocol):
    """The options of `JudgeHead` that labelling reads."""

    target: str
    draft: str
    problems: int
    swaps: int
    temperature: float
    max_tokens: int
    batch: int
    seed: int


@dataclass(frozen=True)
class Tokens:
    """Labelled tokens: hidden rows [n, d], labels bool [n], their problems and sources [n]."""

    rows: np.ndarray
    labels: np.ndarray
    problems: np.ndarray
    sources: np.ndarray

    def where(self, chosen: np.ndarray) -> Tokens:
        """The tokens selected by a mask bool [n]."""
        return Tokens(
            self.rows[chosen], self.labels[chosen], self.problems[chosen], self.sources[chosen]
        )


def label_tokens(settings: Settings, watch: Watch) -> Tokens:
    """Labelled tokens of all three sources."""
    labeller = Labeller(settings, watch)
    labeller.slips()
    labeller.replies()
    labeller.swaps()
    rows, labels, problems, sources = zip(*labeller.found, strict=True)
    return Tokens(
        np.stack(rows).astype(np.float32), np.array(labels), np.array(problems), np.array(sources)
    )


class Labeller:
    """Labels tokens; `found` has those labelled so far."""

    def __init__(self, settings: Settings, watch: Watch) -> None:
        s = settings
        self.settings, self.watch, self.task = s, watch, ReasoningTask("train", MIX)
        self.model: Model = forerun.load(s.target, max_seqs=s.batch)
        self.draft = Model(load_target(located(s.draft), max_seqs=s.batch), self.model.tokenizer)
        self.examples = [self.task.example(LAST_PROBLEM - i) for i in range(s.problems)]
        self.prompts = [self.model.tokenizer.encode(e.prompt) for e in self.examples]
        self.rng, self.dice = np.random.default_rng(s.seed), SeededDice(s.seed)
        self.found: list[tuple[np.ndarray, bool, int, int]] = []  # row, label, problem, source

    def replies(self) -> None:
        """Labels all tokens of the draft model's correct replies."""
        for i, tokens in self._right(self.draft, self.settings.temperature, "replies of the draft"):
            rows = self._rows(self.model.target, self.prompts[i], chain(tokens))
            self._add(rows, range(len(tokens)), [True] * len(tokens), i, REPLY)

    def slips(self) -> None:
        """Labels one digit of each reference solution, unchanged and changed."""
        tokenizer = self.model.tokenizer
        texts = [tokenizer.decode([token]) for token in range(self.model.target.vocab_size)]
        digits = {t: text for t, text in enumerate(texts) if text.strip() in DIGITS}
        for i, example in enumerate(self.examples):
            tokens = tokenizer.encode(example.reference, special=False)
            places = [at for at, token in enumerate(tokens) if token in digits]
            if not places:
                continue
            at = int(self.rng.choice(places))
            space = digits[tokens[at]][:-1]  # " 4" becomes " 7", never "7"
            others = [t for t, d in digits.items() if d[:-1] == space and t != tokens[at]]
            tree = with_swaps(tokens[: at + 1], {at: int(self.rng.choice(others))})
            rows = self._rows(self.model.target, self.prompts[i], tree)
            self._add(rows, [at, at + 1], [True, False], i, SLIP)

    def swaps(self) -> None:
        """Labels draft tokens in correct texts of the target by the answer after the swap."""
        waiting: list[tuple[int, list[int], np.ndarray]] = []  # problem, text to the swap, row
        for i, tokens in self._right(self.model, 0.0, "texts of the target"):
            places = self._rejected(i, tokens)
            tree = with_swaps(tokens, places)
            rows = self._rows(self.model.target, self.prompts[i], tree)
            for node, (at, token) in enumerate(places.items(), len(tokens)):
                waiting.append((i, [*tokens[:at], token], _hidden(rows, node)))
        prompts = [[*self.prompts[i], *start] for i, start, _ in waiting]
        ends = self._generated(self.model, prompts, 0.0, "answers after a swap")
        for (i, start, row), end in zip(waiting, ends, strict=True):
            self.found.append((row, self._is_right(i, start + end), i, SWAP))

    def _rejected(self, i: int, tokens: list[int]) -> dict[int, int]:
        """Position -> draft token that the standard rule rejected there; at most `swaps`."""
        p, q = (
            self._rows(model.target, self.prompts[i], chain(tokens))
            for model in (self.model, self.draft)
        )
        sampling, found = Sampling(temperature=self.settings.temperature), dict[int, int]()
        for at, token in enumerate(tokens):
            target, draft = (to_probs(rows.row(at - 1), sampling) for rows in (p, q))
            y = self.dice.choice(draft)
            if y != token and not self.dice.coin(min(1.0, target[y] / draft[y])):
                found[at] = y
        chosen = self.rng.permutation(list(found))[: self.settings.swaps]
        return {int(at): found[int(at)] for at in chosen}

    def _right(self, model: Model, temperature: float, what: str) -> list[tuple[int, list[int]]]:
        """Problems that a model solves, with the tokens of its text."""
        texts = self._generated(model, self.prompts, temperature, what)
        return [(i, tokens) for i, tokens in enumerate(texts) if self._is_right(i, tokens)]

    def _is_right(self, i: int, tokens: list[int]) -> bool:
        example: Example = self.examples[i]
        return bool(self.task.score(example, self.model.tokenizer.decode(tokens)))

    def _generated(
        self, model: Model, prompts: Many[list[int]], temperature: float, what: str
    ) -> list[list[int]]:
        """A model's text after each prompt, without end-of-text tokens."""
        run = model.run(
            prompts,
            drafter="none",
            controller="fixed",
            temperature=temperature,
            max_new_tokens=self.settings.max_tokens,
            seed=self.settings.seed,
            batch=self.settings.batch,
        )
        ends, texts = set(model.tokenizer.eos_ids), [list[int]()] * len(prompts)
        show = counted(self.watch, what, "texts")
        for num, sample in enumerate(run, 1):
            texts[sample.prompt_index] = [t for t in sample.tokens if t not in ends]
            show(num, len(prompts))
        return texts

    def _rows(self, target: Target, prompt: list[int], tree: Tree) -> Rows:
        """Rows of a tree after a prompt, with hidden rows."""
        seq = Sequence(list(prompt), len(prompt), Sampling(), SeededDice(0), limit=len(tree) + 1)
        (rows,) = target.forward(ForwardBatch([seq], [tree], HIDDEN))
        target.release(seq)
        return rows

    def _add(
        self, rows: Rows, nodes: Many[int], labels: list[bool], problem: int, source: int
    ) -> None:
        for node, label in zip(nodes, labels, strict=True):
            self.found.append((_hidden(rows, node), label, problem, source))


def with_swaps(tokens: Many[int], swaps: dict[int, int]) -> Tree:
    """A chain of tokens, and one node per swap: a sibling of the token that it replaces."""
    builder = TreeBuilder()
    for at, token in [*enumerate(tokens), *swaps.items()]:
        builder.add(token, at - 1)
    return builder.build()


def _hidden(rows: Rows, node: int) -> np.ndarray:
    """Hidden row [d] of a node."""
    assert rows.hidden is not None
    return rows.hidden[node + 1].float().cpu().numpy()
