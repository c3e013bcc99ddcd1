"""`forerun pull`: fetch, check, join, convert; and what then has the model by its name.

pip is a stand-in (tests/fake_pip.py); everything else is real, down to the folder that loads.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import Call
from pull_shop import ALIAS, NAME, Shop
from safetensors.torch import load_file

import forerun
from forerun.cli.pull import Line, described
from forerun.errors import ModelError, UnknownName
from forerun.models import downloads as table
from forerun.models.gguf import GgufFile
from forerun.models.gguf_names import hf_tensors
from forerun.models.pull import CONVERT, FETCH, Progress, pull
from forerun.utils.paths import cache_folder


def test_a_pulled_model_is_a_whole_folder(shop: Shop, call: Call) -> None:
    status, out, err = call("pull", ALIAS)
    assert status == 0, err
    folder = Path(out.strip())
    assert shop.asked() == shop.packages and folder.name == NAME
    assert "Terms apply." in err and "part 3 of 3" in err and f"forerun chat {NAME}" in err
    assert "converting" in err and [path.name for path in folder.parent.iterdir()] == [NAME]
    expected = dict(hf_tensors(GgufFile(shop.gguf), torch.bfloat16))
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    card = (folder / "README.md").read_text()
    for text in ("Tiny", "someone/tiny", "Apache-2.0", "dequantised Q8_0", *shop.packages):
        assert text in card
    assert "tiny_part1" not in sys.modules


def test_it_is_found_by_its_names(shop: Shop, call: Call) -> None:
    folder = forerun.pull(NAME)
    shop.asked()
    for name in (NAME, ALIAS, NAME.upper(), ALIAS.title()):
        model = forerun.load(name)
        assert model.name == name and model.target.model.dtype == torch.bfloat16
    (ours,) = model.generate("the cat", temperature=0, max_new_tokens=12)
    (same,) = forerun.load(folder).generate("the cat", temperature=0, max_new_tokens=12)
    (file,) = forerun.load(shop.gguf).generate("the cat", temperature=0, max_new_tokens=12)
    assert ours.samples[0].tokens == same.samples[0].tokens == file.samples[0].tokens
    status, out, err = call("generate", "-m", NAME, "--chat", "-p", "the", "--max-new-tokens", 4)
    assert status == 0 and out, err
    assert pull(NAME) == folder and shop.asked() == [], "it is here already"


def test_names_that_are_not_here_yet(shop: Shop, refuses: Callable[..., str]) -> None:
    for words in (("chat", NAME), ("generate", "-m", ALIAS, "-p", "x"), ("verify", "-m", NAME)):
        name = next(word for word in words if word in (NAME, ALIAS))
        said = refuses(*words)
        assert said == f"error: {name} is not on this machine yet; run: forerun pull {name}"
    with pytest.raises(ModelError, match="run: forerun pull"):
        forerun.load(NAME)
    assert shop.asked() == []


def test_serving_what_is_not_here(shop: Shop, call: Call) -> None:
    pytest.importorskip("fastapi")
    status, _, err = call("serve", NAME, "--port", 0)
    assert status == 2 and err.splitlines()[-1].endswith(f"run: forerun pull {NAME}")


def test_a_folder_of_that_name_wins(
    shop: Shop, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    forerun.pull(NAME)
    shutil.copytree(tiny_folder, tmp_path / NAME)
    assert forerun.load(NAME).target.model.dtype == torch.float32, "that of the folder"


def test_unknown_names(shop: Shop, refuses: Callable[..., str]) -> None:
    assert "did you mean 'tiny-chat'?" in refuses("pull", "tiny-chta")
    assert "known: tiny-chat" in refuses("pull", "llama")
    assert "unknown model" in refuses("pull", "--remove", "llama")
    with pytest.raises(UnknownName):
        pull("llama")


def test_models_are_listed(shop: Shop, call: Call) -> None:
    status, out, _ = call("models")
    assert status == 0 and "reasoner" in out and "available" in out and "Apache-2.0" in out
    forerun.pull(NAME)
    _, out, _ = call("models", "--json")
    rows = {row["name"]: row for row in map(json.loads, out.splitlines())}
    row = rows[NAME]
    assert row["state"] == "pulled" and row["aliases"] == [ALIAS] and row["bytes"] > 50_000
    assert Path(row["path"]).is_dir() and rows["reasoner"]["state"] == "embedded"
    _, out, _ = call("models")
    assert row["path"] in out and "available" not in out and f"also {ALIAS}" in out


def test_the_help_of_pull_says_what_there_is_and_where_it_goes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "forerun.cli.main", "pull", "--help"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    said = " ".join(done.stdout.split())
    for text in ("smollm2", "smollm2-135m", "Apache-2.0", "93 MB to fetch", "Gemma terms of use"):
        assert text in said, said
    assert str(cache_folder() / "models") in said
    assert "FORERUN_CACHE" in said and "the same command resumes" in said


def test_it_can_be_removed(shop: Shop, call: Call) -> None:
    folder = forerun.pull(NAME)
    status, _, err = call("pull", "--remove", ALIAS)
    assert status == 0 and str(folder) in err
    assert list(folder.parent.iterdir()) == []
    assert "is not in the cache" in call("pull", "--remove", NAME)[2]


def test_progress_only_grows(shop: Shop) -> None:
    heard: list[Progress] = []
    pull(NAME, report=heard.append)
    for step in (FETCH, CONVERT):
        done = [one.done for one in heard if one.step == step]
        assert done == sorted(done) and done[-1] == heard[[h.step for h in heard].index(step)].total
    assert [one.step for one in heard] == sorted((one.step for one in heard), reverse=True)


def test_the_line_of_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    line = Line("x")
    states = [(0, None), (500_000, 61.4), (1_000_000, 1.0)]
    for done, left in states:
        line.show(Progress(FETCH, 1, 2, done, 1_000_000, left))
    line.end()
    err = capsys.readouterr().err
    assert err.startswith("\rfetching x: part 1 of 2, 0.0 of 1.0 MB")
    assert err.endswith("fetching x: part 1 of 2, 1.0 of 1.0 MB\n") and "61 s" not in err
    said = described("x", Progress(CONVERT, 1, 1, 500_000, 1_000_000, 61.4))
    assert said == "converting x: 0.5 of 1.0 MB, 61 s left"


def test_the_real_table() -> None:
    """What `forerun pull` offers: sizes add up, names are unique, licences are said."""
    found = table.downloads()
    assert [one.name for one in found] == ["smollm2", "qwen-coder", "gemma3"]
    names = [name for one in found for name in (one.name, *one.aliases)]
    assert len(set(names)) == len(names) and not {"reasoner", "draft"} & set(names)
    for one in found:
        assert table.find(one.aliases[0]) is one
        assert one.size >= one.wheel_size * 0.9 and one.folder_size > 2 * one.size
        assert len({part.sha256 for part in one.parts}) == len(one.parts)
        for part in one.parts:
            assert len(part.sha256) == 64 and part.package.count("==") == 1
    assert found[0].sha256 == found[0].parts[0].sha256
    assert "Gemma terms" in found[2].note and found[2].licence.startswith("Gemma")
