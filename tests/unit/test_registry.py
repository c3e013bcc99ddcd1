"""Names become classes, text becomes options, and near misses are named."""

from __future__ import annotations

import re

import pytest

from forerun import catalog, registry
from forerun.catalog import Row
from forerun.core.growing import Grower
from forerun.core.roles import Controller, Drafter, Verifier
from forerun.errors import ConfigError, UnknownName
from forerun.growers.iid import Iid

ROLES = {
    "drafter": Drafter,
    "grower": Grower,
    "verifier": Verifier,
    "controller": Controller,
}


@pytest.mark.parametrize("kind", ROLES)
def test_every_registered_name_is_one_class_of_its_role(kind):
    for name in registry.names(kind):
        cls = registry.get(kind, name)
        assert issubclass(cls, ROLES[kind])
        assert cls.__module__.rpartition(".")[2] == name


def test_base_modules_are_no_methods():
    assert "base" not in registry.names("drafter")
    with pytest.raises(UnknownName):
        registry.get("verifier", "base")


def test_a_near_miss_names_the_nearest_and_the_listing():
    with pytest.raises(UnknownName) as caught:
        registry.get("verifier", "recursiv")
    assert "unknown verifier 'recursiv'" in str(caught.value)
    assert "did you mean 'recursive'" in str(caught.value)
    assert "`forerun methods --kind verifier` lists all" in str(caught.value)


def test_plain_decoding_is_named():
    for spec in ("plain", "plain:batch=2"):
        with pytest.raises(UnknownName, match="plain decoding is drafter 'none'"):
            registry.resolve("drafter", spec)


def test_a_far_miss_lists_what_is_known():
    with pytest.raises(UnknownName, match="known: .*, chain, .*"):
        registry.get("grower", "xyzzy")


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        (
            "drafter",
            "nothing_yet",
            "which the catalog lists as missing (`forerun methods paper`)",
        ),
        ("drafter", "NOTHING_YET", "drafters that work: "),
        ("controller", "guess", "belongs to A system, which"),
        ("drafter", "paper", "'paper' is not a drafter; the catalog lists this system as"),
        ("verifier", "whole", "use --drafter stand --verifier recursive"),
        ("grower", "whole", "use --drafter stand --verifier recursive"),
    ],
)
def test_a_name_of_the_catalog_that_is_not_built_says_so(monkeypatch, kind, name, said):
    """And names what works instead."""
    built = {"drafter": "stand", "verifier": "recursive"}
    rows = (
        Row("paper", "A system", None, ("drafters/nothing_yet", "controllers/guess"), "", parts={}),
        Row("whole", "Another", None, ("drafters/stand",), "", parts=built, state="works"),
    )
    monkeypatch.setattr(catalog, "rows", lambda: rows)
    with pytest.raises(UnknownName) as caught:
        registry.get(kind, name)
    assert said in str(caught.value)


def test_an_unknown_option_names_the_nearest_and_the_command():
    with pytest.raises(UnknownName) as caught:
        registry.make("grower", "iid:widht=3")
    assert "did you mean 'width'" in str(caught.value)
    assert "`forerun methods iid`" in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "name", "options"),
    [
        ("stand", "stand", {}),
        ("stand:context=4,entries=10", "stand", {"context": "4", "entries": "10"}),
        (" stand : context = 4 ", "stand", {"context": "4"}),
        ("draft-model:max-seqs=2", "draft_model", {"max_seqs": "2"}),
        ("x:path=models/small=old", "x", {"path": "models/small=old"}),
        ("x:a=1,,b=2,", "x", {"a": "1", "b": "2"}),
    ],
)
def test_a_spec_is_split_into_name_and_texts(spec, name, options):
    assert registry.parse(spec) == (name, options)


@pytest.mark.parametrize("spec", ["auto:run=8,run=9", "auto:run=8, run = 8"])
def test_an_option_that_comes_twice_is_refused(spec):
    with pytest.raises(ConfigError, match="option 'run' of 'auto' is given twice, as 8 and as"):
        registry.parse(spec)
    with pytest.raises(ConfigError, match="option 'a_b' of 'x' is given twice"):
        registry.parse("x:a-b=1,a_b=2")


def test_an_option_that_is_needed_is_named():
    with pytest.raises(ConfigError, match="'draft_model' needs model; write draft_model:model="):
        registry.make("drafter", "draft_model")


