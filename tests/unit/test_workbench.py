"""The recipe of small text models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import forerun
from forerun.errors import ConfigError
from forerun.training.recipes import workbench
from forerun.training.recipes.workbench import Model, Size, Workbench

SMALL = Size(16, 1, 1, 1, 16)


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small = {"target": 300, "draft": 300, "other": 270}
    models = {name: Model(size, SMALL, "A model.") for name, size in small.items()}
    monkeypatch.setattr(workbench, "MODELS", models)
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "prose.txt").write_text("the cat sat on the mat\n" * 300)
    return folder


def test_the_whole_recipe(tmp_path: Path, texts: Path) -> None:
    out = tmp_path / "out"
    lines = Workbench(data=texts, threads=1, max_steps=3, micro_tokens=512).train(out)
    assert [line.split(":")[0] for line in lines] == ["target", "draft", "other"]
    found = json.loads((out / "evaluation.json").read_text())
    assert 0 < found["draft"]["prose"]["acceptance"] <= 1
    assert "acceptance" not in found["other"]["prose"]
    assert "| domain | bits_per_byte | acceptance |" in (out / "draft" / "README.md").read_text()
    model = forerun.load(out / "target")
    drafter = f"draft_model:model={out / 'draft'}"
    result = model.generate("the cat", max_new_tokens=5, drafter=drafter)
    assert 0 < len(result[0].samples[0].tokens) <= 5


def test_other_texts_are_refused_on_resume(tmp_path: Path, texts: Path) -> None:
    out = tmp_path / "out"
    Workbench(data=texts, threads=1, max_steps=1, micro_tokens=512).train(out)
    (texts / "more.txt").write_text("another text\n" * 100)
    with pytest.raises(ConfigError, match="started with domains"):
        Workbench(data=texts, threads=1, max_steps=2, micro_tokens=512).train(out, resume=True)
