"""Rules that change the law are refused unless asked for: by `verify`, and by `serve` by default.

What a server does that was told `--allow-lossy` is shown in tests/serving.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import forerun
from forerun import registry
from forerun.cli.main import main
from forerun.cli.output import sample_record

LOSSY = ["typical", "judge", "reflective", "lenient", "judge:delta=0.9", "lenient:eps=0.9"]


def test_these_are_all_lossy_rules() -> None:
    """Some need what only a target has, so classes are asked where they can be built."""
    names = registry.names("verifier")
    found = {name for name in names if not registry.make("verifier", name).lossless}
    assert found == {spec.partition(":")[0] for spec in LOSSY}


@pytest.mark.parametrize("rule", LOSSY)
def test_verify_refuses_it_before_a_model_is_loaded(rule: str, capsys) -> None:
    assert main(["verify", "--verifier", rule, "--model", "no such folder"]) == 2
    said = capsys.readouterr().err
    assert f"verifier '{rule}' is lossy" in said and len(said.splitlines()) == 1


def test_samples_say_whether_their_law_is_the_models(tiny_folder: Path) -> None:
    model = forerun.load(tiny_folder)
    how = {"drafter": "prompt_lookup", "max_new_tokens": 4}
    for rule in ("speculative", "lenient:eps=1", "lenient:eps=0.5"):
        (sample,) = model.generate(["the cat"], verifier=rule, **how)[0].samples
        assert sample.lossless is registry.make("verifier", rule).lossless
        assert sample_record(sample, "the cat", 0, "")["lossless"] is sample.lossless


@pytest.mark.parametrize("rule", ["typical", "judge", "reflective:weight=0.1", "lenient:kind=exp"])
def test_a_server_refuses_it_and_does_not_start(rule: str, capsys) -> None:
    assert main(["serve", "--verifier", rule, "--port", "0"]) == 2
    assert "is lossy: it changes the model's distribution" in capsys.readouterr().err
