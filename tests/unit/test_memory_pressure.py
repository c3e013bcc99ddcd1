"""Memory pressure: counters, thresholds, and the alert of a run."""

from __future__ import annotations

from dataclasses import replace
from mmap import PAGESIZE
from pathlib import Path

import pytest
import sample_run

from forerun.bench import cpu_load, machine, memory_pressure
from forerun.bench.alerts import alerts
from forerun.bench.disturbance import busy, disturbed, undisturbed
from forerun.bench.memory_pressure import Sample, pressure_between, sample
from forerun.bench.results import Record

MIB, GIB = 1 << 20, 1 << 30
FAULTS = memory_pressure.MAJOR_FAULTS
BEFORE = Sample(swapped=100 * MIB, stalled=5.0, faults=1000, available=4 * GIB)


@pytest.fixture(autouse=True)
def of_8_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_bytes", lambda: 8 * GIB)


def test_counters_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_load, "process_tree", lambda columns: {"1": 30, "2": 4})
    (tmp_path / "pressure").mkdir()
    (tmp_path / "vmstat").write_text("nr_free_pages 9\npswpin 3\npswpout 5\npgfault 77\n")
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:  60 kB\n")
    (tmp_path / "pressure" / "memory").write_text(
        "some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\n"
        "full avg10=0.00 avg60=0.00 avg300=0.00 total=9000000\n"
    )
    assert sample(tmp_path) == Sample(8 * PAGESIZE, 2.5, 34, 60 * 1024)
    (tmp_path / "pressure" / "memory").unlink()
    (tmp_path / "vmstat").unlink()
    (tmp_path / "meminfo").unlink()
    assert sample(tmp_path) == Sample(0, 0.0, 34, -1)  # a system that tells nothing


def test_faults_that_read_from_disk_are_counted() -> None:
    """The column is that of major faults: a process has few of them, and many minor ones."""
    major = cpu_load.process_tree(slice(FAULTS, FAULTS + 1))
    minor = cpu_load.process_tree(slice(FAULTS - 2, FAULTS - 1))
    if not minor:
        pytest.skip("no /proc")
    assert 0 <= sum(major.values()) < sum(minor.values())


@pytest.mark.parametrize(
    ("change", "is_short"),
    [
        ({}, False),
        ({"swapped": 103 * MIB}, False),
        ({"swapped": 104 * MIB}, True),
        ({"stalled": 5.4}, False),  # of 10 s
        ({"stalled": 5.6}, True),
        ({"faults": 1900}, False),
        ({"faults": 2000}, True),
        ({"faults": 10}, False),  # a child that had many has ended
        ({"available": 200 * MIB}, False),
        ({"available": 150 * MIB}, True),
        ({"available": -1}, False),  # not known
    ],
)
def test_from_when_on_memory_is_short(change: dict[str, float], is_short: bool) -> None:
    assert bool(pressure_between(BEFORE, replace(BEFORE, **change), 10.0)) == is_short


def test_what_is_noted() -> None:
    after = Sample(swapped=130 * MIB, stalled=9.0, faults=1500, available=GIB)
    assert pressure_between(BEFORE, after, 10.0) == {
        "memory_stalled": 0.4,
        "swapped_bytes": 30 * MIB,
        "major_faults": 500,
        "available_bytes": GIB,
    }


def pressed(record: Record) -> Record:
    """The record, measured while the machine swapped."""
    note = {"memory_stalled": 0.4, "swapped_bytes": 30e6, "major_faults": 5, "available_bytes": 2e8}
    return replace(record, limits=(record.limits or {}) | note)


def test_few_records_under_pressure_do_not_count() -> None:
    manifest, records = sample_run.manifest(), sample_run.records()
    quiet = [replace(record, limits={"read_gb_s": 20.0}) for record in records]
    bad = [pressed(quiet[0]), *quiet[1:]]
    assert bad[0].is_short_of_memory and not quiet[0].is_short_of_memory
    assert disturbed(bad) == [True] + [False] * (len(bad) - 1) and not any(busy(bad))
    assert bad[0] not in undisturbed(bad)
    (line,) = [line for line in alerts(manifest, bad) if line.startswith("Memory pressure")]
    assert line.startswith(f"Memory pressure in 1 of {len(bad)} measurements")
    for said in (bad[0].method, "up to 40% of the time", "30.0 MB swapped", "do not count"):
        assert said in line
    assert not any("Memory pressure" in line for line in alerts(manifest, quiet))


def test_a_run_that_swapped_throughout_says_so() -> None:
    manifest, records = sample_run.manifest(), sample_run.records()
    bad = [pressed(replace(record, limits={"read_gb_s": 20.0})) for record in records]
    (line,) = [line for line in alerts(manifest, bad) if line.startswith("Memory pressure")]
    assert f"{len(undisturbed(bad))} of their times still count" in line
    assert "use fewer --peers" in line
