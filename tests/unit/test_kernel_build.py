"""`setup.py build_ext`: where nothing can be compiled, no older kernels run in its place."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = f"_kernels{importlib.machinery.EXTENSION_SUFFIXES[0]}"


@pytest.mark.parametrize(
    ("source", "compiler"), [("#error broken\n", "cc"), ("int forerun;\n", "no-such-compiler")]
)
def test_a_failed_build_removes_the_old_kernels(tmp_path: Path, source: str, compiler: str) -> None:
    native = tmp_path / "src" / "forerun" / "runner" / "native"
    native.mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "setup.cfg").write_text(
        "[metadata]\nname = forerun\n"
        "[options]\npackage_dir =\n    = src\npackages = forerun.runner.native\n"
    )
    (native / "__init__.py").write_text("")
    (native / "kernels.c").write_text(source)
    built = tmp_path / "build" / f"lib.{sys.platform}"
    places = [native / NAME, built / "forerun" / "runner" / "native" / NAME]
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"old")
        os.utime(place, (1, 1))
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--build-lib", str(built)],
        cwd=tmp_path,
        env=os.environ | {"CC": compiler},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said  # an installation without a compiler works, on torch
    assert "the C kernels were not compiled: forerun runs on torch" in said
    assert "was of older sources and is removed" in said
    assert not any(place.exists() for place in places)
