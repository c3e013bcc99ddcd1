"""Kernels compile for GPUs that are not here: Ampere, Hopper, Blackwell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
SCRIPT = Path(__file__).with_name("gpu_compile.py")
MAX_SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes of a program
MAX_SHARED_SMALL = 99 << 10  # of GPUs of 8.6, 8.9 and 12.0
ONE_ROW = {"embed", "project_heads", "project", "attend", "combine", "add_and_norm"}
FEW_ROWS = {"embed", "turn_heads", "attend", "add_and_norm", "gate_and_up"}
READ = ("attend", "project", "project_heads")  # what reads weights and cells
pytestmark = pytest.mark.skipif(not PTXAS.exists(), reason="Triton came without ptxas")


def compiled(capability: int, folder: Path, *words: str) -> list[dict[str, Any]]:
    """The kernels of passes, compiled in a process without the interpreter."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment |= {"TRITON_CACHE_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(capability), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(found: list[dict[str, Any]], capability: int) -> None:
    """Checks limits and instructions of each kernel."""
    for one in found:
        assert one["cubin"] > 1000 and one["ptx"]["target"].startswith(f"sm_{capability}"), one
        assert one["shared"] <= MAX_SHARED[capability], one
        overlaps = capability >= 90 and one["kernel"] != "write_cells"
        assert bool(one["ptx"]["overlaps"]) == overlaps, one
        if one["kernel"] in READ:
            assert one["ptx"]["wide loads"] > 0, one
            # the few numbers of a bias are read one by one
            is_wide = one["ptx"]["narrow loads"] == 0
            assert is_wide or (one["kernel"] != "attend" and "biases" in one["case"]), one
        if one["kernel"] == "attend":
            assert (one["ptx"]["tensor cores"] > 0) == (one["case"] != "fp32"), one
            assert one["shared"] <= MAX_SHARED_SMALL, one


@pytest.mark.slow
def test_one_row_and_a_tree_compile_for_hopper(tmp_path: Path) -> None:
    found = compiled(90, tmp_path, "quick")
    assert {one["kernel"] for one in found} == ONE_ROW | FEW_ROWS
    check(found, 90)


@pytest.mark.slow
@pytest.mark.parametrize("capability", MAX_SHARED)
def test_every_kind_of_pass_compiles(capability: int, tmp_path: Path) -> None:
    found = compiled(capability, tmp_path)
    assert {one["kernel"] for one in found} == ONE_ROW | FEW_ROWS | {"write_cells"}
    assert len({one["case"] for one in found}) == 6
    check(found, capability)
