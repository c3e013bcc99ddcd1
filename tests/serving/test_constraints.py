"""Constraints that requests name: they hold for those requests only, and for no others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import forerun
from forerun.cli.main import main
from forerun.constraints.corpus import Corpus
from forerun.ngrams.index.fm.index import FMIndex
from served import Served, command, thread

LONG = {"model": "tiny", "prompt": "the", "max_tokens": 10, "temperature": 0.0}


@pytest.fixture(scope="module")
def fm(tmp_path_factory: pytest.TempPathFactory, tiny_chat: Path) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    text = folder / "c.txt"
    text.write_text("the cat sat on the mat and the dog ran away from the cat again\n" * 3)
    words = ["index", "fm", "build", folder / "c.fm", text, "--tokenizer", tiny_chat]
    assert main([str(word) for word in words]) == 0
    return str(folder / "c.fm")


@pytest.fixture
def served(tiny_model: Any, fm: str) -> Iterator[Served]:
    specs = {"book": f"corpus:index={fm}", "near": f"corpus:index={fm},window=2"}
    with thread(tiny_model, constraints=specs) as served:
        yield served


def text(served: Served, **speculation: Any) -> str:
    (choice,) = served.client().completions.create(
        **LONG, extra_body={"speculation": speculation}
    ).choices  # fmt: skip
    return choice.text


def test_a_request_is_held_to_what_it_names(served: Served, tiny_model: Any, fm: str) -> None:
    how = {"temperature": 0.0, "max_new_tokens": 10}
    shaper = Corpus(FMIndex.load(fm))
    (held,) = tiny_model.generate("the", shapers=[shaper], drafter="none", **how)
    (free,) = tiny_model.generate("the", drafter="none", **how)
    assert held.text != free.text
    with ThreadPoolExecutor(8) as pool:  # in one batch, drafting and not
        asked = [{"constraint": "book"}, {}, {"constraint": ["book"], "method": "none"}, {}]
        found = [*pool.map(lambda given: text(served, **given), asked * 2)]
    assert found == [held.text, free.text, held.text, free.text] * 2


def test_constraints_are_listed_and_unknown_ones_refused(served: Served, tiny_model: Any) -> None:
    (model,) = served.client().models.list().data
    assert model.model_extra["speculation"]["constraints"] == ["book", "near"]
    for name, said in (("bok", "did you mean 'book'"), (["book", "x"], "unknown constraint 'x'")):
        answer = served.post("/v1/completions", json=LONG | {"speculation": {"constraint": name}})
        error = answer.json()["error"]
        assert answer.status_code == 400 and said in error["message"]
        assert (error["param"], error["code"]) == ("speculation.constraint", "unknown_constraint")
    with thread(tiny_model) as plain:
        answer = plain.post("/v1/completions", json=LONG | {"speculation": {"constraint": "book"}})
        assert answer.status_code == 400
        assert "this server offers no constraint" in answer.json()["error"]["message"]


def test_target_and_constraint_are_options_of_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, said in (
        (["--constraint", "corpus:index=no.fm"], "no.fm does not exist"),
        (
            ["--constraint", "corpus=infini:index=x"],
            "--constraint must not use the name of another",
        ),
        (["--target", "entropy_switch:small=draft"], "needs threshold"),
    ):
        assert main(["serve", *words]) == 2
        assert said in capsys.readouterr().err
    problem = "Ann has 3 boxes with 12 pens each. How many pens?"
    body = {"messages": [{"role": "user", "content": problem}], "temperature": 0.0}
    body |= {"max_tokens": 24, "model": "reasoner"}
    target = "entropy_switch:small=draft,threshold=99"  # the small model speaks alone
    with command("reasoner", "--target", target) as served:
        said = served.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    small = forerun.load("draft").chat(problem, temperature=0.0, max_new_tokens=24)
    assert said["content"] == small.text


def test_an_operators_schema_joins_the_constraint_of_the_request(
    tiny_model: Any, tmp_path: Path
) -> None:
    """It allows and forces tokens like the request's own; others are free."""
    (tmp_path / "s.json").write_text(
        '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], '
        '"additionalProperties": false}'
    )
    specs = {"form": f"json_schema:file={tmp_path / 's.json'},whitespace=false"}
    call: Any = {"model": "tiny", "prompt": "the", "max_tokens": 60, "seed": 3}
    statistics = {"statistics": True}
    with thread(tiny_model, constraints=specs) as served:
        client = served.client()
        for names, own, pattern in (
            ("form", {}, r'\{"a":-?\d+\}'),
            (["form"], {"guided_regex": r"[^0-9]*[0-4]{2}[^0-9]*"}, r'\{"a":-?[1-4][0-4]\}'),
            (["form", "form"], {"constraint_start": " "}, None),
        ):
            body = own | {"speculation": {"constraint": names} | statistics}
            answer = client.completions.create(**call, extra_body=body)
            (choice,), stats = answer.choices, answer.model_extra["speculation"]["choices"][0]
            if pattern and choice.finish_reason == "stop":
                assert re.fullmatch(pattern, choice.text) and stats["constraint"]["valid"]
            elif pattern:
                assert choice.text.startswith('{"a":') and not stats["constraint"]["valid"]
        free = client.completions.create(**call, extra_body={"speculation": statistics})
        assert "constraint" not in free.model_extra["speculation"]["choices"][0]
