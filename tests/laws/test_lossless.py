"""Every lossless method keeps the target's processed law exactly: enumerated, error <= 1e-12."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fakes import FakeRunner, NoRepeats, TableSource, table_law
from forerun import catalog, registry
from forerun.drafters.base import Grown
from forerun.drafters.fuse import Fuse
from forerun.records import Plan
from forerun.roles import Drafter
from forerun.sampling import Sampling
from forerun.shaping import Adjust
from forerun.template import grid
from forerun.tree import Proposal
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


def stand(**options: object) -> Callable[[], Drafter]:
    return lambda: registry.make("drafter", "stand", **options)


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
    "top 2x2": (grown("template", template=grid(2, 2)), Plan(6, 2), (3,)),
    "prompt lookup": (
        lambda: registry.make("drafter", "prompt_lookup:ngram=2,tokens=2"),
        CHAIN,
        (5,),
    ),
    "stand": (stand(context=1, entries=3, template=grid(2, 1)), Plan(3, 2), (4,)),
    "stand, two trajectories": (stand(context=1, entries=2, template=grid(2)), Plan(2, 1), (2, 2)),
    "stand, deterministic": (
        stand(context=2, entries=3, template=grid(2, 1), stochastic=False),
        TREE,
        (5,),
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
@pytest.mark.parametrize("name", ["chain", "gumbel, misses", "top 2x2", "stand", "fuse two draws"])
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


@pytest.mark.parametrize("name", ["chain", "gumbel 2x1", "top 2x2", "prompt lookup", "stand"])
@pytest.mark.parametrize("shapers", [tuple, lambda: (NoRepeats(),)])
def test_greedy_verifier_is_exact(name: str, shapers) -> None:
    make, plan, lengths = DRAFTERS[name]
    verifier = registry.make("verifier", "greedy")
    sampling = Sampling(temperature=0)
    error = distance(
        TARGET, make, verifier, plan=plan, sampling=sampling, shapers=shapers, lengths=lengths
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
