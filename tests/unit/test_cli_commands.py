"""`forerun methods`, `verify`, `demo` and `doctor`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Call, records
from tiny import make_tiny

from forerun import catalog
from forerun.bench import hardware_limits, machine
from forerun.cli import doctor
from forerun.cli.methods import explain
from forerun.cli.output import Results
from forerun.errors import CapacityError
from forerun.runner import gpu


def test_methods_table_lists_all(call: Call) -> None:
    status, out, _ = call("methods")
    assert status == 0
    assert all(f"{row.name} " in out and row.title in out for row in catalog.rows())
    assert "41 systems" in out


def test_methods_as_json(call: Call) -> None:
    found = json.loads(call("methods", "--json")[1])
    assert [row["name"] for row in found] == [row.name for row in catalog.rows()]
    assert {row["state"] for row in found} <= {"works", "partial", "missing"}


def test_methods_explains_one(call: Call) -> None:
    _, out, _ = call("methods", "stand")
    for said in ("2506.04708", "context = 4", "scope = group", "docs/methods/stand.md", "works"):
        assert said in out
    assert "(missing)" in call("methods", "kangaroo")[1]
    assert "gumbel (grower)" in call("methods", "gumbel")[1]
    lines = call("methods", "router")[1].splitlines()  # no row: its docstring, told in lines
    assert lines[1] == "  note      Selects the fastest of parts; of equal ones the first."
    assert lines[2].startswith("  options   scope: which sequences") and "Raises" not in lines[2]
    assert lines[3].split() == ["drafter", "router"]
    found = json.loads(call("methods", "draft-model", "--json")[1])
    assert found["parts"]["drafter"]["options"]["model"] == "required"


def test_methods_names_the_command_that_makes_a_draft(call: Call) -> None:
    row = catalog.get("distillspec")
    line = f"  make      {row.make}"
    assert (
        row.make.startswith("forerun train draft --recipe distillspec")
        and "--out DRAFT" in row.make
    )
    assert line in call("methods", row.name)[1].splitlines()
    found = json.loads(call("methods", row.name, "--json")[1])
    assert found["make"] == row.make
    for name in ("kangaroo", "prompt_lookup"):  # not built yet; nothing to make
        assert "  make " not in call("methods", name)[1]
        assert json.loads(call("methods", name, "--json")[1])["make"] == ""


def test_methods_says_which_part_is_lossy(call: Call) -> None:
    lines = call("methods", "distillspec")[1].splitlines()
    assert "  lossless  yes; no with verifier lenient" in lines
    at = lines.index("  verifier  lenient (optional, lossy)")
    assert lines[at + 1 : at + 3] == ["            kind = lin", "            eps = 0.5"]
    assert [line.partition("--drafter ")[2] for line in lines if line.startswith("  lossy ")] == [
        "draft_model:model=DRAFT --verifier lenient"
    ]
    found = json.loads(call("methods", "distillspec", "--json")[1])
    assert found["lossy"]["verifier"]["options"] == {"kind": "lin", "eps": "0.5"}
    assert "lenient" not in found["example"] and found["lossy_example"].endswith("lenient")
    row = next(line for line in call("methods")[1].splitlines() if "DistillSpec" in line)
    assert row.split()[-2:] == ["partly", "yes"]
    assert "  lossy " not in call("methods", "stand")[1]


def test_methods_explains_a_part_by_its_law_and_pages(call: Call) -> None:
    lines = call("methods", "lenient")[1].splitlines()
    assert "  lossless  no" in lines and "  page      docs/methods/distillspec.md" in lines
    found = json.loads(call("methods", "lenient", "--json")[1])
    assert found["parts"]["verifier"]["lossless"] is False
    assert found["pages"] == ["docs/methods/distillspec.md"]
    assert "  lossless  yes" in call("methods", "recursive")[1].splitlines()
    lines = call("methods", "gumbel")[1].splitlines()  # a grower decides nothing about the law
    assert [line.split()[-1] for line in lines if line.startswith("  page ")] == [
        "docs/methods/stand.md",
        "docs/methods/rsd.md",
    ]
    assert not any(line.startswith("  lossless") for line in lines)


def test_the_command_lines_of_methods_parse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options and parts of all examples exist; recipes set these two variables when parsed."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs")
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    import check_parts

    found = [explain(row) for row in catalog.rows()]
    kinds = ("make", "example", "lossy_example")
    lines = [one[kind] for one in found for kind in kinds if one[kind]]
    assert all(line.startswith("forerun ") for line in lines) and len(lines) > 40
    page = tmp_path / "page.md"
    page.write_text("\n".join(["```bash", *lines, "```", ""]))
    assert list(check_parts.wrong_commands(page)) == []
    page.write_text(page.read_text().replace("--recipe", "--recipy"))
    assert len(list(check_parts.wrong_commands(page))) == 3


def test_verify_passes_and_reports(call: Call, tiny: Path) -> None:
    words = ("verify", "-m", tiny, "--prompts", 2, "--max-new-tokens", 12)
    words += ("--law-prompts", 1, "--samples", 200)
    status, out, _ = call(*words)
    assert status == 0 and "4 of 4 identical" in out and "verify passed" in out
    status, out, _ = call(*words, "--json", "--drafter", "none")
    found = json.loads(out)
    assert status == 0 and found["passed"] and found["law"]["is_vacuous"]
    assert found["dtype"] == "float32" and found["law"]["num_samples"] == 200
    assert found["greedy_is_vacuous"]
    found = json.loads(call(*words, "--json", "--max-new-tokens", 40)[1])
    assert not found["greedy_is_vacuous"]
    _, out, _ = call(*words, "--drafter", "none")
    assert "no draft was accepted, so this test proves little" in out


def test_verify_says_what_it_could_have_found(call: Call, tiny: Path) -> None:
    words = ("verify", "-m", tiny, "--prompts", 1, "--max-new-tokens", 4, "--law-prompts", 1)
    law = json.loads(call(*words, "--samples", 200, "--json")[1])["law"]
    assert law["power"] == 0.8 and 0.1 < law["detectable"] < 0.5
    assert law["detectable"] == max(test["detectable"] for test in law["tests"])
    assert 20_000 < law["samples_for_one_percent"] < 500_000
    _, out, _ = call(*words, "--samples", 200)
    last = out.splitlines()[-1]
    assert last.startswith("verify passed; the sampling test detects an error that moves")
    assert f"{law['detectable']:.1%} of a position's probability with 80% power" in last
    _, out, _ = call(*words, "--samples", 5)
    assert "too few samples" in out.splitlines()[-1]
    _, out, _ = call(*words[:-1], 0)
    assert out.splitlines()[-1] == "verify passed; sampling was not tested"


@pytest.mark.parametrize("at", [1, 2, 5])
def test_interrupted_verify_prints_what_was_finished(
    call: Call, tiny: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Ctrl-C at the n-th result: within the greedy texts, or before the second law prompt."""
    from forerun.lossless import distribution
    from forerun.lossless import greedy as verifying

    results = iter(range(1, 10))

    def stops(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **options: Any) -> Any:
            for result in real(*given, **options):
                if next(results) == at:
                    raise KeyboardInterrupt
                yield result

        return run

    monkeypatch.setattr(verifying, "check_greedy", stops(verifying.check_greedy))
    monkeypatch.setattr(distribution, "prompt_laws", stops(distribution.prompt_laws))
    words = ("verify", "-m", tiny, "--prompts", 2, "--max-new-tokens", 4, "--samples", 100)
    status, out, err = call(*words, "--law-prompts", 2)
    assert status == 130 and "Traceback" not in err
    done = f"{min(at - 1, 4)} of 4 greedy texts and {max(at - 5, 0)} of 2 sampling prompts finished"
    assert f"interrupted: {done}" in err
    assert out.count(": 4 tokens, identical") == min(at - 1, 4)
    assert "verify interrupted, all finished tests passed" in out
    results = iter(range(1, 10))
    found = json.loads(call(*words, "--law-prompts", 2, "--json")[1])
    assert found["interrupted"] and found["passed"] is None


