"""`forerun pull`: fetch, check, join, convert; and what may go wrong on the way.

pip is a stand-in (tests/fake_pip.py); everything else is real, down to the folder that loads.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Call  # noqa: E402
from gguf_files import write_gguf  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny import make_tiny  # noqa: E402

import forerun  # noqa: E402
from forerun.cli.pull import Line, described  # noqa: E402
from forerun.errors import CapacityError, ModelError, UnknownName  # noqa: E402
from forerun.models import downloads as table  # noqa: E402
from forerun.models.gguf import GgufFile  # noqa: E402
from forerun.models.gguf_names import hf_tensors  # noqa: E402
from forerun.models.pull import CONVERT, FETCH, Progress, pull  # noqa: E402

TESTS = Path(__file__).parents[1]
NAME, ALIAS, PARTS = "tiny-chat", "tiny-chat-1m", 3
RUN = """
import sys
from pathlib import Path
import forerun.models.downloads as table
table._DATA = Path(sys.argv[1])
from forerun.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


class Shop:
    """The packages of a tiny model, and the folder that the fake pip serves them from."""

    def __init__(self, root: Path, gguf: Path) -> None:
        self.root, self.gguf = root, gguf
        data = gguf.read_bytes()
        step = -(-len(data) // PARTS)
        pieces = [data[i * step : (i + 1) * step] for i in range(PARTS)]
        self.packages = [f"tiny-part{i + 1}==1.0" for i in range(PARTS)]
        rows = []
        for i, piece in enumerate(pieces):
            wheel = self.put(i, piece)
            digest = hashlib.sha256(piece).hexdigest()
            rows.append(
                f'{{ package = "{self.packages[i]}", wheel = {wheel.stat().st_size}, '
                f'size = {len(piece)}, sha256 = "{digest}" }}'
            )
        self.table = root / "models.toml"
        self.table.write_text(
            f'[{NAME}]\naliases = ["{ALIAS}"]\ntitle = "Tiny"\nsource = "nobody/tiny"\n'
            f'licence = "Apache-2.0"\nform = "dequantised Q8_0"\nnote = "Terms apply."\n'
            f'sha256 = "{hashlib.sha256(data).hexdigest()}"\nfolder_size = 300000\n'
            f"parts = [{', '.join(rows)}]\n"
        )
        self.mode("")

    def put(self, i: int, piece: bytes) -> Path:
        """Writes the wheel of a part."""
        wheel = self.root / f"tiny_part{i + 1}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"tiny_part{i + 1}/__init__.py", "raise SystemExit('was imported')")
            archive.writestr(f"tiny_part{i + 1}/data/part.bin", piece)
            archive.writestr(f"tiny_part{i + 1}-1.0.dist-info/METADATA", "Name: tiny\n")
        return wheel

    def mode(self, text: str) -> None:
        """How the fake pip behaves."""
        (self.root / "mode").write_text(text)

    def asked(self) -> list[str]:
        """The packages that pip was asked for, in order; forgets them."""
        path = self.root / "asked"
        lines = path.read_text().splitlines() if path.exists() else []
        path.write_text("")
        for line in lines:
            assert line.startswith("download --no-deps --only-binary :all: ")
        return [line.split()[-1] for line in lines]

    @property
    def store(self) -> Path:
        return Path(os.environ["FORERUN_CACHE"]) / "models" / f".parts-{NAME}"

    def kept(self) -> list[str]:
        """What an interrupted pull has left."""
        return sorted(path.name for path in self.store.iterdir()) if self.store.is_dir() else []

    def nothing_looks_whole(self) -> bool:
        """No folder of the name, and nothing beside the kept parts."""
        folder = self.store.parent
        return not folder.is_dir() or {path.name for path in folder.iterdir()} <= {self.store.name}


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM

    folder = make_tiny(tmp_path_factory.mktemp("pull") / "tiny")
    model = AutoModelForCausalLM.from_pretrained(folder)
    template = {"tokenizer.chat_template": "{{ messages[0].content }}!"}
    return write_gguf(model, folder.parent / "tiny.gguf", "Q8_0", tokenizer=folder, fields=template)


@pytest.fixture
def shop(tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    (tmp_path / "python").mkdir()
    (tmp_path / "shop").mkdir()
    shutil.copy(TESTS / "fake_pip.py", tmp_path / "python" / "pip.py")
    made = Shop(tmp_path / "shop", gguf_file)
    paths = [tmp_path / "python", *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
    monkeypatch.setenv("PYTHONPATH", ":".join(map(str, paths)))
    monkeypatch.setenv("FAKE_PIP", str(made.root))
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(table, "_DATA", made.table)
    table.downloads.cache_clear()
    yield made
    table.downloads.cache_clear()


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
    for text in ("Tiny", "nobody/tiny", "Apache-2.0", "dequantised Q8_0", *shop.packages):
        assert text in card
    assert "tiny_part1" not in sys.modules


def test_it_is_found_by_its_names(shop: Shop, call: Call) -> None:
    folder = forerun.pull(NAME)
    shop.asked()
    for name in (NAME, ALIAS):
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
    assert row["path"] in out and "available" not in out


def test_it_can_be_removed(shop: Shop, call: Call) -> None:
    folder = forerun.pull(NAME)
    status, _, err = call("pull", "--remove", ALIAS)
    assert status == 0 and str(folder) in err
    assert list(folder.parent.iterdir()) == []
    assert "was not here" in call("pull", "--remove", NAME)[2]


def test_without_a_network_it_goes_on_later(
    shop: Shop, refuses: Callable[..., str], call: Call
) -> None:
    shop.mode(f"offline {shop.packages[2]}")
    status, out, err = call("pull", NAME)
    last = err.splitlines()[-1]
    assert status == 2 and out == ""
    assert last.startswith(f"error: pip cannot fetch {shop.packages[2]} (No matching distribution")
    assert "forerun chat" in last
    assert shop.asked() == shop.packages and shop.kept() == ["part-01", "part-02"]
    assert shop.nothing_looks_whole()
    shop.mode("")
    forerun.pull(NAME)
    assert shop.asked() == shop.packages[2:], "the others were kept"
    assert not shop.store.exists()


def test_without_pip(shop: Shop, call: Call) -> None:
    shop.mode("none")
    status, _, err = call("pull", NAME)
    assert status == 2 and "forerun pull needs pip" in err and "ensurepip" in err
    (result,) = forerun.load().generate("Problem: 1 + 1\nSolution:\n", max_new_tokens=2)
    assert result.samples[0].tokens, "the embedded reasoner needs none"


def test_without_the_package_gguf(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"pip install gguf"):
        pull(NAME)
    assert shop.asked() == []


def test_an_altered_package(shop: Shop, call: Call) -> None:
    piece = bytearray(shop.gguf.read_bytes()[: -(-shop.gguf.stat().st_size // PARTS)])
    piece[len(piece) // 2] ^= 1
    shop.put(0, bytes(piece))
    status, _, err = call("pull", NAME)
    last = err.splitlines()[-1]
    assert status == 2 and shop.packages[0] in last and "altered or damaged" in last
    assert shop.kept() == [] and shop.nothing_looks_whole()
    shop.put(0, b"far too short")
    assert "32 bytes" in call("pull", NAME)[2].splitlines()[-1]
    (shop.root / "tiny_part1-1.0-py3-none-any.whl").write_bytes(b"no archive")
    assert "is damaged" in call("pull", NAME)[2].splitlines()[-1]
    assert shop.kept() == []


def test_kept_parts_are_checked(shop: Shop) -> None:
    shop.mode(f"offline {shop.packages[2]}")
    with pytest.raises(ModelError):
        pull(NAME)
    shop.asked()
    part = shop.store / "part-01"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    shop.mode("")
    assert pull(NAME).is_dir()
    assert shop.asked() == [shop.packages[0], shop.packages[2]]


def test_parts_that_do_not_make_the_file(shop: Shop) -> None:
    text = shop.table.read_text()
    whole = hashlib.sha256(shop.gguf.read_bytes()).hexdigest()
    shop.table.write_text(text.replace(whole, "0" * 64))
    table.downloads.cache_clear()
    with pytest.raises(ModelError, match="is another one than it should be"):
        pull(NAME)
    assert shop.kept() == [] and shop.nothing_looks_whole()


def test_an_interrupted_conversion_goes_on(shop: Shop) -> None:
    def stop(progress: Progress) -> None:
        if progress.step == CONVERT:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(NAME, report=stop)
    assert shop.asked() == shop.packages
    assert shop.kept() == ["model.gguf"] and shop.nothing_looks_whole()
    assert pull(NAME).is_dir() and shop.asked() == []


def test_ctrl_c_while_pip_runs(shop: Shop) -> None:
    """A real SIGINT: pip ends with it, what was fetched stays, and the call says so."""
    shop.mode(f"hang {shop.packages[1]}")
    command = [sys.executable, "-c", RUN, str(shop.table), "pull", NAME]
    source = str(Path(forerun.__file__).parents[1])
    env = os.environ | {"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{source}"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    try:
        pid, end = shop.root / "pid", time.monotonic() + 60
        while not pid.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        child = int(pid.read_text())
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted: 1 of 3 parts are kept; the same command goes on" in err
    assert "Traceback" not in err
    assert shop.kept() == ["part-01"] and shop.nothing_looks_whole()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    shop.mode("")
    shop.asked()
    pull(NAME)
    assert shop.asked() == shop.packages[1:]


def test_no_room_is_seen_before(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(shop.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.raises(CapacityError, match="takes 0.0 GB in .*, and 0.0 GB are free"):
        pull(NAME)
    assert shop.asked() == []


def full(*args: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "where, kept",
    [
        ("forerun.models.pull.shutil.copyfileobj", ["part-01", "part-02", "part-03"]),
        ("forerun.models.safetensors_file.os.fsync", ["model.gguf"]),
    ],
)
def test_a_disk_that_becomes_full(
    where: str, kept: list[str], shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While parts are joined, and while the folder is written."""
    if "copyfileobj" in where:
        shop.mode(f"offline {shop.packages[2]}")
        with pytest.raises(ModelError):
            pull(NAME)
        shop.mode("")
        pull_parts(shop)
    with monkeypatch.context() as patch:
        patch.setattr(where, full)
        with pytest.raises(CapacityError, match="no space is left .* goes on with the parts"):
            pull(NAME)
    assert set(kept) <= set(shop.kept()) and shop.nothing_looks_whole()
    shop.asked()
    assert pull(NAME).is_dir() and shop.asked() == []


def pull_parts(shop: Shop) -> None:
    """Puts the last part where a pull would have put it."""
    data = shop.gguf.read_bytes()
    step = -(-len(data) // PARTS)
    (shop.store / "part-03").write_bytes(data[2 * step :])


def test_a_disk_that_becomes_full_for_pip(shop: Shop) -> None:
    shop.mode(f"full {shop.packages[1]}")
    with pytest.raises(CapacityError, match="no space is left"):
        pull(NAME)
    assert shop.kept() == ["part-01"] and shop.nothing_looks_whole()


def test_a_cache_that_cannot_be_written(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "taken"))
    with pytest.raises(CapacityError, match="set FORERUN_CACHE to another folder"):
        pull(NAME)


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
