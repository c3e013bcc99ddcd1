"""Machine facts, hardware limits, lost cores, and the cost of a pass."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import make_tiny

import forerun
from forerun.bench import _read_kernels, cpu_load, hardware_limits, machine, model_info, theory
from forerun.bench.metrics import Totals
from forerun.bench.results import Manifest, Record, SampleRecord
from forerun.bench.roofline import roofline_fraction
from forerun.bench.theory import PassCost
from forerun.errors import CapacityError
from forerun.runner import kv_cache
from forerun.runner.native import kernels, memory

COST = PassCost(weight_bytes=1_000_000_000, kv_bytes_per_token=1_000_000, flops_per_row=10**9)
LIMITS = {"read_gb_s": 10.0, "gflop_s": 50.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return forerun.load(make_tiny(tmp_path_factory.mktemp("machine") / "tiny"), dtype="fp32")


def test_description() -> None:
    found = machine.describe()
    assert found["cores"] >= 1 and found["cpu"] and found["torch"] == torch.__version__
    assert found["memory"] > 1 << 28 or found["memory"] == 0
    assert machine.package_version("no-such-package") == "missing"
    assert found["cache_bytes"] == machine.cache_bytes()


def test_revision_is_that_of_our_own_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "src" / "forerun"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(machine.forerun, "__file__", str(package / "__init__.py"))
    assert machine.git_revision() == ""
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "one"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    clean = machine.git_revision()
    assert len(clean) >= 7 and "dirty" not in clean
    (package / "new.py").write_text("")
    assert machine.git_revision() == clean + "+dirty"
    inside = tmp_path / "lib" / "forerun"  # an installation within another repository
    inside.mkdir(parents=True)
    monkeypatch.setattr(machine.forerun, "__file__", str(inside / "__init__.py"))
    assert machine.git_revision() == ""


def test_the_readers_read_everything() -> None:
    x = np.arange(103, dtype=np.int64)
    assert _read_kernels.sum_in_one_stream(x) == x.sum()
    assert _read_kernels.sum_in_four_streams(x) == x[:100].sum()


def test_limits_are_positive_and_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_limits, "MIN_BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr(hardware_limits, "BUFFER_OVER_CACHE", (0,))
    hardware_limits._buffer.cache_clear()
    found = hardware_limits.limits(2, torch.float32)
    hardware_limits._buffer.cache_clear()
    assert set(found) == {"read_gb_s", "gflop_s"}
    assert all(0 < value < math.inf for value in found.values())


@pytest.mark.parametrize(
    ("size", "has_large_l1"), [("32K", False), ("48K", True), ("64K", True), (None, False)]
)
def test_a_first_cache_is_roomy_from_48_kib_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: str | None, has_large_l1: bool
) -> None:
    caches = [("1", "Instruction", "64K"), ("2", "Unified", "1024K")]
    if size:
        caches.insert(0, ("1", "Data", size))
    for i, told in enumerate(caches):
        folder = tmp_path / f"index{i}"
        folder.mkdir()
        for name, text in zip(("level", "type", "size"), told, strict=True):
            (folder / name).write_text(f"{text}\n")
    monkeypatch.setattr(memory, "CACHES", tmp_path)
    assert memory.has_large_l1.__wrapped__() == has_large_l1


def test_the_buffer_exceeds_the_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, size in (("index0", "32K\n"), ("index3", "2M\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "size").write_text(size)
    monkeypatch.setattr(memory, "CACHES", tmp_path)
    monkeypatch.setattr(hardware_limits, "MIN_BUFFER_BYTES", 1 << 20)
    hardware_limits._buffer.cache_clear()
    assert machine.cache_bytes() == 2 << 20
    assert hardware_limits._buffer().nbytes == hardware_limits.BUFFER_OVER_CACHE[0] * (2 << 20)
    hardware_limits._buffer.cache_clear()


def test_the_buffer_leaves_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_limits, "MIN_BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr(hardware_limits, "cache_bytes", lambda: 1 << 20)
    many, few = (times << 20 for times in hardware_limits.BUFFER_OVER_CACHE)
    for free, expected in ((2 * many, many), (2 * many - 1, few), (2 * few, few)):
        hardware_limits._buffer.cache_clear()
        monkeypatch.setattr(kv_cache, "available_bytes", lambda device, free=free: free)
        assert hardware_limits._buffer().nbytes == expected
    hardware_limits._buffer.cache_clear()
    monkeypatch.setattr(kv_cache, "available_bytes", lambda device: 2 * few - 1)
    with pytest.raises(CapacityError, match="needs 6 MiB free, and 5 MiB are"):
        hardware_limits._buffer()


def test_roofline_by_hand() -> None:
    assert COST.roofline_seconds(LIMITS) == pytest.approx(0.1)  # 1 GB at 10 GB/s
    assert COST.roofline_seconds(LIMITS, context=500) == pytest.approx(0.15)
    assert COST.roofline_seconds(LIMITS, rows=5) == pytest.approx(0.1)  # 5 GFLOP at 50
    assert COST.roofline_seconds(LIMITS, rows=10) == pytest.approx(0.2)
    assert PassCost.from_dict(COST.to_dict()) == COST
    assert PassCost.from_dict({"pass_bytes": 1}) is None


def test_cost_of_the_tiny_model(model: Any) -> None:
    found = theory.pass_cost(model.target)
    assert found is not None
    d = model.target.model.config.head_dim  # 8, or 16 where our kernels run it
    # two layers: qkv 8d x 32, out 32 x 4d, gate and up 128 x 32, down 32 x 64; head 288 x 32
    weights = 2 * (8 * d * 32 + 32 * 4 * d + 128 * 32 + 32 * 64) + 288 * 32
    norms = 5 * 32
    held = sum(part.nbytes for part in model.target.model.linears())
    assert found.weight_bytes == held + 4 * (norms + 32)
    assert 4 * weights <= held < 5.5 * weights  # zeros fill up groups of 64 outputs
    assert found.flops_per_row == 2 * weights
    assert found.kv_bytes_per_token == 2 * 2 * 2 * d * 4  # layers, keys and values, heads, width


def test_rounded_weights_are_counted_as_they_are_read(tmp_path: Path) -> None:
    folder, sizes = make_tiny(tmp_path / "tiny"), {}
    for weights in ("auto", "int8"):
        found = theory.pass_cost(forerun.load(folder, dtype="bf16", weights=weights).target)
        assert found is not None
        sizes[weights] = found.weight_bytes
    assert (sizes["int8"] < 0.7 * sizes["auto"]) == bool(kernels())


def test_only_the_experts_of_one_token_are_read() -> None:
    from forerun.models.layers import Experts, GatedMLP, Linear

    def linear() -> Linear:
        return Linear(torch.zeros(4, 4), pack=False)

    experts = [GatedMLP(linear(), linear(), "silu") for _ in range(5)]
    mlp = Experts(linear(), experts, 2, True)
    parts = [mlp.gate, *(part for e in experts for part in (e.gate_up, e.down))]
    fake = SimpleNamespace(layers=[SimpleNamespace(mlp=mlp)], linears=lambda: parts)
    assert len(theory._used(fake)) == 1 + 2 * 2


def test_cost_curve_measures_every_size(model: Any) -> None:
    seen: list[int] = []
    forward = model.target.forward

    def watched(batch: Any) -> Any:
        rows = forward(batch)
        seen.append(len(rows[0].logits))
        return rows

    model.target.forward = watched
    try:
        curve = theory.cost_curve(model.target, (1, 4, 9), context=20, rounds=3)
    finally:
        del model.target.forward
    assert seen == [9, 4, 1, 1, 4, 9, 9, 4, 1, 1, 4, 9]
    assert list(curve) == ["1", "4", "9"] and min(curve.values()) > 0
    assert all(slot.is_free for slot in model.target.cache.slots)


def test_curve_by_hand() -> None:
    curve = {"1": 0.010, "4": 0.012, "16": 0.018}
    assert theory.relative_cost(curve) == pytest.approx({1: 1.0, 4: 1.2, 16: 1.8})
    assert theory.pass_seconds(curve, 10) == pytest.approx(0.015)
    assert theory.pass_seconds(curve, 17) is None and theory.pass_seconds({}, 1) is None
    drafts = Totals(30, 10, 90, 20, 25, Counter({1: 20}))  # 10 rows a pass, tau 3
    assert theory.predicted_speed_up(drafts, curve) == pytest.approx(3 * 0.010 / 0.015)
    assert theory.predicted_speed_up(drafts, curve, 0.005) == pytest.approx(1.5)
    assert math.isnan(theory.predicted_speed_up(Totals(30, None), curve))
    assert math.isnan(theory.predicted_speed_up(replace(drafts, drafted=900), curve))


def test_fraction_of_the_roofline_by_hand() -> None:
    plan = Manifest("", "", "", "", COST.to_dict(), "", 1, 0, {}, [], {}, limits=LIMITS)
    times = {"draft": 0.0, "forward": 2.3, "verify": 0.1, "other": 0.1}
    sample = SampleRecord(10, 10, 0, 0, 0, [], times)  # one of the passes is that of the prompt
    record = Record("t", 0, "", "", "plain", 0, 0, 495, 3.2, 10, [sample], 0.5)
    found = roofline_fraction(plan, [record])
    assert found is not None
    assert found.roofline_seconds == pytest.approx(0.15)  # 495 + 10 / 2 tokens before a pass
    assert found.forward_seconds == pytest.approx(0.2) and found.of_forward == pytest.approx(0.75)
    assert found.step_seconds == pytest.approx(0.3) and found.of_step == pytest.approx(0.5)
    assert roofline_fraction(plan, [replace(record, prefill_seconds=None)]) is None
    assert roofline_fraction(plan, [record], "stand") is None
    fast = replace(record, limits={"read_gb_s": 2 * LIMITS["read_gb_s"], "taken": 0.0})
    beside = roofline_fraction(plan, [record, fast])  # as memory was beside each
    assert beside is not None and beside.roofline_seconds == pytest.approx((0.15 + 0.075) / 2)
    one = SampleRecord(1, 1, 0, 0, 0, [], {**times, "forward": 0.5})
    brief = replace(record, seconds=0.7, generated=1, samples=[one])  # nothing but its prompt
    assert roofline_fraction(plan, [brief]) is None
    both = roofline_fraction(plan, [record, replace(brief, seconds=0.5)])
    assert both == found
    for name, tells in (("plain:batch=1", True), ("plain:batch=16", False)):
        shared = roofline_fraction(plan, [replace(record, method=name)], name)
        assert (shared is not None) == tells  # a pass that several share counts for each


def test_models_are_described(model: Any, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny", seed=1)
    found = model_info.describe_model(model, folder)
    weights = 2 * (64 * 32 + 32 * 32 + 128 * 32 + 32 * 64) + 2 * 288 * 32 + 5 * 32
    assert found["parameters"] == weights and found["weight_bytes"] >= 4 * weights
    assert found == model_info.describe_model(model, folder)
    tuned = model_info.describe_model(model, make_tiny(tmp_path / "tuned", seed=2))
    assert tuned["hash"] == found["hash"] and tuned["weights_hash"] != found["weights_hash"]
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert found["hash"] != model_info.describe_model(model, folder)["hash"]


def test_time_of_others_and_of_children_is_told_apart() -> None:
    """A child's counts as one's own; of cores that are left others may take what they like."""
    before = cpu_load.cpu_seconds()
    if before == (0.0, 0.0):
        pytest.skip("this system tells no processor time")
    code = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    after = cpu_load.cpu_seconds()
    assert after[1] - before[1] >= 0.25 and after[0] - before[0] >= 0.25
    cores = machine.num_cores()
    assert cpu_load.lost_share((0, 0), (3.0 * cores, 1.0 * cores), 2.0, cores) == pytest.approx(1.0)
    assert cpu_load.lost_share((0, 0), (2.04, 2.0), 2.0, cores) == 0.0  # counters are coarse
    halted = cpu_load.lost_share((0, 0), (3.0, 3.0), 23.0, cores)  # for twenty of these seconds
    assert halted == pytest.approx(20.0 / (23.0 * cores))
    beside = cpu_load.lost_share((0, 0), (23.0 + 3.0, 3.0), 23.0, cores)  # with another program
    idle = min(20.0, 23.0 * cores - 26.0) if cores > 1 else 0.0
    assert beside == pytest.approx(min((23.0 + idle) / (23.0 * cores), 1.0))
    assert cpu_load.lost_share((5, 1), (5 + 2.0 * cores, 3.0), 2.0, 1) == pytest.approx(
        (2.0 * cores - 2.0 - 2.0 * (cores - 1)) / 2.0
    )


def test_others_take_no_more_than_all_cores_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_load, "num_cores", lambda: 2)
    assert (
        cpu_load.lost_share((0, 0), (8.0, 1.0), 1.0, 2) == 1.0
    )  # the counters have their own clock
    assert cpu_load.lost_share((0, 0), (4.0, 2.0), 2.0, 64) == 0.5  # of two cores, not of 64
    assert cpu_load.lost_share((0, 0), (4.0, 1.0), 2.0, 1) == 0.5  # what another has is lost once
    monkeypatch.setattr(cpu_load, "num_cores", lambda: 1)
    assert cpu_load.lost_share((0, 0), (2.0, 1.0), 2.0, 1) == 0.5


@pytest.mark.skipif(sys.platform != "linux", reason="processor time is read from /proc")
def test_processor_time_of_what_was_started_is_told() -> None:
    code = "import time\nwhile time.process_time() < 0.1: pass\nprint(); time.sleep(60)"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdout
        child.stdout.readline()
        assert cpu_load._child_ticks()[str(child.pid)] > cpu_load.IDLE_TICKS
        child.kill()
