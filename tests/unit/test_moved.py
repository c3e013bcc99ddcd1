"""Modules of an earlier release: their import names the new place."""

from __future__ import annotations

import importlib
import importlib.util

import pytest

from forerun.utils.moved import moved


@pytest.mark.parametrize("old", ["roles", "engine.api", "ngrams.memory", "bench.own"])
def test_an_old_name_is_an_error_with_the_new_one(old: str) -> None:
    with pytest.raises(ImportError, match=rf"forerun\.{old} has moved; import forerun\.\w"):
        importlib.import_module(f"forerun.{old}")


def test_all_new_names_exist_and_no_old_one_does() -> None:
    assert len(moved()) > 100
    for old, (new, *renamed) in moved().items():
        module = importlib.import_module(f"forerun.{new}")
        for pair in renamed:
            assert hasattr(module, pair.partition("=")[2]), (new, pair)
        with pytest.raises(ImportError):
            importlib.util.find_spec(f"forerun.{old}")


def test_renamed_classes_of_a_moved_module_are_named() -> None:
    with pytest.raises(ImportError, match="forerun.core.logits instead; Laws is now TargetProbs"):
        importlib.import_module("forerun.shaping")


@pytest.mark.parametrize(
    ("old", "said"),
    [
        ("verifiers.base.Walk", "forerun.verifiers.base.Walk is now KernelVerifier; import that"),
        ("training.loop.Recipe", "Recipe is now forerun.training.recipes.base.Recipe"),
    ],
)
def test_a_renamed_class_of_a_module_that_stayed_is_named(old: str, said: str) -> None:
    module, _, name = old.rpartition(".")
    with pytest.raises(ImportError, match=said):
        exec(f"from forerun.{module} import {name}")
    with pytest.raises(ImportError, match="cannot import name 'Never'"):
        exec(f"from forerun.{module} import Never")


def test_a_name_that_never_was_stays_unknown() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'forerun.rolls'"):
        importlib.import_module("forerun.rolls")
