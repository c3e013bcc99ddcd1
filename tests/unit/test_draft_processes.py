"""The recipe draft with several processes: they train as one does, and share every step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from draft_runs import OPTIONS

from forerun.errors import ConfigError, DataError, Diverged, ForerunError
from forerun.training.processes import agree, num_processes, process_group, sum_gradients
from forerun.training.recipes.draft import Draft


def weights(out: Path, phase: str) -> dict[str, torch.Tensor]:
    return torch.load(out / "state" / f"{phase}.pt", weights_only=True)["parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["direct_alignment", "distillspec"])
def test_two_processes_train_as_one_does(
    target: Path, prompts: Path, tmp_path: Path, recipe: str
) -> None:
    """Equal up to the order of sums; a run may change the number when it is resumed."""
    given = OPTIONS | {"model": str(target), "prompts": prompts, "recipe": recipe, "rate": 0.1}
    found = {}
    for threads in (1, 2):
        found[threads] = tmp_path / str(threads)
        Draft(**given, threads=threads).train(found[threads])
    start = Draft(**given, threads=1, seed=1)  # other weights: what a difference looks like
    start.train(tmp_path / "other")
    for phase in ("pretrain", "align"):
        one, two = (weights(found[threads], phase) for threads in (1, 2))
        other = weights(tmp_path / "other", phase)
        for name, p in one.items():
            torch.testing.assert_close(two[name], p, atol=2e-3, rtol=1e-2)
        assert max(float((other[n] - p).abs().max()) for n, p in one.items()) > 0.05


@pytest.mark.slow
def test_another_number_of_processes_continues(target: Path, prompts: Path, tmp_path: Path) -> None:
    def stop(title: str, share: float, note: str) -> None:
        if title == "align":
            raise KeyboardInterrupt

    given = OPTIONS | {"model": str(target), "prompts": prompts}
    with pytest.raises(KeyboardInterrupt):
        Draft(**given, threads=2).train(tmp_path / "out", watch=stop)
    Draft(**given, threads=1).train(tmp_path / "out", resume=True)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_step_is_shared_evenly(target: Path, prompts: Path, tmp_path: Path) -> None:
    given = OPTIONS | {"model": str(target), "prompts": prompts}
    with pytest.raises(ConfigError, match=r"by 3 processes; use 2, or --micro-batches 3"):
        Draft(**given, threads=3).train(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_gpu_each_or_a_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert [num_processes(device, 4) for device in ("cpu", "cuda", "cuda:1")] == [4, 3, 1]
    assert num_processes("cuda", 2) == 2


def follow(has_file: bool) -> None:
    """What another process does: it cannot read, or it has a loss that is not finite."""
    raise Diverged("loss became nan") if has_file else DataError("prompts.jsonl cannot be read")


@pytest.mark.parametrize(
    ("has_file", "said"), [(False, "error: prompts.jsonl cannot be read"), (True, "")]
)
def test_the_error_of_another_process_is_said(
    has_file: bool, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        pytest.raises(ForerunError, match="another process of this run ended early; see its error"),
        process_group(2, follow, (has_file,)),
    ):
        agree(1.0)
        sum_gradients(torch.zeros(1), [])
    assert capfd.readouterr().err.strip() == said
