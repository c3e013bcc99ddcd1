"""Reflective verification: the target reads the draft twice, with a reflection text in between.

"Think Before You Accept: Semantic Reflective Verification for Faster Speculative Decoding", 2025.
The forward pass holds the draft d_1 .. d_n, a reflection text R, and the draft again. With z0 the
logits in the first copy and zr those in the second, the base rule uses the logits
z = (1 - a) z0 + a zr. After the whole draft it uses z0. The KV cells of R and of the second copy
are dropped. Each path of a tree has its own R and second copy; the zr of shared nodes are averaged.

Law: NOT kept, except at a = 0: the fused distribution depends on the draft. Constraints and
sampling parameters act once, on z. Needs: n + len(R) - 1 more rows in the pass; any target.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from forerun import registry
from forerun.core.dice import Dice
from forerun.core.logits import TargetProbs
from forerun.core.records import Rows, Verdict
from forerun.core.roles import Target, Verifier
from forerun.core.sampling import Sampling, softmax
from forerun.core.tree import Tree, appended
from forerun.errors import ConfigError, UnknownName
from forerun.utils.numbers import finite, whole

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer

FUSIONS = ("logit", "prob")
TEMPLATE = " I will check that step by step and say it again. So"


class Reflective(Verifier):
    r"""weight: a. template: R, with \n for a line break. rule: the base verifier.

    fusion: of logits ("logit") or probabilities ("prob"). leaves: maximum number of paths of a
    tree that are read twice.
    """

    lossless = False

    def __init__(
        self,
        *,
        weight: float = 0.3,
        template: str = TEMPLATE,
        rule: str = registry.DEFAULT_VERIFIER,
        fusion: str = "logit",
        leaves: int = 4,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if fusion not in FUSIONS:
            raise UnknownName.of("fusion of reflective", fusion, FUSIONS)
        self.weight = finite("weight (usually 0.3)", weight, 0, 1)
        self.fusion, self.leaves = fusion, whole("leaves", leaves)
        self.base: Verifier = registry.make("verifier", rule, tokenizer=tokenizer)
        if isinstance(self.base, Reflective):
            raise ConfigError(
                f"rule={rule!r} of reflective is reflective itself; use another verifier, such as "
                f"rule={registry.DEFAULT_VERIFIER}"
            )
        self.judges = self.base.judges
        self.needs = self.base.needs | ({"probes"} if weight else frozenset())
        self.lossless = self.base.lossless and weight == 0
        self.reflection = list[int]()
        if tokenizer is not None:
            self.reflection = tokenizer.encode(template.replace("\\n", "\n"), special=False)

    def bind(self, target: Target) -> None:
        if self.weight and not self.reflection:
            raise ConfigError(
                "reflective needs a template of at least one token and a tokenizer: use"
                " model.generate(verifier='reflective'), or construct"
                " Reflective(tokenizer=Tokenizer.load(FOLDER))"
            )
        self.base.bind(target)

    def check(self, sampling: Sampling) -> None:
        self.base.check(sampling)

    def warm_up(self) -> None:
        self.base.warm_up()

    def probe(self, tree: Tree, room: int) -> Tree:
        tokens, parents = list[int](), list[int]()
        for path in self._paths(tree) if self.weight else ():
            if 2 * len(path) - 1 + len(self.reflection) > room:
                return tree  # no room in the context: this step uses the base rule
            again = [*self.reflection, *tree.tokens[path[:-1]].tolist()]
            first = len(tree) + len(tokens)
            parents += [path[-1], *range(first, first + len(again) - 1)]
            tokens += again
        return appended(tree, tokens, parents) if tokens else tree

    def verify(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        if laws.rows.probes is None:
            return self.base.verify(tree, laws, dice)
        rows = FusedRows(laws.rows, self._second_reads(tree), self.weight, self.fusion)
        return self.base.verify(tree, laws.with_rows(rows), dice)

    def _paths(self, tree: Tree) -> Iterator[list[int]]:
        """The first paths from the root to a leaf, as nodes without the root."""
        inner = set(tree.parents.tolist())
        ends = [node for node in range(len(tree)) if node not in inner]
        for node in ends[: self.leaves]:
            path = list[int]()
            while node >= 0:
                path.append(node)
                node = int(tree.parents[node])
            yield path[::-1]

    def _second_reads(self, tree: Tree) -> dict[int, list[int]]:
        """Indices of the probe rows that hold zr of a node; for the root the last rows of R."""
        found: dict[int, list[int]] = {}
        at = 0
        for path in self._paths(tree):
            at += len(self.reflection)
            for i, node in enumerate([-1, *path[:-1]]):
                found.setdefault(node, []).append(at - 1 + i)
            at += len(path) - 1
        return found


class FusedRows(Rows):
    """Rows with z = (1 - a) z0 + a zr (or fused probabilities) at nodes that were read twice."""

    def __init__(
        self, rows: Rows, second_reads: dict[int, list[int]], weight: float, fusion: str
    ) -> None:
        super().__init__(rows.logits, rows.hidden, rows.probes)
        self.first, self.second_reads, self.weight, self.fusion = rows, second_reads, weight, fusion

    def row(self, node: int) -> np.ndarray:
        z0 = self.first.row(node)
        second = [self.first.probe(i) for i in self.second_reads.get(node, ())]
        if not second:
            return z0
        a, zr = self.weight, np.mean(second, axis=0)
        if self.fusion == "logit":
            return (1 - a) * z0 + a * zr
        with np.errstate(divide="ignore"):  # a probability may be 0
            return np.log((1 - a) * softmax(z0) + a * softmax(zr))
