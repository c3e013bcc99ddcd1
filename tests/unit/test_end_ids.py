"""End ids outside the vocabulary are dropped with a warning when a model is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny

import forerun
from forerun.models.tokenizer import Tokenizer

SIZE = 288


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def write(folder: Path, file: str, **fields: Any) -> None:
    path = folder / f"{file}.json"
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(old | fields))


@pytest.mark.parametrize(
    ("file", "fields", "kept"),
    [
        ("generation_config", {"eos_token_id": [1, 900]}, (0, 1)),
        ("generation_config", {"eos_token_id": 900}, (0,)),
        ("generation_config", {"eos_token_id": [SIZE - 1, SIZE]}, (0, SIZE - 1)),
        ("generation_config", {"eos_token_id": [-1, 2]}, (0, 2)),
        ("config", {"eos_token_id": [2, 900]}, (0, 2)),
        ("config", {"eos_token_id": None, "text_config": {"eos_token_id": [3, 900]}}, (0, 3)),
        ("generation_config", {"pad_token_id": 900}, (0,)),
        ("config", {"bos_token_id": 900, "pad_token_id": 901}, (0,)),
    ],
)
def test_ids_outside_the_vocabulary(
    folder: Path, file: str, fields: dict[str, Any], kept: tuple, caplog: Any
) -> None:
    if file == "config":
        write(folder, "generation_config", eos_token_id=None)
    write(folder, file, **fields)
    model = forerun.load(folder)
    said = [r.getMessage() for r in caplog.records if "outside the vocabulary" in r.getMessage()]
    assert model.tokenizer.eos_ids == kept
    assert len(said) == (2 if "bos_token_id" in fields else 1)
    assert all(f"(ids 0 to {SIZE - 1}); ignored" in text for text in said)
    (found,) = model.generate("the cat", min_new_tokens=4, max_new_tokens=6)
    assert 4 <= len(found.samples[0].tokens) <= 6
    caplog.clear()
    assert Tokenizer.load(folder).eos_ids == kept, "also without the model"
    assert len(caplog.records) == len(said)


def test_usual_ids_say_nothing(folder: Path, caplog: Any) -> None:
    write(folder, "generation_config", eos_token_id=[0, 5], pad_token_id=0, bos_token_id=1)
    assert forerun.load(folder).tokenizer.eos_ids == (0, 5)
    assert not [r for r in caplog.records if "vocabulary" in r.getMessage()]


def test_a_pad_id_that_transformers_refuses(tmp_path: Path, caplog: Any) -> None:
    """A model type that runs on transformers."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    folder = make_tiny(tmp_path / "neox")
    more = {"num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 64}
    config = GPTNeoXConfig(vocab_size=SIZE, hidden_size=32, num_hidden_layers=1, **more)
    config.eos_token_id = config.bos_token_id = 0
    GPTNeoXForCausalLM(config).save_pretrained(folder)
    write(folder, "config", pad_token_id=900)
    model = forerun.load(folder)
    assert "pad_token_id" in caplog.text and type(model.target).__name__ == "HFTarget"
    (found,) = model.generate("the cat", max_new_tokens=3, ignore_eos=True)
    assert len(found.samples[0].tokens) == 3
