"""What generation_config.json says of sampling is told once, as options, and never obeyed."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tiny import make_tokenizer
from transformers import AutoModelForCausalLM, GPTNeoXConfig

import forerun
from forerun.assets import MODELS
from forerun.cli import serve
from forerun.errors import ModelError
from forerun.models.generation_config import Defaults
from forerun.models.hf import HFTarget
from forerun.runner.model_runner import ModelRunner
from forerun.serving.settings import Settings
from forerun.serving.tenants import Keys

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 0}
TOLD = "sets temperature=0.6, top_k=20, top_p=0.95; transformers' generate uses that by default, "
TOLD += "forerun does not; as options here: temperature=0.6, top_k=20, top_p=0.95"


@pytest.fixture
def copy(tiny_folder: Path, tmp_path: Path) -> Any:
    """The tiny model with a generation config, or without."""

    def make(said: dict[str, Any] | None) -> str:
        folder = shutil.copytree(tiny_folder, tmp_path / "model")
        (folder / "generation_config.json").unlink()
        if said is not None:
            (folder / "generation_config.json").write_text(json.dumps(said))
        return str(folder)

    return make


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "generation_config" in r.getMessage()]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"eos_token_id": [1, 2], "bos_token_id": 1, "pad_token_id": 0, "use_cache": True},
        {"do_sample": True, "top_k": 0},
        {"temperature": 1, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
        {"do_sample": True, "temperature": None, "top_k": 0, "no_repeat_ngram_size": 0},
        {"num_beams": 1, "typical_p": 1.0, "suppress_tokens": [], "max_length": None},
        {"chat_format": "chatml", "cache_implementation": "hybrid", "top_kk": 3},
    ],
)
def test_what_changes_nothing_is_not_told(given: dict[str, Any]) -> None:
    assert Defaults.of(given) == ({}, False, {}, [])


@pytest.mark.parametrize(
    ("given", "ours", "rest"),
    [
        (QWEN, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}, []),
        ({"do_sample": True, "top_k": 50}, {"top_k": 50}, []),
        ({"do_sample": True, "temperature": 0.6}, {"top_k": 50, "temperature": 0.6}, []),
        ({"do_sample": True}, {"top_k": 50}, []),
        ({"do_sample": False}, {"temperature": 0}, []),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.8}, {"temperature": 0}, []),
        ({"temperature": 0.7, "typical_p": 0.9}, {"temperature": 0}, []),
        ({"repetition_penalty": 1.1}, {"temperature": 0, "repetition_penalty": 1.1}, []),
        (
            QWEN | {"no_repeat_ngram_size": 3, "max_length": 99, "min_p": 0.1},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1},
            ["no_repeat_ngram_size", "max_length"],
        ),
        (
            {"do_sample": True, "min_new_tokens": 600, "suppress_tokens": [3], "stop_strings": "x"},
            {"top_k": 50, "min_new_tokens": 600, "banned_tokens": [3], "stop": "x"},
            [],
        ),
        # of a form, or with a value, that Sampling would refuse
        ({"do_sample": True, "top_k": -1, "temperature": [1]}, {}, ["temperature", "top_k"]),
        ({"do_sample": True, "min_p": {"a": 1}, "top_p": "x"}, {"top_k": 50}, ["top_p", "min_p"]),
    ],
)
def test_options_for_the_same_are_told(
    given: dict[str, Any], ours: dict[str, Any], rest: list[str]
) -> None:
    found = Defaults.of(given)
    assert (found.ours, found.rest) == (ours, rest)
    neutral = [("eos_token_id", 0), ("do_sample", True)]
    assert found.given == {n: value for n, value in given.items() if (n, value) not in neutral}


def test_one_warning_as_a_model_loads(copy: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = forerun.load(folder := copy(QWEN), dtype="fp32")
    twin = model.twin()
    for one in (model, twin):
        one.generate("the cat", max_new_tokens=4, drafter="stand")
    assert isinstance(model.target, ModelRunner)
    assert told(caplog) == [f"{Path(folder) / 'generation_config.json'} {TOLD}"]
    assert [r.levelno for r in caplog.records if TOLD in r.getMessage()] == [logging.WARNING]


def test_one_warning_where_transformers_runs_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_tokenizer(tmp_path, 288)
    config = GPTNeoXConfig(
        vocab_size=288, hidden_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "num_beams": 4})
    )
    assert isinstance(forerun.load(str(tmp_path)).target, HFTarget)
    (said,) = told(caplog)
    assert said.endswith(
        "sets do_sample=False, num_beams=4; transformers' generate uses that by default "
        "(do_sample is not true: nothing is sampled), forerun does not; as options here: "
        "temperature=0; no option for num_beams"
    )


def test_of_a_loaded_model_its_own_config_counts(
    copy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(copy(QWEN))
    forerun.load(theirs)
    assert [text.partition(" sets ")[0] for text in told(caplog)] == [
        "generation_config of the model"
    ]
    caplog.clear()
    theirs.generation_config = type(theirs.generation_config)(eos_token_id=0)
    forerun.load(theirs)
    assert not told(caplog)


@pytest.mark.parametrize("said", [None, {"eos_token_id": [0, 3]}, {"do_sample": True, "top_k": 0}])
def test_no_warning_without_fields(
    copy: Any, caplog: pytest.LogCaptureFixture, said: dict[str, Any] | None
) -> None:
    forerun.load(copy(said), dtype="fp32")
    assert not told(caplog)


@pytest.mark.parametrize("name", MODELS)
def test_what_ships_with_forerun_asks_for_nothing(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    forerun.load(name)
    assert not told(caplog)


def test_a_draft_s_own_defaults_are_of_no_concern(
    copy: Any, tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = forerun.load(str(tiny_folder), dtype="fp32")
    model.generate("the cat", max_new_tokens=4, drafter=f"draft_model:model={copy(QWEN)}")
    assert not told(caplog)


def test_a_damaged_file_is_refused_as_before(copy: Any) -> None:
    folder = Path(copy(QWEN))
    (folder / "generation_config.json").write_text('{"top_k": 2')
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be used: "):
        forerun.load(str(folder))


def test_a_command_tells_it_once(copy: Any, call: Any, caplog: pytest.LogCaptureFixture) -> None:
    words = ("-p", "the cat", "-n", 3, "--max-new-tokens", 4)
    status, _, err = call("generate", "-m", copy(QWEN), *words)
    assert status == 0, err
    assert len(told(caplog)) == 1


def test_who_starts_several_engines_is_told_once(
    copy: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines are processes of Ray, whose logs nobody reads."""
    from forerun.serving import proxy, replicas, server

    backend = Mock()
    backend.open.return_value = {"methods": [], "default": ""}
    monkeypatch.setattr(replicas, "Replicas", lambda *_: backend)
    monkeypatch.setattr(proxy, "Proxy", Mock())
    monkeypatch.setattr(server, "DrainingServer", Mock())
    monkeypatch.setattr(serve, "_run", lambda _: 0)
    setup = replicas.ReplicaSetup(copy(QWEN), Settings(), Keys())
    assert serve._serve_many(setup, 2, []) == 0
    assert len(told(caplog)) == 1 and backend.close.called


def test_values_of_any_length_are_one_short_line(
    copy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    said = {"do_sample": True, "suppress_tokens": [*range(200)], "stop_strings": ["a\n" * 500]}
    forerun.load(copy(said), dtype="fp32")
    (text,) = told(caplog)
    assert len(text) < 800 and "\n" not in text and "[0, 1, 2," in text


@pytest.mark.parametrize(
    "said", [{"repetition_penalty": 1.7}, {"temperature": 0.4, "suppress_tokens": [30, 31, 32]}]
)
def test_the_options_say_what_transformers_does(copy: Any, said: dict[str, Any]) -> None:
    """Without do_sample it is greedy, whatever the temperature."""
    folder = copy({"eos_token_id": 0, **said})
    model = forerun.load(folder, dtype="fp32")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = model.tokenizer.encode("the cat sat on")
    expected = theirs.generate(torch.tensor([ids]), max_new_tokens=20)[0, len(ids) :].tolist()
    (found,) = model.generate([ids], max_new_tokens=20, **Defaults.of(said).ours)
    assert found.samples[0].tokens == expected
