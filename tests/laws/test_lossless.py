"""Every lossless method keeps the target's processed law exactly: enumerated, error <= 1e-12."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fakes import FakeRunner, NoRepeats, TableSource, table_law
from forerun import catalog, registry
from forerun.drafters.base import Grown
from forerun.drafters.fuse import Fuse
from forerun.ngrams.infini import Index
from forerun.records import Plan
from forerun.roles import Drafter
from forerun.sampling import Sampling
from forerun.shaping import Adjust
from forerun.template import grid
from forerun.tree import Proposal, Tree, chain
from harness import distance

TARGET, DRAFT, OTHER = table_law(1), table_law(2), table_law(3)
EXACT = 1e-12

REQUESTS = {
    "free": (Sampling(), tuple),
    "no repeats": (Sampling(), lambda: (NoRepeats(),)),
    "top-k 2": (Sampling(top_k=2), tuple),
    "temperature .5": (Sampling(temperature=0.5), tuple),
    "top-p .7": (Sampling(top_p=0.7), tuple),
    "min-p .4": (Sampling(min_p=0.4), tuple),
    "greedy": (Sampling(temperature=0), tuple),
    "penalties": (
        Sampling(repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.3),
        lambda: (Adjust(),),
    ),
    "bias and ban": (Sampling(logit_bias={0: 1.0}, banned_tokens=(2,)), lambda: (Adjust(),)),
    "penalty and constraint": (
        Sampling(temperature=0.7, frequency_penalty=0.5),
        lambda: (Adjust(), NoRepeats()),
    ),
}
QUICK = {"no repeats", "top-k 2", "greedy"}  # few outcomes


def doubtful(q: Proposal, token: int) -> bool:
    """Stops after a token that q holds for unlikely."""
    return bool(q.probs[q.ids == token][0] < 0.35)


CHAIN, TREE = Plan(nodes=2, depth=2), Plan(nodes=4, depth=2)


def drafted(grower: str, **options: object) -> Callable[[], Drafter]:
    return lambda: registry.get("drafter", "draft_model")(model=FakeRunner(DRAFT), grower=grower)


def grown(grower: str, known=lambda tokens: True, law=DRAFT, **options: object):
    source = TableSource(law, known)
    return lambda: Grown(source, registry.get("grower", grower)(**options))


def made(name: str, **options: object) -> Callable[[], Drafter]:
    return lambda: registry.make("drafter", name, **options)


def composed(name: str, *parts: Callable[[], Drafter], **more: object) -> Callable[[], Drafter]:
    return lambda: registry.make("drafter", name, parts=tuple(part() for part in parts), **more)


class Says(Drafter):
    """Always the same chain of chosen tokens."""

    labels = frozenset({"point"})

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens = tokens

    def propose_one(self, seq, plan, dice) -> Tree:
        return chain(self.tokens[: min(plan.nodes, plan.depth)])


def stand(**options: object) -> Callable[[], Drafter]:
    return lambda: registry.make("drafter", "stand", **options)


def measured(**options: object) -> Callable[[], Drafter]:
    """A STAND that doubts drawing and compares at every step: few tokens change its choice."""

    class Eager(registry.get("drafter", "stand")):
        def start(self, seq):
            super().start(seq)
            gain = self.memory(seq).gain
            gain.look, gain.tries = 1, 2
            gain.learn(seq, -0.5)

    Eager.__module__ = Eager.__mro__[1].__module__  # known by the same name
    return lambda: Eager(choice="measured", **options)


DATASTORE = (0, 1, 2, 0, 0, 2, 1, 1, 0, 1, 2, 2)
STORED = Index.of([DATASTORE])


def infini(**options: object) -> Callable[[], Drafter]:
    return lambda: registry.make("drafter", "infini", corpus=DATASTORE, **options)


def rasd(part: Callable[[], Drafter], **options: object) -> Callable[[], Drafter]:
    store = {"index": STORED, "shortest": 1, "bypass": 2}
    return lambda: registry.make("drafter", "rasd", drafter=part(), **store | options)


# name -> (drafter, plan, lengths of the sequences that share the drafter and the batch)
DRAFTERS = {
    "none": (registry.get("drafter", "none"), TREE, (3,)),
    "chain": (drafted("chain"), CHAIN, (3,)),
    "chain, stops after doubt": (drafted("chain"), Plan(2, 2, doubtful), (3,)),
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
        lambda: registry.make("drafter", "prompt_lookup:ngram=2,tokens=2"),
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
    "dynamic, above a chance": (grown("dynamic"), Plan(4, 2, least=0.1), (3,)),
    "dynamic, misses": (grown("dynamic", known=lambda t: t[-1] != 1), Plan(3, 2), (3,)),
    "dynamic, ragged batch": (grown("dynamic"), Plan(2, 2), (1, 3)),
    "dynamic, best tokens": (grown("dynamic", drawn=False), Plan(5, 3), (4,)),
    "stand": (stand(context=1, entries=3), Plan(3, 2), (4,)),
    "stand, two trajectories that learn chances": (
        stand(context=1, entries=2),
        Plan(2, 2),
        (2, 3),
    ),
    "stand, measured": (measured(context=1, entries=3), Plan(2, 2), (4,)),
    "stand, measured, two trajectories": (measured(context=1, entries=2), Plan(2, 1), (2, 3)),
    "stand, measured, on a template": (
        measured(context=1, entries=3, template=grid(2, 1)),
        Plan(2, 2),
        (4,),
    ),
    "stand on a template": (stand(context=1, entries=3, template=grid(2, 1)), Plan(3, 2), (4,)),
    "stand, two trajectories": (stand(context=1, entries=2, template=grid(2)), Plan(2, 1), (2, 2)),
    "stand, deterministic": (
        stand(context=2, entries=3, template=grid(2, 1), choice="top"),
        TREE,
        (5,),
    ),
    "aded": (lambda: registry.make("drafter", "aded:iterations=3,length=3,top=3"), TREE, (4,)),
    "aded, nudged far, longest dropped": (
        lambda: registry.make(
            "drafter", "aded:iterations=2,length=3,increment=2,reward=expected,drop=longest"
        ),
        Plan(nodes=2, depth=2),
        (4,),
    ),
    "aded, two trajectories": (
        lambda: registry.make("drafter", "aded:iterations=2,length=2,visit_all=false"),
        Plan(nodes=2, depth=2),
        (2, 2),
    ),
    "aded, best first": (lambda: registry.make("drafter", "aded:grower=best_first"), TREE, (5,)),
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
    "router": (
        composed("router", stand(context=1, entries=2), made("prompt_lookup", ngram=1)),
        Plan(2, 2),
        (4,),
    ),
    "router, ragged batch": (
        composed("router", made("prompt_lookup", ngram=1), stand(context=1, entries=2)),
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
        lambda: Fuse(
            parts=(
                grown("gumbel", template=grid(2))(),
                grown("template", law=OTHER, template=grid(2))(),
            )
        ),
        Plan(4, 1),
        (3,),
    ),
    "fuse chosen + chain": (
        lambda: Fuse(
            parts=(
                grown("template", law=OTHER, template=grid(2, 1))(),
                grown("chain")(),
            )
        ),
        TREE,
        (3,),
    ),
    "fuse greedy mix + chosen": (
        lambda: Fuse(
            parts=(
                grown("greedy_mix", branching=(2,))(),
                grown("template", law=OTHER, template=grid(2, 1))(),
            )
        ),
        TREE,
        (3,),
    ),
    "fuse two draws": (
        lambda: Fuse(
            parts=(
                grown("gumbel", template=grid(2))(),
                grown("gumbel", law=OTHER, template=grid(1, 1))(),
            )
        ),
        TREE,
        (3,),
    ),
    "fuse lookahead + token recycling + chain": (
        lambda: Fuse(
            parts=(
                made("lookahead", ngram=2, window=2, guesses=2)(),
                made("token_recycling", entries=2)(),
                grown("chain")(),
            )
        ),
        Plan(6, 2),
        (3,),
    ),
    "fuse suffix + stand": (
        lambda: Fuse(
            parts=(
                made("suffix", factor=2.0)(),
                stand(context=1, entries=3, template=grid(2))(),
            )
        ),
        Plan(4, 2),
        (4,),
    ),
    "fuse sam + chain": (
        lambda: Fuse(parts=(made("sam")(), grown("chain")())),
        Plan(4, 2),
        (4,),
    ),
    "fuse with stand": (
        lambda: Fuse(
            parts=(stand(context=1, entries=3, template=grid(2))(), grown("chain")()),
        ),
        Plan(4, 1),
        (3,),
    ),
}


HEAVY = {"i.i.d. 2", "chain, ragged batch", "fuse two draws", "stand, two trajectories"}


def matrix() -> list:
    """Every drafter with every request; most of the heavy rows only where slow tests run."""
    return [
        pytest.param(
            name,
            request,
            marks=[pytest.mark.slow] if name in HEAVY and request not in QUICK else [],
        )
        for name in DRAFTERS
        for request in REQUESTS
    ]


@pytest.mark.parametrize(("name", "request_"), matrix())
def test_recursive_is_exact(name: str, request_: str) -> None:
    make, plan, lengths = DRAFTERS[name]
    sampling, shapers = REQUESTS[request_]
    error = distance(
        TARGET,
        make,
        registry.make("verifier", "recursive"),
        plan=plan,
        sampling=sampling,
        shapers=shapers,
        lengths=lengths,
    )
    assert error <= EXACT


@pytest.mark.parametrize("request_", ["free", "no repeats", "temperature .5"])
@pytest.mark.parametrize("verifier", ["match", "speculative"])
@pytest.mark.parametrize(
    "name",
    [
        "chain",
        "gumbel, misses",
        "top 2x2",
        "stand",
        "token recycling",
        "lookahead",
        "suffix",
        "sam",
        "rest",
        "rasd on drawn trees",
        "rasd on i.i.d. draws",
        "fuse two draws",
    ],
)
def test_other_verifiers_are_exact(name: str, verifier: str, request_: str) -> None:
    make, plan, _ = DRAFTERS[name]
    sampling, shapers = REQUESTS[request_]
    error = distance(
        TARGET,
        make,
        registry.make("verifier", verifier),
        plan=plan,
        sampling=sampling,
        shapers=shapers,
        lengths=(2,) if verifier == "match" and name != "stand" else (3,),
    )
    assert error <= EXACT


@pytest.mark.parametrize(
    "name",
    [
        "chain",
        "gumbel 2x1",
        "top 2x2",
        "prompt lookup",
        "stand",
        "token recycling",
        "lookahead",
        "suffix",
        "sam",
        "rest",
        "rasd on best tokens",
    ],
)
@pytest.mark.parametrize("shapers", [tuple, lambda: (NoRepeats(),)])
def test_greedy_verifier_is_exact(name: str, shapers) -> None:
    make, plan, lengths = DRAFTERS[name]
    verifier = registry.make("verifier", "greedy")
    sampling = Sampling(temperature=0)
    error = distance(
        TARGET, make, verifier, plan=plan, sampling=sampling, shapers=shapers, lengths=lengths
    )
    assert error <= EXACT


# rules that judge several nodes together, each with the drafts that it is made for
JOINT = {
    "block": (
        "chain",
        "chain, stops after doubt",
        "chain, ragged batch",
        "chain of 3",
        "chain of 3, misses",
        "fuse chosen + chain",
        "prompt lookup",
    ),
    "k_seq": (
        "chain",
        "chain of 3, misses",
        "i.i.d. 2",
        "i.i.d. 1x2",
        "i.i.d. 2, misses",
        "i.i.d. 2, ragged batch",
    ),
    "transport": (
        "greedy mix 2x1",
        "greedy mix on a template",
        "greedy mix 3, misses",
        "greedy mix, ragged batch",
        "gumbel 2x1",
        "i.i.d. 2, ragged batch",
        "stochastic beam 2, last level cut",
        "top 2x2",
        "stand on a template",
        "fuse chosen + chain",
        "fuse drawn + chosen",
        "fuse greedy mix + chosen",
        "fuse two draws",
    ),
}
LONGER = {"chain of 3": (grown("chain"), Plan(3, 3), (4,))}
SLOW_JOINT = {
    "i.i.d. 2",
    "chain of 3",
    "chain, ragged batch",
    "i.i.d. 2, ragged batch",
    "fuse two draws",
}


def joint_matrix() -> list:
    return [
        pytest.param(
            verifier,
            name,
            request,
            marks=[pytest.mark.slow] if name in SLOW_JOINT and request not in QUICK else [],
        )
        for verifier, names in JOINT.items()
        for name in names
        for request in REQUESTS
    ]


@pytest.mark.parametrize(("verifier", "name", "request_"), joint_matrix())
def test_joint_rules_are_exact(verifier: str, name: str, request_: str) -> None:
    make, plan, lengths = (DRAFTERS | LONGER)[name]
    sampling, shapers = REQUESTS[request_]
    error = distance(
        TARGET,
        make,
        registry.make("verifier", verifier),
        plan=plan,
        sampling=sampling,
        shapers=shapers,
        lengths=lengths,
    )
    assert error <= EXACT


ROWS = [row for row in catalog.rows() if row.lossless and row.state != catalog.MISSING]
SHAPES = {"chain": Plan(2, 2), "tree": Plan(4, 2)}  # the fourth place of the template branches


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("request_", ["free", "no repeats", "top-k 2", "temperature .5"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_lossless_row_of_the_catalog_is_exact(row, request_: str, shape: str) -> None:
    """Each row with its own parts; a row that is not built whole runs with `recursive`."""
    parts = {"drafter": "none", **row.parts, **row.tiny}
    grower = {} if shape == "tree" else {"grower": "chain"}
    if row.name == "draft_model" and shape == "tree":
        grower = {"grower": "gumbel"}
    verifier = parts.get("verifier", "speculative")
    sampling, shapers = REQUESTS[request_]
    error = distance(
        TARGET,
        lambda: registry.make("drafter", parts["drafter"], model=FakeRunner(DRAFT), **grower),
        registry.make("verifier", verifier if row.state == catalog.WORKS else "recursive"),
        plan=SHAPES[shape],
        sampling=sampling,
        shapers=shapers,
        lengths=(3,) if "draft_model" in parts["drafter"] else (4,),
    )
    assert error <= EXACT


@pytest.mark.parametrize("name", [n for n in DRAFTERS if n != "none"])
def test_something_is_drafted_and_accepted(name: str) -> None:
    """The equalities above must not hold for lack of drafts."""
    from fakes import FakeTarget, run_all, sequence
    from forerun.dice import SeededDice
    from forerun.engine.loop import Engine
    from forerun.engine.stats import Recorder
    from harness import PROMPT, Given

    make, plan, _ = DRAFTERS[name]
    recorder = Recorder()
    engine = Engine(
        FakeTarget(TARGET),
        make(),
        registry.make("verifier", "recursive"),
        Given(plan),
        listeners=[recorder],
    )
    seqs = [sequence(PROMPT, 40, SeededDice(7, i)) for i in range(2)]
    run_all(engine, seqs)
    assert all(recorder.of(seq).accepted > 0 for seq in seqs)
    assert np.isclose(recorder.of(seqs[0]).tau, 40 / recorder.of(seqs[0]).passes)
