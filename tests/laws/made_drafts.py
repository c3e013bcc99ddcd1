"""Drafts to enumerate: every drafter and grower, small enough for all outcomes on three tokens."""

from __future__ import annotations

from collections.abc import Callable

from fakes import FakeRunner, TableSource, sequence, table_law
from forerun import registry
from forerun.core.dice import EnumeratedDice
from forerun.core.records import Plan
from forerun.core.roles import Drafter
from forerun.core.tree import Proposal, Tree, chain
from forerun.core.tree_template import grid
from forerun.drafters.base import Grown, PerSequence
from forerun.ngrams.index.query.engine import Index
from harness import DRAFT, Draft

OTHER = table_law(3)


def doubtful(q: Proposal, token: int) -> bool:
    """Stops after a token that q holds for unlikely."""
    return bool(q.probs[q.ids == token][0] < 0.35)


CHAIN, TREE = Plan(nodes=2, depth=2), Plan(nodes=4, depth=2)


def drafted(grower: str) -> Callable[[], Drafter]:
    return lambda: registry.get("drafter", "draft_model")(model=FakeRunner(DRAFT), grower=grower)


def grown(grower: str, known=lambda tokens: True, law=DRAFT, **options: object):
    source = TableSource(law, known)
    return lambda: Grown(source, registry.get("grower", grower)(**options))


def made(name: str, **options: object) -> Callable[[], Drafter]:
    return lambda: registry.make("drafter", name, **options)


def composed(name: str, *parts: Callable[[], Drafter], **more: object) -> Callable[[], Drafter]:
    return lambda: registry.make("drafter", name, parts=tuple(part() for part in parts), **more)


class Says(PerSequence):
    """Always the same chain of chosen tokens."""

    labels = frozenset({"point"})

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens = tokens

    def draft(self, seq, plan, dice) -> Tree:
        return chain(self.tokens[: min(plan.nodes, plan.depth)])


def stand(**options: object) -> Callable[[], Drafter]:
    return lambda: registry.make("drafter", "stand", **options)


def wide(**options: object) -> Callable[[], Drafter]:
    """A STAND that a group of the same tenant has taught; each sequence is a group of its own."""

    class Apart(registry.get("drafter", "stand")):
        def __init__(self) -> None:
            super().__init__(scope="tenant", **options)
            earlier = self.memory(sequence((0, 1), 1, EnumeratedDice()))
            for token in range(3):
                earlier.update([token], [(token + 1) % 3, token], [0.6, 0.3])

        def start(self, seq):
            seq.group = seq.index
            super().start(seq)

    Apart.__module__ = Apart.__mro__[1].__module__  # known by the same name
    return Apart


DATASTORE = (0, 1, 2, 0, 0, 2, 1, 1, 0, 1, 2, 2)
STORED = Index.of([DATASTORE])


def infini(**options: object) -> Callable[[], Drafter]:
    return lambda: registry.make("drafter", "infini", corpus=DATASTORE, **options)


def rasd(part: Callable[[], Drafter], **options: object) -> Callable[[], Drafter]:
    store = {"index": STORED, "shortest": 1, "bypass": 2}
    return lambda: registry.make("drafter", "rasd", drafter=part(), **store | options)


