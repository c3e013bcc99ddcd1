"""The error for a drafter and a verifier that do not fit names what does."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fakes import FakeRunner, TableSource, table_law
from forerun import registry
from forerun.core.roles import Drafter, Verifier
from forerun.core.tree import LAW_NAMES
from forerun.drafters.base import Grown
from forerun.drafters.draft_model import DraftModel
from forerun.engine.engine import check_pair
from forerun.engine.pair_error import DRAWN_AS, pair_error
from forerun.errors import ConfigError
from forerun.growers.gumbel import Gumbel


class Lazy(Drafter):
    """Drafts that most verifiers cannot judge; an option `grower` that this method ignores."""

    labels = frozenset({"lazy"})
    name = "lazy"

    def __init__(self) -> None:
        self.grower = registry.make("grower", "chain")

    def propose(self, seqs, plans, dice):
        raise NotImplementedError


def refused(drafter: Drafter, verifier: Verifier) -> str:
    with pytest.raises(ConfigError) as caught:
        check_pair(drafter, verifier)
    return str(caught.value)


def test_it_names_the_verifiers_that_accept_the_drafts() -> None:
    assert refused(Lazy(), registry.make("verifier", "lenient")) == (
        "verifier 'lenient' does not accept the drafts of drafter 'lazy': tokens drawn without a "
        "list of all probabilities (lazy); use verifier speculative, match or recursive"
    )


def test_it_names_growers_where_the_drafter_has_them() -> None:
    said = refused(
        DraftModel(model=FakeRunner(table_law(1)), grower="gumbel"),
        registry.make("verifier", "k_seq"),
    )
    assert said.startswith("verifier 'k_seq' does not accept the drafts of drafter 'draft_model': ")
    assert "tokens drawn without replacement (swor); use verifier speculative, block," in said
    assert said.endswith(", or grower chain or iid")


def test_only_lossless_verifiers_are_named_and_each_accepts() -> None:
    drafter = Grown(TableSource(lambda tokens: np.ones(2) / 2), Gumbel())
    said = refused(drafter, registry.make("verifier", "k_seq"))
    listed = re.findall(r"\w+", said.partition("use verifier ")[2].partition(", or grower")[0])
    named = [name for name in listed if name != "or"]
    for name in named:
        verifier = registry.make("verifier", name)
        assert verifier.lossless
        check_pair(drafter, verifier)
    assert named[0] == registry.DEFAULT_VERIFIER and len(named) == len(set(named))
    assert not {"typical", "lenient", "weighted", "k_seq"} & set(named)


def test_two_ways_of_drawing_are_joined() -> None:
    drafter = registry.make("drafter", "stand")
    said = refused(drafter, registry.make("verifier", "k_seq"))
    assert "'stand': picked tokens (point) and tokens drawn without replacement (swor);" in said
    assert "grower" not in said


def test_no_verifier_at_all() -> None:
    """Labels of another package that no registered verifier declares."""

    class Odd(Lazy):
        labels = frozenset({"odd"})

    said = str(pair_error(Odd(), registry.make("verifier", "greedy")))
    assert said.endswith("'lazy': tokens drawn by odd; use another drafter")


def test_every_label_is_explained() -> None:
    assert DRAWN_AS.keys() == LAW_NAMES.keys()