def test_a_tokenizer_is_no_option_of_users():
    with pytest.raises(UnknownName, match="unknown option .*'tokenizer'; known: ") as caught:
        registry.resolve("drafter", "auto:tokenizer=x")
    assert "'tokenizer'" not in str(caught.value).partition(";")[2]
    assert registry.is_option_unset("drafter", "stand:context=4", "scope")
    assert not registry.is_option_unset("drafter", "stand:scope=tenant", "scope")
    assert not registry.is_option_unset("drafter", "auto", "tokenizer")


@pytest.mark.parametrize(
    ("kind", "spec", "options"),
    [
        ("drafter", "stand:context=4,budget_mb=1e+2", {"context": 4, "budget_mb": 100.0}),
        ("drafter", "stand:context=4+3+2", {"context": (4, 3, 2)}),
        (
            "drafter",
            "stand:seed_from_prompt=False,template=none",
            {"seed_from_prompt": False, "template": None},
        ),
        ("drafter", "fuse:parts=suffix+stand", {"parts": ("suffix", "stand")}),
        ("drafter", "draft_model:model=models/a+b", {"model": "models/a+b"}),
        ("drafter", "draft_model:model=7", {"model": "7"}),
        ("controller", "fixed:nodes=+5", {"nodes": 5}),
    ],
)
def test_texts_become_values_of_the_declared_types(kind, spec, options):
    found = registry.resolve(kind, spec)[1]
    assert found == options
    assert [type(v) for v in found.values()] == [type(v) for v in options.values()]


@pytest.mark.parametrize(
    ("kind", "spec", "said"),
    [
        ("controller", "fixed:nodes=many", "nodes takes a whole number, got 'many'"),
        ("controller", "fixed:nodes=1.5", "nodes takes a whole number, got '1.5'"),
        ("controller", "fixed:nodes=none", "nodes takes a whole number, got 'none'"),
        ("drafter", "aded:renormalise=7", "renormalise takes true or false, got '7'"),
        ("drafter", "stand:budget_mb=x", "budget_mb takes a number, got 'x'"),
        (
            "drafter",
            "stand:context=abc",
            "context takes a whole number or whole numbers joined by + (4+3+2), got 'abc'",
        ),
    ],
)
def test_a_value_of_another_type_is_refused_in_plain_words(kind, spec, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        registry.resolve(kind, spec)


@pytest.mark.parametrize("spec", ["stand:context", "stand:context=", "stand:context= ,entries=4"])
def test_an_option_without_a_value_is_refused(spec):
    with pytest.raises(ConfigError, match="'context' of 'stand' has no value; write context=VALUE"):
        registry.parse(spec)


def test_make_passes_options_and_lets_extra_ones_win():
    assert isinstance(registry.make("grower", "iid"), Iid)
    assert registry.make("grower", "iid:width=3").width == 3
    assert registry.make("grower", "iid:width=3", width=5).width == 5
    assert registry.make("grower", "iid", tokenizer=None).width == 2  # not an option of iid


def test_make_refuses_an_extra_that_the_part_has_not():
    with pytest.raises(UnknownName, match=r"option of grower 'iid': 'widht'; did you mean 'width'"):
        registry.make("grower", "iid", widht=5)
    with pytest.raises(UnknownName, match="option of drafter 'prompt_lookup': 'template'"):
        registry.make("drafter", "prompt_lookup", template=None)


def test_options_are_the_keyword_arguments():
    assert list(registry.options(Iid)) == ["width"]
    assert registry.options(Iid)["width"].default == 2


def test_a_second_part_walks_no_folder(monkeypatch):
    """Every run makes a verifier and a controller before its first step."""
    registry.make("controller", "budget")
    monkeypatch.setattr(registry.pkgutil, "iter_modules", lambda path: pytest.fail("walked again"))
    registry.make("controller", "budget:nodes=4")


def test_options_of_a_part_cannot_be_changed():
    with pytest.raises(TypeError):
        registry.options(Iid)["width"] = None


class FakeEntry:
    """An entry point of a third-party package."""

    name = "elsewhere"

    def load(self):
        return Iid


def test_third_party_entry_points_join(monkeypatch):
    def foreign(group):
        return {"elsewhere": FakeEntry()} if group == "forerun.growers" else {}

    monkeypatch.setattr(registry, "_entry_points", foreign)
    assert "elsewhere" in registry.names("grower")
    assert "elsewhere" not in registry.names("drafter")
    assert registry.make("grower", "elsewhere:width=4").width == 4
