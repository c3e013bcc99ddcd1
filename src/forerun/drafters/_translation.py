"""The vocabularies of a target and a draft, and the n-grams that texts of each tenant showed.

Drafters of several copies of one draft model share a `Translation`; a new copy knows all n-grams.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

from forerun.drafters._ngram_law import NgramTrie
from forerun.errors import ConfigError
from forerun.models.retokenize import Retokenizer, TextView
from forerun.models.vocab_map import NONE, Vocab, VocabMap

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer


class Translation:
    """Maps between the tokens of a target and of a draft, and the n-grams seen so far.

    map: draft ids to target ids. to_draft, to_target: encode runs of tokens again.
    """

    def __init__(self, ours: Tokenizer, theirs: Tokenizer, size: int, draft_size: int) -> None:
        goal, draft = Vocab.of(ours, size), Vocab.of(theirs, draft_size)
        self.map = VocabMap.between(draft, goal)
        if not len(self.map.shared):
            raise ConfigError(
                "the vocabularies of draft and target have no token in common; use another draft"
            )
        to_draft = VocabMap.between(goal, draft)
        self.to_draft = Retokenizer(goal, draft, to_draft, theirs.encode_inside)
        self.to_target = Retokenizer(draft, goal, self.map, ours.encode_inside)
        self.start = ours.encode(""), theirs.encode("")  # before a text: ours, and theirs instead
        self.size = size
        self._is_foreign = self.map.back == NONE  # bool [V_t]
        self._tries: dict[str, NgramTrie] = {}  # by tenant
        self._seen: dict[str, set[int]] = {}  # target tokens that the trie may lack, by tenant

    def view(self) -> TextView:
        """A new view of a growing text in the draft's tokens."""
        return TextView(self.to_draft, self.start)

    def run_of(self, token: int) -> tuple[int, ...]:
        """The draft tokens of a target token; () for a special token without a counterpart."""
        source = self.map.source_of(token)
        if source != NONE:
            return (source,)
        return tuple(self.to_draft([token])) if self.to_draft.piece(token) is not None else ()

    def trie(self, tenant: str) -> NgramTrie:
        """The n-grams of a tenant."""
        return self._tries.setdefault(tenant, NgramTrie(self.map))

    def see(self, tenant: str, tokens: Many[int]) -> None:
        """Records target tokens; they become n-grams with the next `add_seen`."""
        new = {token for token in set(tokens) if self._is_foreign[token]}
        self._seen.setdefault(tenant, set()).update(new)

    def add_seen(self) -> None:
        """Adds the tokens seen since the last call to the tries."""
        for tenant, tokens in self._seen.items():
            for token in sorted(tokens):
                self.trie(tenant).add(token, self.run_of(token))
            tokens.clear()

    def known(self) -> dict[str, list[int]]:
        """The target tokens with an n-gram, in the order in which they came, by tenant."""
        self.add_seen()
        return {tenant: list(trie.runs) for tenant, trie in self._tries.items()}

    def restore(self, known: dict[str, list[int]]) -> None:
        """Adds the n-grams of `known`."""
        for tenant, tokens in known.items():
            for token in tokens:
                self.trie(tenant).add(token, self.run_of(token))

    def forget(self, tenant: str) -> None:
        """Drops the n-grams of a tenant."""
        self._tries.pop(tenant, None)
        self._seen.pop(tenant, None)

    @property
    def nbytes(self) -> int:
        """Estimated bytes of the n-grams."""
        return sum(trie.nbytes for trie in self._tries.values())
