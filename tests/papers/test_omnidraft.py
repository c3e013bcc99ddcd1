"""OmniDraft (arXiv 2507.02659): n-grams of draft tokens reach target tokens that no one has alone.

A made pair with different BPE tokenizers of the same text: the target merges far more, and both
models know the text almost by heart, so a draft fails where its tokens cannot be translated. The
paper's claims: direct mapping alone stops at every merged token; the n-gram cache recovers most of
it; the cache grows with the texts and serves later ones. The siblings (TLI, SLEM) run on the same
pair. Laws: tests/laws/test_cross_vocab.py. Distillation and adaptive length are not built yet.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import cache

import numpy as np
import pytest
from tiny import TEXT, tokenizer_pair
from two_vocabularies import LetterRunner

from fakes import FakeTarget, sequence
from forerun import registry
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.records import Step
from forerun.core.sampling import Sampling
from forerun.drafters.cross_vocab import CrossVocab
from forerun.engine.engine import Engine
from forerun.models.draft_link import ForeignDraft
from forerun.models.tokenizer import Tokenizer

pytestmark = pytest.mark.paper
WORDS = "".join(TEXT)
SHARP = 0.9  # probability that a model gives the next token of the text


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizers of draft and target."""
    return tokenizer_pair(tmp_path_factory.mktemp("tokenizers"))


def reciting(tokenizer: Tokenizer, sharp: float = SHARP):
    """A law that continues WORDS after the longest known end of a text, in a tokenizer's tokens."""
    size, text = tokenizer.vocab_size, WORDS * 2

    @cache
    def law(last: str) -> np.ndarray:
        row = np.full(size, (1 - sharp) / (size - 1))
        known = next(last[i:] for i in range(len(last) + 1) if last[i:] in text)
        start = text.find(known) + len(known)
        row[tokenizer.encode_inside(text[start:][:24])[0]] = sharp
        return row / row.sum()

    return lambda tokens: law(tokenizer.decode_inside(list(tokens[-24:]))[-12:])


def run(
    drafter: CrossVocab, target: Tokenizer, *, tokens: int = 200, temperature: float = 1.0
) -> tuple[list[Step], list[int]]:
    """The steps of one text, and its tokens."""
    steps = list[Step]()
    engine = Engine(
        FakeTarget(reciting(target), target.vocab_size),
        drafter,
        registry.make("verifier", "speculative"),
        Fixed(nodes=4, depth=4),
        listeners=[steps.append],
    )
    prompt = target.encode(WORDS[:30])
    seq = sequence(prompt, tokens, SeededDice(1), Sampling(temperature=temperature))
    engine.submit(seq)
    engine.run()
    return steps, seq.generated


def tau(steps: Many[Step]) -> float:
    return float(np.mean([len(step.emitted[0]) for step in steps]))


def made(
    pair: tuple[Tokenizer, Tokenizer], method: str = "omni", kind: type = CrossVocab
) -> CrossVocab:
    draft, target = pair
    runner = LetterRunner(reciting(draft), draft.vocab_size)
    model = ForeignDraft(runner, draft)  # type: ignore[arg-type]
    return kind(model=model, method=method, tokenizer=target)


class WithoutCache(CrossVocab):
    """Direct mapping only."""

    def _learn(self, seq, tokens) -> None:
        """Nothing is learned."""


def test_ngrams_recover_what_direct_mapping_loses(pair: tuple[Tokenizer, Tokenizer]) -> None:
    """tau of direct mapping, of the growing cache, and of a cache that knows the text."""
    target = pair[1]
    plain = made(pair, kind=WithoutCache)
    direct, _ = run(plain, target)
    omni = made(pair)
    first, _ = run(omni, target)
    later, _ = run(omni, target)
    assert tau(direct) < 0.8 * tau(first)
    assert tau(later) >= tau(first)
    assert tau(later) > 1.5 * tau(direct)


def test_entries_are_the_draft_tokens_of_a_target_token(pair: tuple[Tokenizer, Tokenizer]) -> None:
    draft, target = pair
    omni = made(pair)
    run(omni, target)
    run(omni, target)
    (trie,) = omni._tries.values()
    assert len(trie.runs) >= 10
    bytes_of, pieces = target.token_bytes(target.vocab_size), draft.token_bytes(draft.vocab_size)
    for token, ngram in trie.runs.items():
        assert b"".join(pieces[i] or b"" for i in ngram) == bytes_of[token]
        assert len(ngram) >= 2 and omni.map.source_of(token) == -1


def test_drafts_are_the_text_of_the_draft_model(pair: tuple[Tokenizer, Tokenizer]) -> None:
    """Greedy: what is accepted is what the target says, and most of it comes from drafts."""
    target = pair[1]
    expected = run(made(pair, kind=WithoutCache), target, temperature=0)[1]
    for method in ("omni", "tli", "slem"):
        steps, tokens = run(made(pair, method), target, temperature=0)
        assert tokens == expected
    omni = made(pair)
    run(omni, target, temperature=0)
    steps, _ = run(omni, target, temperature=0)
    assert tau(steps) > 4.0  # of at most 5


def test_the_siblings_on_the_same_pair(pair: tuple[Tokenizer, Tokenizer]) -> None:
    """Shared tokens alone stop where direct mapping does; point masses accept p(t) of a token."""
    omni = made(pair)
    run(omni, pair[1])
    found = {"omni": tau(run(omni, pair[1])[0])}
    found |= {name: tau(run(made(pair, name), pair[1])[0]) for name in ("tli", "slem")}
    assert found["omni"] > found["tli"]
    assert found["slem"] > found["tli"]


def test_equal_tokenizers_reduce_to_speculative_sampling(pair: tuple[Tokenizer, Tokenizer]) -> None:
    """Q is the draft's law, token by token."""
    target = pair[1]
    runner = LetterRunner(reciting(target, 0.6), target.vocab_size)
    model = ForeignDraft(runner, target)  # type: ignore[arg-type]
    drafter = CrossVocab(model=model, tokenizer=target)
    steps, _ = run(drafter, target)
    law, checked = reciting(target, 0.6), 0
    for step in steps:
        ((seq, tree),) = zip(step.seqs, step.trees, strict=True)
        text = seq.tokens[: step.start(0)]
        for node in range(len(tree)):
            q = law([*text, *tree.path(node)[:-1]])
            known = tree.lazy[node]._known  # what the verifier asked for
            assert all(known[token] == pytest.approx(q[token]) for token in known if token > 0)
            checked += len(known)
    assert checked > 20