def test_verify_fails_with_status_1(
    call: Call, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forerun.verifiers import greedy
    from forerun.verifiers.greedy import Greedy

    def second_best(tree: Any, laws: Any) -> Any:
        from forerun.core.records import Verdict

        return Verdict([], int(laws.logits(-1).argsort()[-2]))

    monkeypatch.setattr(greedy, "follow_argmax", second_best)
    assert Greedy.lossless
    words = ("verify", "-m", tiny, "--verifier", "greedy", "--prompts", 1, "--law-prompts", 0)
    status, out, _ = call(*words)
    assert status == 1 and "violation at position 0" in out and "gap" in out


def test_many_lines_of_verify_are_counted_and_failures_come_first(
    call: Call, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forerun.lossless import greedy as verifying

    prompts, real, wrong = tmp_path / "prompts.jsonl", verifying.check_greedy, {24}

    def check(*given: Any, **options: Any) -> Any:
        for case in real(*given, **options):
            is_wrong = case.prompt_index in wrong
            yield replace(case, position=0, expected=1, got=2, gap=9.0) if is_wrong else case

    def shown(count: int) -> list[str]:
        prompts.write_text(count * '{"prompt": "the cat sat"}\n')
        words = ("verify", "-m", tiny, "--prompt-file", prompts, "--max-new-tokens", 1)
        _, out, _ = call(*words, "--law-prompts", 0)
        return [line for line in out.splitlines() if line.startswith(("  prompt", "  ..."))]

    monkeypatch.setattr(verifying, "check_greedy", check)
    assert [line.split(",")[0] for line in shown(20)] == [f"  prompt {i // 2}" for i in range(40)]
    lines = shown(25)
    assert [line.split(":")[0] for line in lines[:3]] == [
        "  prompt 24, text 0",
        "  prompt 24, text 1",
        "  prompt 0, text 0",
    ]
    assert "violation at position 0" in lines[0]
    assert len(lines) == 41
    assert lines[-1] == "  ... and 10 more, 0 of them failed; --json lists all"
    wrong |= {*range(25)}
    assert shown(25)[-1] == "  ... and 10 more, 10 of them failed; --json lists all"


def test_demo_counts_both_arms(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.bench.cpu_load.CoreLossMeter.lost", lambda self: 0.3)
    folder = make_tiny(tmp_path / "long", context=1024)
    out = tmp_path / "demo.jsonl"
    words = ("demo", "-m", folder, "--problems", 2, "-n", 3, "--max-new-tokens", 12)
    status, text, _ = call(*words)
    assert status == 0 and "speed-up" in text and "3-4" in text
    assert "(geometric mean of 2 prompts; wall time" in text, "two give no interval"
    assert "accuracies are shown from 10 problems on" in text and "accuracy of" not in text
    assert "busy machine: 30% of the cores were lost to other programs" in text
    status, text, _ = call(*words, "--json", "--out", out)
    found = json.loads(text)
    assert found["taken"] == 0.3
    assert found["problems"] == 2 and found["speed_up"] > 0
    assert found["speed_up_interval"] is None
    assert found["arms"]["none"]["stats"]["tau"] == 1.0
    arms = [r["arm"] for r in records(out.read_text())]
    assert sorted(arms[:2]) == sorted(arms[2:]) == ["none", "stand"]


def test_a_demo_of_ten_problems_shows_accuracies_and_an_interval(
    call: Call, tmp_path: Path
) -> None:
    folder = make_tiny(tmp_path / "long", context=1024)
    words = ("demo", "-m", folder, "--problems", 10, "-n", 1, "--max-new-tokens", 4)
    text = call(*words)[1]
    assert "accuracy of one sample" in text and "majority@1" in text
    assert "by chance their majorities differ by about 32 points" in text
    assert "geometric mean of 10 prompts; 95 % interval" in text


def test_a_full_disk_keeps_what_the_demo_measured(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = make_tiny(tmp_path / "long", context=1024), tmp_path / "demo.jsonl"
    whole, counts = Results.write, iter(range(10))

    def write(self: Results, record: dict[str, Any]) -> None:
        if next(counts) < 3:
            return whole(self, record)
        monkeypatch.setattr(os, "write", no_space)
        return whole(self, record)

    def no_space(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Results, "write", write)
    words = ("demo", "-m", folder, "--problems", 3, "-n", 2, "--max-new-tokens", 8, "--out", out)
    status, text, err = call(*words)
    last = err.splitlines()[-1]
    assert status == 2 and last.startswith(f"error: cannot write {out}: No space left on device")
    assert "the 3 results written before are kept" in last
    assert len(records(out.read_text())) == 3
    assert "best of 2 on 2 held-out problems" in text and "speed-up" in text


def test_no_share_of_the_read_limit_is_more_than_all() -> None:
    """A product that reads faster than reading did is the limit."""
    found = doctor.speed_lines(40.0, {16: 30.0, 1: 50.0})
    assert found["memory reads at"].startswith("50.0 GB/s")
    assert found["weights, 16 rows"] == "30.0 GB/s, 60% of that"
    assert found["weights, 1 row"] == "50.0 GB/s, 100% of that"


def test_memory_is_no_limit_to_what_a_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, said in ((32 << 20, ", but with models that fit into its cache of 32 MiB"), (0, "")):
        monkeypatch.setattr(machine, "cache_bytes", lambda size=size: size)
        found = doctor.speed_lines(40.0, {1: 30.0})["memory reads at"]
        assert found == "40.0 GB/s; plain decoding on a CPU can be no faster" + said


def test_doctor_reports(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_limits, "read_bandwidth", lambda threads, tries=8: 1e-9)
    status, out, err = call("doctor", "--json")
    found = json.loads(out)
    assert status == 0 and found["number types"]["fp32"].startswith("works")
    assert {"versions", "processor", "gpu", "kernels", "embedded model"} <= found.keys()
    assert {"weights, 1 row", "weights, 8 rows", "weights, 16 rows"} <= found["speed"].keys()
    assert "read bandwidth of memory" in err  # nobody wonders what takes so long

    def refuse(threads: int) -> float:
        raise CapacityError("no room")

    monkeypatch.setattr(hardware_limits, "read_bandwidth", refuse)
    _, out, _ = call("doctor")
    assert "torch" in out and "not measured: no room" in out and "advice" in out


def test_doctor_says_what_runs_passes_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3 << 30, 4 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setenv("FORERUN_GRAPHS", "off")
    free, passes = "a GPU, 3.0 of 4.0 GiB free", "torch: CUDA graphs are turned off"
    assert doctor._gpu() == {"cuda:0": free, "passes on cuda:0": passes}
    monkeypatch.delenv("FORERUN_GRAPHS")
    monkeypatch.setattr(gpu, "find_spec", lambda _: object())
    assert doctor._gpu()["passes on cuda:0"] == "torch: a GPU is older than Ampere"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert doctor._gpu()["passes on cuda:0"] == "CUDA graphs"
