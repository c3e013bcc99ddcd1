"""SAM Decoding: the longest match, found in constant time per token by suffix automata.

Hu et al., "SAM Decoding: Speculative Decoding via Suffix Automaton", 2024. One automaton grows with
the request, prompt and output; others hold earlier responses and a corpus. Each gives the longest
suffix of the text that it contains. The longest match is used; matches outside the request must be
longer by `bias`. The tokens after it are drafted. If the match is too short, another drafter
drafts.

Exact: POINT nodes, a chain of copied tokens. Needs what the other drafter needs.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from forerun import registry
from forerun.core.dice import Dice
from forerun.core.mixins import Priced, forget, priced
from forerun.core.records import Plan, Sequence, Step
from forerun.core.roles import Drafter, Target, name_of
from forerun.core.tree import EMPTY, Tree, chain, with_source
from forerun.drafters._saved_responses import SavedResponses
from forerun.errors import ConfigError, DataError
from forerun.ngrams.tables.logits.pool import in_bytes
from forerun.ngrams.tables.suffix import automaton as suffix_automaton
from forerun.ngrams.tables.suffix.automaton import Generations, SuffixAutomaton, Text
from forerun.ngrams.tables.suffix.response_store import Reader, Responses
from forerun.registry import Corpus, DrafterName

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer


class Sam(SavedResponses, Priced):
    """Drafts the tokens after the longest match in suffix automata.

    tokens: max draft length. bias: subtracted from the length of matches outside the request.
    threshold: min match length after the bias; None is the paper's 5 with another drafter, else 1.
    place: the occurrence to copy from, "first" (with a shorter match if fewer than `tokens` tokens
    follow) or "latest". scope: which responses are shared, "request" (none), "group", "tenant" or
    "global". budget_mb: memory of shared responses; the oldest are dropped first. corpus: text
    files. other: drafter, or its name, for steps in which the match is too short.
    """

    def __init__(
        self,
        *,
        tokens: int = 40,
        bias: int = 5,
        threshold: int | None = None,
        place: str = "first",
        scope: str = "tenant",
        budget_mb: float = 64,
        corpus: tuple[Corpus, ...] = (),
        other: DrafterName | Drafter | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if tokens < 1 or bias < 0 or (threshold is not None and threshold < 1):
            raise ConfigError(
                "tokens and threshold must be at least 1 and bias at least 0, got "
                f"{tokens}, {threshold} and {bias}"
            )
        if place not in ("first", "latest"):
            raise ConfigError(f"place must be 'first' or 'latest', got {place!r}")
        self.tokens, self.bias, self.is_latest = tokens, bias, place == "latest"
        self.other = _other_drafter(other, tokenizer)
        self.threshold = threshold or (1 if self.other is None else 5)
        self.labels = frozenset({"point"}) | (self.other.labels if self.other else frozenset())
        self.needs = self.other.needs if self.other else frozenset()
        self.parts = () if self.other is None else (self.other,)
        self.can_observe_late = all(part.can_observe_late for part in self.parts)
        self._responses: Responses[SuffixAutomaton, Generations] = Responses(
            "sam",
            lambda: SuffixAutomaton(latest=self.is_latest),
            lambda budget: Generations(latest=self.is_latest, budget=budget),
            scope=scope,
            budget=in_bytes(budget_mb),
        )
        files = (corpus,) if isinstance(corpus, str | FilePath) else corpus
        self.corpus = _corpus_automaton(files, tokenizer, self.is_latest) if files else None

    def bind(self, target: Target) -> None:
        if self.corpus is not None and (largest := self.corpus.largest()) >= target.vocab_size:
            raise ConfigError(
                f"the corpus of sam holds token {largest}, but the ids of this model end at "
                f"{target.vocab_size - 1}; read it with the model's own tokenizer"
            )
        self._responses.bind(target)
        suffix_automaton.warm_up()
        for part in self.parts:
            part.bind(target)

    def start(self, seq: Sequence) -> None:
        for part in self.parts:
            part.start(seq)

    def read(self, seqs: Many[Sequence]) -> None:
        for seq in seqs:
            self._follow(seq)
        for part in self.parts:
            part.read(seqs)

    def draft_seconds(self, nodes: int, num: int = 1) -> float:
        return sum(priced(part).draft_seconds(nodes, num) for part in self.parts)

    def catch_up_seconds(self, seq: Sequence) -> float:
        return sum(priced(part).catch_up_seconds(seq) for part in self.parts)

    def check_room(self, seqs: int, tokens: int, taken: int = 0) -> int:
        return sum(priced(part).check_room(seqs, tokens, taken) for part in self.parts)

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice]) -> list[Tree]:
        trees = [self._copied(seq, plan) for seq, plan in zip(seqs, plans, strict=True)]
        short = [i for i, tree in enumerate(trees) if not len(tree)]
        if self.other is not None and short:
            others = self.other.propose(
                [seqs[i] for i in short], [plans[i] for i in short], [dice[i] for i in short]
            )
            for i, tree in zip(short, others, strict=True):
                trees[i] = with_source(tree, name_of(self.other))
        return trees

    def observe(self, step: Step) -> None:
        for seq in step.seqs:
            self._follow(seq)
        for part in self.parts:
            part.observe(step)

    def finish(self, seq: Sequence) -> None:
        self._responses.finish(seq)
        for part in self.parts:
            part.finish(seq)

    def forget(self, group: Hashable) -> None:
        self._responses.forget(group)
        for part in self.parts:
            forget(part, group)

    def memory_report(self) -> dict[str, int]:
        sizes = {f"automata, {name}": size for name, size in self._responses.report().items()}
        if self.corpus is not None:
            sizes["automata, corpus"] = self.corpus.nbytes
        return sizes | (self.other.memory_report() if self.other else {})

    def matches(self, seq: Sequence) -> list[tuple[int, SuffixAutomaton, Text]]:
        """Matches in all automata: length minus bias, automaton, position; longest first."""
        reader, found = self._follow(seq), []
        found.append((reader.own.match(reader.text), reader.own, reader.text))
        if reader.shared is not None:
            for automaton, text in reader.shared.places(reader.entry):
                found.append((automaton.match(text) - self.bias, automaton, text))
        if self.corpus is not None:
            place = seq.scratch[self, "corpus"].text
            found.append((self.corpus.match(place) - self.bias, self.corpus, place))
        return sorted(found, key=lambda match: -match[0])  # stable: the request first

    def _copied(self, seq: Sequence, plan: Plan) -> Tree:
        """The tokens after the longest match that has a continuation."""
        max_tokens = min(self.tokens, plan.nodes, plan.depth)
        if max_tokens <= 0:
            return EMPTY
        for length, automaton, text in self.matches(seq):
            if length < self.threshold:
                break
            min_tokens = 1 if self.is_latest else max_tokens
            tokens = automaton.following(text, max_tokens, min_tokens)
            if len(tokens):
                return chain(tokens)
        return EMPTY

    def _follow(self, seq: Sequence) -> Reader[SuffixAutomaton, Generations]:
        """The sequence's reader, advanced to the last token together with its corpus cursor."""
        reader = self._responses.follow(seq)
        if self.corpus is not None:
            cursor = seq.scratch.get((self, "corpus"))
            if cursor is None or cursor.reader is not reader:
                cursor = seq.scratch[self, "corpus"] = Cursor(reader)
            self.corpus.move_cursor(cursor.text, seq.tokens[cursor.length :])
            cursor.length = len(seq.tokens)
        return reader


@dataclass
class Cursor:
    """A state of the corpus automaton after `length` tokens of a sequence."""

    reader: Reader[SuffixAutomaton, Generations]
    text: Text = field(default_factory=Text)
    length: int = 0


def _other_drafter(
    other: DrafterName | Drafter | None, tokenizer: Tokenizer | None
) -> Drafter | None:
    if other is None or isinstance(other, Drafter):
        return other
    return registry.make("drafter", other, tokenizer=tokenizer)


def _corpus_automaton(
    files: Many[str | FilePath], tokenizer: Tokenizer | None, is_latest: bool
) -> SuffixAutomaton:
    """The automaton of a corpus, with one text per document or part of one."""
    from forerun.ngrams.index.counts import corpus as corpora  # compiles kernels

    automaton = SuffixAutomaton(latest=is_latest)
    for ids in corpora.tokenised(files, tokenizer):
        automaton.extend(automaton.begin(), ids.tolist())
    if not len(automaton):
        raise DataError(f"the corpus {', '.join(map(str, files))} has no text; give another one")
    return automaton