DRAFTERS: dict[str, Draft] = {
    "none": (registry.get("drafter", "none"), TREE, (3,)),
    "chain": (drafted("chain"), CHAIN, (3,)),
    "chain, stops after doubt": (drafted("chain"), Plan(2, 2, doubtful), (3,)),
    "chain, ends where q says little": (drafted("chain"), Plan(3, 3, min_acceptance=0.3), (4,)),
    "chain, ragged batch": (drafted("chain"), Plan(1, 1), (2, 3)),
    "i.i.d. 2": (grown("iid", width=2), TREE, (3,)),
    "gumbel 2x1": (grown("gumbel", template=grid(2, 1)), TREE, (3,)),
    "gumbel 3": (grown("gumbel", template=grid(3)), Plan(3, 1), (3,)),
    "gumbel, misses": (
        grown("gumbel", known=lambda t: t[-1] != 1, template=grid(2, 1)),
        TREE,
        (3,),
    ),
    "gumbel, ragged batch": (grown("gumbel", template=grid(2)), Plan(2, 1), (1, 3)),
    "gumbel by branching": (grown("gumbel", branching=(2, 1)), TREE, (3,)),
    "i.i.d. 1x2": (grown("iid", width=(1, 2)), TREE, (3,)),
    "i.i.d. 2, misses": (grown("iid", known=lambda t: t[-1] != 1, width=2), TREE, (3,)),
    "i.i.d. 2, ragged batch": (grown("iid", width=2), Plan(2, 1), (1, 2)),
    "stochastic beam 2": (grown("stochastic_beam", width=2), TREE, (3,)),
    "stochastic beam 2, last level cut": (
        grown("stochastic_beam", width=2),
        Plan(3, 2),
        (3,),
    ),
    "stochastic beam, misses": (
        grown("stochastic_beam", known=lambda t: t[-1] != 1, width=2),
        Plan(6, 3),
        (3,),
    ),
    "stochastic beam, ragged batch": (
        grown("stochastic_beam", width=2),
        Plan(2, 1),
        (1, 2),
    ),
    "chain of 3, misses": (grown("chain", known=lambda t: t[-1] != 1), Plan(3, 3), (4,)),
    "top 2x2": (grown("template", template=grid(2, 2)), Plan(6, 2), (3,)),
    "prompt lookup": (
        made("prompt_lookup:ngram=2,tokens=2"),
        CHAIN,
        (5,),
    ),
    "token recycling": (made("token_recycling", template=grid(2, 1)), TREE, (5,)),
    "token recycling, ragged batch": (
        made("token_recycling", entries=2, template=grid(2, 1)),
        TREE,
        (2, 3),
    ),
    "token recycling, tensors": (made("token_recycling", entries=1, tensors=True), CHAIN, (4,)),
    "suffix": (made("suffix", depth=8, factor=2.0), TREE, (5,)),
    "suffix, a path": (made("suffix", depth=4, branches=False), CHAIN, (5,)),
    "suffix, ragged batch": (made("suffix", scope="group", factor=4.0), TREE, (2, 3)),
    "sam": (made("sam", tokens=2), CHAIN, (5,)),
    "sam, ragged batch": (made("sam", bias=0, place="latest"), Plan(2, 2), (2, 3)),
    "sam and another": (
        lambda: registry.make("drafter", "sam:threshold=2", other=grown("chain")()),
        CHAIN,
        (4,),
    ),
    "lookahead": (made("lookahead", ngram=3, window=2, guesses=2), Plan(6, 3), (5,)),
    "lookahead, ragged batch": (
        made("lookahead", ngram=2, window=3, guesses=2, from_prompt=True),
        TREE,
        (2, 3),
    ),
    "greedy mix 2x1": (grown("greedy_mix", branching=(2, 1)), TREE, (3,)),
    "greedy mix on a template": (grown("greedy_mix"), TREE, (3,)),
    "greedy mix 3, misses": (
        grown("greedy_mix", known=lambda t: t[-1] != 1, branching=(3, 1)),
        Plan(5, 2),
        (3,),
    ),
    "greedy mix, ragged batch": (grown("greedy_mix", branching=(2,)), Plan(2, 1), (1, 3)),
    "dynamic": (grown("dynamic"), TREE, (3,)),
    "dynamic, above a chance": (grown("dynamic"), Plan(4, 2, min_acceptance=0.1), (3,)),
    "dynamic, misses": (grown("dynamic", known=lambda t: t[-1] != 1), Plan(3, 2), (3,)),
    "dynamic, ragged batch": (grown("dynamic"), Plan(2, 2), (1, 3)),
    "dynamic, best tokens": (grown("dynamic", drawn=False), Plan(5, 3), (4,)),
    "stand": (stand(context=1, entries=3), Plan(3, 2), (4,)),
    "stand, two trajectories that learn chances": (
        stand(context=1, entries=2),
        Plan(2, 2),
        (2, 3),
    ),
    "stand, wide": (wide(context=2, entries=2), Plan(2, 2), (3,)),
    "stand, wide, two groups": (wide(context=1, entries=2), Plan(2, 1), (2, 2)),
    "stand, wide, two groups, ragged batch": (wide(context=1, entries=2), Plan(1, 1), (2, 3)),
    "stand, wide, on a template": (
        wide(context=1, entries=2, template=grid(2, 1)),
        Plan(2, 2),
        (4,),
    ),
    "stand, wide, best tokens": (wide(context=1, entries=3, choice="top"), TREE, (2, 3)),
    "stand on a template": (stand(context=1, entries=3, template=grid(2, 1)), Plan(3, 2), (4,)),
    "stand, two trajectories": (stand(context=1, entries=2, template=grid(2)), Plan(2, 1), (2, 2)),
    "stand, deterministic": (
        stand(context=2, entries=3, template=grid(2, 1), choice="top"),
        TREE,
        (5,),
    ),
    "aded": (made("aded:iterations=3,length=3,top=3"), TREE, (4,)),
    "aded, nudged far, longest dropped": (
        made("aded:iterations=2,length=3,increment=2,reward=expected,drop=longest"),
        Plan(nodes=2, depth=2),
        (4,),
    ),
    "aded, two trajectories": (
        made("aded:iterations=2,length=2,visit_all=false"),
        Plan(nodes=2, depth=2),
        (2, 2),
    ),
    "aded, best first": (made("aded:grower=best_first"), TREE, (5,)),
    "infini, chain": (infini(grower="chain"), CHAIN, (3,)),
    "infini, two of each": (infini(entries=2, min_length=2), Plan(3, 2), (2, 2)),
    "rest": (made("rest", index=STORED), TREE, (4,)),
    "rest, ragged batch": (made("rest", index=STORED, shortest=1, tokens=2), TREE, (2, 3)),
    "rasd on best tokens": (
        rasd(grown("template", law=OTHER, template=grid(2, 1)), share=0.5, top=2),
        TREE,
        (4,),
    ),
    "rasd on a chain": (rasd(grown("chain"), share=0.5, top=2), Plan(4, 2), (3,)),
    "rasd on drawn trees": (
        rasd(grown("gumbel", template=grid(2)), share=0.5, top=1, retrievers=()),
        Plan(4, 2),
        (3,),
    ),
    "rasd on i.i.d. draws": (
        rasd(grown("iid", width=2), share=0.5, retrievers=()),
        Plan(4, 1),
        (3,),
    ),
    "rasd on a drafter without a source": (
        rasd(stand(context=1, entries=2), share=0.5, top=2),
        Plan(3, 2),
        (4,),
    ),
    "rasd, ragged batch": (
        rasd(grown("chain"), share=0.5, top=1, retrievers=("suffix:factor=2",)),
        Plan(2, 2),
        (1, 3),
    ),
    "online": (
        lambda: registry.get("drafter", "online")(model=lambda: FakeRunner(DRAFT)),
        CHAIN,
        (3,),
    ),
    "online, ragged batch": (
        lambda: registry.get("drafter", "online")(model=lambda: FakeRunner(DRAFT)),
        Plan(1, 1),
        (2, 3),
    ),
    "auto with a draft model": (made("auto", model=FakeRunner(DRAFT), run=1), CHAIN, (3,)),
    "router": (
        composed(
            "router",
            stand(context=1, entries=2),
            made("prompt_lookup", ngram=1),
            run=1,
        ),
        Plan(2, 2),
        (4,),
    ),
    "router, ragged batch": (
        composed(
            "router",
            made("prompt_lookup", ngram=1),
            stand(context=1, entries=2),
            run=1,
        ),
        Plan(1, 1),
        (2, 3),
    ),
    "cascade": (
        composed("cascade", made("prompt_lookup", ngram=2), stand(context=1, entries=2)),
        Plan(2, 2),
        (4,),
    ),
    "cascade whose drawn part knows little": (
        composed(
            "cascade",
            lambda: Says((1,)),
            grown("gumbel", known=lambda t: t[-1] != 1 or len(t) == 2, template=grid(1, 1)),
            least=2,
        ),
        Plan(2, 2),
        (3,),
    ),
    "fuse drawn + chosen": (
        composed(
            "fuse",
            grown("gumbel", template=grid(2)),
            grown("template", law=OTHER, template=grid(2)),
        ),
        Plan(4, 1),
        (3,),
    ),
    "fuse chosen + chain": (
        composed(
            "fuse",
            grown("template", law=OTHER, template=grid(2, 1)),
            grown("chain"),
        ),
        TREE,
        (3,),
    ),
    "fuse greedy mix + chosen": (
        composed(
            "fuse",
            grown("greedy_mix", branching=(2,)),
            grown("template", law=OTHER, template=grid(2, 1)),
        ),
        TREE,
        (3,),
    ),
    "fuse two draws": (
        composed(
            "fuse",
            grown("gumbel", template=grid(2)),
            grown("gumbel", law=OTHER, template=grid(1, 1)),
        ),
        TREE,
        (3,),
    ),
    "fuse lookahead + token recycling + chain": (
        composed(
            "fuse",
            made("lookahead", ngram=2, window=2, guesses=2),
            made("token_recycling", entries=2),
            grown("chain"),
        ),
        Plan(6, 2),
        (3,),
    ),
    "fuse suffix + stand": (
        composed(
            "fuse",
            made("suffix", factor=2.0),
            stand(context=1, entries=3, template=grid(2)),
        ),
        Plan(4, 2),
        (4,),
    ),
    "fuse sam + chain": (
        composed("fuse", made("sam"), grown("chain")),
        Plan(4, 2),
        (4,),
    ),
    "fuse with stand": (
        composed("fuse", stand(context=1, entries=3, template=grid(2)), grown("chain")),
        Plan(4, 1),
        (3,),
    ),
}

# for laws that a shaper has changed: less of each
SHAPED: dict[str, Draft] = {
    "none": (made("none"), TREE, (3,)),
    "chain": (grown("chain"), CHAIN, (3,)),
    "chain, ragged batch": (grown("chain"), Plan(1, 1), (1, 2)),
    "gumbel 2x1": DRAFTERS["gumbel 2x1"],
    "top 2x2": DRAFTERS["top 2x2"],
    "prompt lookup": (made("prompt_lookup:ngram=2,tokens=2"), CHAIN, (4,)),
    "stand": DRAFTERS["stand"],
    "stand, wide": DRAFTERS["stand, wide"],
}
