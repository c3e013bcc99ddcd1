"""`--constraint-sampling smc` in the commands and in Python: answers, weights, refusals."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from three_tokens import three_tokens

from fakes import FakeTarget, table_law
from forerun.api import Model
from forerun.cli.main import main
from forerun.constraints.choice import Choice
from forerun.core.sampling import Sampling
from forerun.errors import ConfigError, UnknownName

PROMPT = ["-p", "Ann has 12"]
SHORT = [*PROMPT, "--max-new-tokens", "6", "--seed", "3"]
SMC = ["generate", *SHORT, "--constraint-sampling"]
DIGITS = ["--regex", "[0-9]{2}"]


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    assert main([*words]) == code
    shown = capsys.readouterr()
    return shown.out, shown.err


def test_generate_writes_particles_with_weights_and_evidence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, _ = said(capsys, *SMC, "smc:n=4,ess=0.9", *DIGITS, "-n", "2", "--json")
    for line in out.splitlines():
        record = json.loads(line)["constraint"]
        assert record["valid"] and record["log_evidence"] == record["logw"] < 0
        particles = record["particles"]
        assert len(particles) == 4 and {"text", "weight", "logw", "valid"} == set(particles[0])
        assert math.fsum(one["weight"] for one in particles) == pytest.approx(1)
        mean = math.fsum(math.exp(one["logw"]) for one in particles) / 4
        assert math.log(mean) == pytest.approx(record["log_evidence"])
        assert json.loads(line)["text"] in [one["text"] for one in particles]


def test_generate_prints_the_answer_and_shows_the_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, err = said(capsys, *SMC, "smc:n=6", *DIGITS)
    assert re.fullmatch(r"[0-9]{2}\n", out)
    assert "log probability of allowed texts: -" in err and " among 6 particles" in err
    shares = [float(found) for found in re.findall(r"^ +([0-9.]+)  '[0-9]{2}'$", err, re.M)]
    assert shares and math.fsum(shares) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    "words",
    [
        ["--json-schema", "SCHEMA"],
        ["--choice", "yes|no"],
        ["--grammar", "GRAMMAR"],
        ["--constraint", "regex:pattern=[0-9]+"],
        [*DIGITS, "--constraint-start", "."],
    ],
)
def test_every_kind_of_constraint_works_in_both_commands(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"SCHEMA": tmp_path / "digit.json", "GRAMMAR": tmp_path / "digit.lark"}
    files["SCHEMA"].write_text('{"enum": [1, 2, "three"]}')
    files["GRAMMAR"].write_text('start: "1" | "2"')
    words = [str(files.get(word, word)) for word in words]
    is_free = "--constraint-start" in words  # the text before the marker may be long
    length = ["--max-new-tokens", "40" if is_free else "8"]
    options = [*PROMPT, *length, "--seed", "5", *words, "--json"]
    generated, _ = said(capsys, "generate", *options, "--constraint-sampling", "smc")
    searched, _ = said(capsys, "search", "particles", *options, "--temperature", "1")
    one, found = json.loads(generated), json.loads(searched)
    assert one["constraint"]["log_evidence"] == found["log_evidence"]
    assert one["text"] == found["text"] and (one["constraint"]["valid"] or is_free)


def test_other_searches_take_constraints_too(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = said(capsys, "search", "best_of", *SHORT, "-n", "3", *DIGITS, "--json")
    assert all(re.fullmatch("[0-9]{2}", s["text"]) for s in json.loads(out)["samples"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["smc"], "constraint_sampling='smc' needs a constraint"),
        (["smc", *DIGITS, "--temperature", "0"], "needs a temperature above 0"),
        (["smc", *DIGITS, "--top-p", "0.9"], "without top_k, top_p and min_p"),
        (["smc", *DIGITS, "--memory", "some.mem"], "does not draft; leave --memory out"),
        (["smc", *DIGITS, "--set", "ignore_eos=true"], "ignore_eos"),
        (["smc:n=0", *DIGITS], "number of particles"),
        (["smc:n=many", *DIGITS], "n"),
        (["smc:ess=2", *DIGITS], "ess"),
        (["smc:nn=2", *DIGITS], "did you mean 'n'"),
        (["smc:resampling=stratifed", *DIGITS], "did you mean 'stratified'"),
        (["mask:n=2", *DIGITS], "constraint_sampling must be one of"),
        (["smk", *DIGITS], "constraint_sampling must be one of"),
        (["awrs", *DIGITS, "--temperature", "0"], "needs a temperature above 0"),
    ],
)
def test_what_cannot_be_combined_is_refused_before_a_model_is_loaded(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setattr("forerun.cli.loading.load", lambda *_, **__: pytest.fail("loaded"))
    _, err = said(capsys, *SMC, *words, code=2)
    assert message in err


def test_more_particles_than_the_batch_need_no_other_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, _ = said(capsys, *SMC, "smc:n=20", *DIGITS, "--batch", "1", "--json")
    assert len(json.loads(out)["constraint"]["particles"]) == 20


def test_in_python_a_request_states_its_particles() -> None:
    model = Model(FakeTarget(table_law(1)), three_tokens())
    how = Sampling(constraint=Choice(("a", "ab")), max_new_tokens=4, seed=1)
    found = model.generate([[0, 1]], how, constraint_sampling="smc:n=7")[0].samples[0]
    assert found.valid and len(found.constraint.particles) == 7
    assert found.constraint.logw == found.constraint.log_evidence
    masked = model.generate([[0, 1]], how)[0].samples[0]
    assert masked.constraint.particles is None and masked.constraint.log_evidence is None
    each = [Sampling(constraint=how.constraint, constraint_sampling=f"smc:n={n}") for n in (2, 3)]
    results = model.generate([[0, 1]] * 2, each, max_new_tokens=4)
    assert [len(one.samples[0].constraint.particles) for one in results] == [2, 3]


def test_python_refuses_the_same() -> None:
    model = Model(FakeTarget(table_law(1)), three_tokens())
    own = {"constraint": Choice(("a", "ab")), "max_new_tokens": 4}
    with pytest.raises(UnknownName, match="unknown option of search 'particles': 'm'"):
        model.generate([[0, 1]], constraint_sampling="smc:m=2", **own)
    with pytest.raises(ConfigError, match="ignore_eos"):
        model.generate([[0, 1]], constraint_sampling="smc", ignore_eos=True, **own)
    with pytest.raises(ConfigError, match="must be one of"):
        Sampling(constraint_sampling="awrs:n=2")


def test_a_drafter_that_is_not_used_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    _, err = said(capsys, *SMC, "smc", "--choice", "yes|no", "--drafter", "stand")
    assert "drafter stand is not used" in err
