"""Numbers that options take: what is no number, or beyond all sense, is refused in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest

from forerun import registry
from forerun.drafters.aded import Aded
from forerun.drafters.sam import Sam
from forerun.drafters.stand import Stand
from forerun.drafters.suffix import Suffix
from forerun.drafters.token_recycling import TokenRecycling
from forerun.errors import ConfigError
from forerun.ngrams.tables.logits.pool import MAX_BUDGET_MB, in_bytes
from forerun.registry import MAX_NUMBER


def numbers(*types: str) -> Iterator[tuple[str, str, str]]:
    """Kind, name and option of everything that takes numbers of a type."""
    kinds = [kind for kind, found in registry.KINDS.items() if find_spec(found.role.split(":")[0])]
    for kind in kinds:
        for name in registry.names(kind):
            for option, parameter in registry.text_options(registry.get(kind, name)).items():
                if re.search(rf"\b({'|'.join(types)})\b", str(parameter.annotation)):
                    yield kind, name, option


def test_no_method_takes_what_is_no_finite_number() -> None:
    found = [*numbers("float")]
    assert len(found) > 20 and ("drafter", "suffix", "factor") in found
    for kind, name, option in found:
        for text in ("nan", "inf", "-inf", "1e308", "-1e308", "1e999"):
            said = f"option {option} takes numbers from -{MAX_NUMBER} to {MAX_NUMBER}, got '{text}'"
            with pytest.raises(ConfigError, match=re.escape(said)):
                registry.resolve(kind, f"{name}:{option}={text}")


def test_no_method_takes_numbers_that_kernels_cannot_count_to() -> None:
    found = [*numbers("int", "TokenId")]
    assert len(found) > 50 and ("drafter", "rest", "ids") in found
    for kind, name, option in found:
        for number in (10**30, MAX_NUMBER + 1, -MAX_NUMBER - 1):
            with pytest.raises(ConfigError, match=f"option {option} takes numbers from"):
                registry.resolve(kind, f"{name}:{option}={number}")
        assert registry.resolve(kind, f"{name}:{option}={MAX_NUMBER}")[1]


def test_one_of_several_numbers_is_enough() -> None:
    with pytest.raises(ConfigError, match=r"got '4\+99999999999'"):
        registry.resolve("drafter", "stand:context=4+99999999999")


@pytest.mark.parametrize("mb", [float("nan"), float("inf"), 1e308, -1.0, 0.0, MAX_BUDGET_MB + 1])
@pytest.mark.parametrize("made", [Stand, Suffix, Sam, TokenRecycling, Aded])
def test_a_budget_that_is_no_size_is_refused(made: Callable[..., object], mb: float) -> None:
    with pytest.raises(ConfigError, match="budget_mb must be above 0 and at most"):
        made(budget_mb=mb)


def test_a_budget_is_told_by_its_name() -> None:
    with pytest.raises(ConfigError, match="corpus_mb must be above 0 and at most .*, got -1"):
        Aded(corpus_mb=-1)
    assert in_bytes(0.5) == 1 << 19 and in_bytes(MAX_BUDGET_MB) == MAX_BUDGET_MB << 20


NAN = float("nan")


@pytest.mark.parametrize(
    ("kind", "spec", "said"),
    [
        ("drafter", "infini:corpus=0", "at least 2 token ids, got (0,)"),
        ("drafter", "infini:corpus=1+2,entries=4097", "entries must be at most 4096"),
        ("drafter", "infini:corpus=1+2,max_support=2147483647", "max_support at most 1048576"),
        ("drafter", "rasd:drafter=stand,longest=-1", "longest at least shortest; got 2, 10 and -1"),
        ("drafter", "rasd:drafter=stand,tokens=0", "shortest and tokens must be at least 1"),
        ("drafter", "aded:iterations=2147483647", "iterations and top from 1 to 10000"),
        ("grower", "monte_carlo:top=10001", "iterations and top from 1 to 10000"),
        ("grower", "gumbel:branching=1024+1024", "at most 65536 places in all, got (1024, 1024)"),
        ("grower", "greedy_mix:branching=0", "integers of at least 1"),
        ("controller", "additive:nodes=1025", "additive needs 0 to 1024 nodes"),
        ("controller", "acceptance_head:most=1025", "1 <= least <= most <= 1024"),
    ],
)
def test_each_method_states_its_bounds(kind: str, spec: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        registry.make(kind, spec)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Suffix(factor=NAN),
        lambda: Suffix(offset=NAN),
        lambda: Suffix(min_score=NAN),
        lambda: Aded(increment=NAN),
        lambda: Aded(cap=NAN),
    ],
)
def test_what_is_no_number_is_in_no_range(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match="at least 0"):
        make()
