"""Faults in the training of a draft: prompts, overflow, a full disk, kill -9, padding."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from draft_runs import OPTIONS as SHORT
from safetensors.torch import load_file
from test_no_room import room
from tiny import make_tokenizer

import forerun
from forerun.core.sampling import Sampling
from forerun.errors import CapacityError, ConfigError, DataError
from forerun.runner.kv_cache import Cache
from forerun.training.checkpoints import load_checkpoint
from forerun.training.drafts.data import read_prompts
from forerun.training.recipes.draft import Draft
from forerun.training.records import read_records

OPTIONS = SHORT | {"threads": 1}


def recipe(target: Path, prompts: Path, **options) -> Draft:
    return Draft(model=str(target), prompts=prompts, **OPTIONS | options)


def kill_in(phase: str):
    """A watch that interrupts a phase."""

    def watch(title: str, share: float, note: str) -> None:
        if title == phase:
            raise KeyboardInterrupt

    return watch


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"has 0 prompts; a draft needs at least 10"),
        ('{"prompt": "one"}\n' * 9, r"has 9 prompts; a draft needs at least 10"),
        ('{"prompt": ""}\n' * 20, r":1 has an empty prompt"),
        ('{"prompt": "' + "one two " * 200 + '"}\n' + '{"prompt": "a"}\n' * 9, "has 9 prompts"),
        ('{"prompt": "a", "domain": "greedy"}\n', ":1 has the domain 'greedy'"),
    ],
    ids=["empty", "tiny", "no text", "longer than the context", "name of a column"],
)
def test_prompts_that_cannot_be_used(target: Path, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "prompts.jsonl").write_text(text)
    with pytest.raises((ConfigError, DataError, CapacityError), match=said):
        recipe(target, tmp_path / "prompts.jsonl").train(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_long_prompts_are_left_out_with_a_warning(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "one two " * (200 if i in (3, 7) else 1)} for i in range(14)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_prompts(path, 11, forerun.load(str(target)))
    assert [prompt.text for prompt in found] == ["one two "] * 11
    assert "2 prompts are left out, the first in line 4" in caplog.text


def test_separators_of_unicode_inside_a_prompt(target: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    row = json.dumps({"prompt": "one\u2028two\x85"}, ensure_ascii=False)
    path.write_text(f"{row}\r\n" * 12, encoding="utf-8", newline="")
    assert {p.text for p in read_prompts(path, 20, forerun.load(str(target)))} == {
        "one\u2028two\x85"
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"code": Path("nothere.py")}, "nothere.py does not exist"),
        ({"corpus": Path("nothere.txt")}, "nothere.txt does not exist"),
        ({"share": 0.0001}, "use a larger share"),
        ({"data": "fixed"}, 'needs an "answer" for each prompt'),
    ],
)
def test_what_can_be_checked_is_checked_first_and_does_not_block_the_folder(
    target: Path, prompts: Path, tmp_path: Path, options: dict, said: str
) -> None:
    out, shown = tmp_path / "out", list[str]()

    def watch(title: str, share: float, note: str) -> None:
        shown.append(title)
        raise KeyboardInterrupt

    with pytest.raises((ConfigError, DataError), match=said):
        recipe(target, prompts, **options).train(out, watch=watch)
    assert not shown
    with pytest.raises(KeyboardInterrupt):  # the corrected run begins
        recipe(target, prompts).train(out, watch=watch)
    assert shown == ["answers of the target"]


@pytest.mark.parametrize("what", ["prompts", "corpus", "code"])
def test_another_file_under_the_same_name_is_refused(
    target: Path, prompts: Path, tmp_path: Path, what: str
) -> None:
    path, out = tmp_path / "file.jsonl", tmp_path / "out"
    given = {"prompts": prompts, what: path}
    path.write_text('{"prompt": "the cat", "text": "the cat"}\n' * 12)
    with pytest.raises(KeyboardInterrupt):
        recipe(target, **given).train(out, watch=kill_in("align"))
    path.write_text('{"prompt": "the dog", "text": "the dog"}\n' * 12)
    with pytest.raises(ConfigError, match=f"the content of {what} has changed since {out} was"):
        recipe(target, **given).train(out, resume=True)


def test_a_finished_run_takes_more_steps(target: Path, prompts: Path, tmp_path: Path) -> None:
    """All that is added goes to the last phase; the one before it is not trained again."""
    out = tmp_path / "out"
    recipe(target, prompts).train(out)
    first = json.loads((out / "draft.json").read_text())["training"]
    recipe(target, prompts, max_steps=16).train(out, resume=True)
    found = json.loads((out / "draft.json").read_text())["training"]
    steps = [{name: one["step"] for name, one in each.items()} for each in (first, found)]
    assert steps == [{"pretrain": 4, "align": 4}, {"pretrain": 4, "align": 12}]


def test_a_phase_that_begins_from_ruined_weights_says_so(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        recipe(target, prompts).train(out, watch=kill_in("align"))
    (out / "state" / "align.pt").unlink()
    held = load_checkpoint(out / "state" / "pretrain.pt")
    for p in held["parameters"].values():
        p.fill_(1e38)
    torch.save(held, out / "state" / "pretrain.pt")
    with pytest.raises(DataError, match=r"phase align: .*an earlier phase diverged: delete"):
        recipe(target, prompts, rate=0.5).train(out, resume=True)


def test_weights_that_overflow_end_the_run(target: Path, prompts: Path, tmp_path: Path) -> None:
    """The step is named, weights on disk are good, and a lower rate goes on."""
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        recipe(target, prompts).train(out, watch=kill_in("align"))
    with pytest.raises(DataError, match=r"at step \d+; try a lower learning rate|after step \d"):
        recipe(target, prompts, rate=1e38).train(out, resume=True)
    for path in (out / "state").glob("*.pt"):
        held = load_checkpoint(path)["parameters"].values()
        assert all(bool(p.isfinite().all()) for p in held)
    best = json.loads((out / "state" / "best.json").read_text())
    assert all(bool(p.isfinite().all()) for p in load_file(out / "state" / best["file"]).values())
    recipe(target, prompts, rate=0.5).train(out, resume=True)
    assert (out / "model.safetensors").exists()


@pytest.mark.parametrize("size", [100, 1_500])  # for plan.json, for the answers of a prompt
def test_a_disk_without_room_for_answers(
    target: Path, prompts: Path, tmp_path: Path, size: int
) -> None:
    with room(size), pytest.raises(CapacityError, match="raise the limit of file sizes"):
        recipe(target, prompts).train(tmp_path / "out")


def test_a_target_without_memory_for_the_batch_answers_fewer_prompts_at_once(
    target: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line says so, and every prompt has its answers."""
    recipe(target, prompts).train(tmp_path / "whole")
    asked = list[int]()

    def little(cache: Cache, slots: int, cells: int, taken: int = 0) -> int:
        asked.append(slots)
        if slots > 2:
            raise CapacityError("the key-value cache needs 2 MiB, and 1 MiB are free")
        return 0

    monkeypatch.setattr(Cache, "check_room", little)
    with pytest.raises(KeyboardInterrupt):
        recipe(target, prompts).train(tmp_path / "out", watch=kill_in("pretrain"))
    said = [r.getMessage() for r in caplog.records if "run at once" in r.getMessage()]
    assert max(asked) > 2 and len(said) == 1
    assert re.match(r"2 of \d+ sequences run at once, the others wait: the key-value", said[0])
    whole, found = (read_records(tmp_path / name / "data") for name in ("whole", "out"))
    assert found.numbers is not None and whole.numbers is not None
    assert found.numbers.tolist() == whole.numbers.tolist()


def test_a_full_disk_is_named_and_the_run_continues(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for size in (30_000, 60_000, 120_000):  # of the largest file that can be written
        with room(size), pytest.raises(CapacityError, match="raise the limit of file sizes"):
            recipe(target, prompts).train(out, resume=out.exists())
    recipe(target, prompts).train(out, resume=True)
    recipe(target, prompts).train(tmp_path / "whole")
    files = [folder / "model.safetensors" for folder in (out, tmp_path / "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_killed_process_continues(target: Path, prompts: Path, tmp_path: Path) -> None:
    """kill -9 in the second phase; the result is that of a run on the same answers, left alone."""
    out, options = tmp_path / "out", OPTIONS | {"max_steps": 40}
    code = (
        "from pathlib import Path; from forerun.training.recipes.draft import Draft; "
        f"Draft(model={str(target)!r}, prompts=Path({str(prompts)!r}), **{options!r})"
        f".train(Path({str(out)!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | source_path())
    end = time.monotonic() + 300
    while not (out / "state" / "pretrain.pt").exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (out / "model.safetensors").exists()
    recipe(target, prompts, **options).train(out, resume=True)
    shutil.copytree(out / "data", tmp_path / "whole" / "data")
    recipe(target, prompts, **options).train(tmp_path / "whole")
    found, whole = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "whole"))
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def source_path() -> dict[str, str]:
    """The environment in which a child process finds this package."""
    return {"PYTHONPATH": str(Path(forerun.__file__).parents[1])}


def test_another_tokenizer_is_refused_on_resume(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    copy, out = shutil.copytree(target, tmp_path / "target"), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        recipe(copy, prompts).train(out, watch=kill_in("pretrain"))
    make_tokenizer(copy, 280)
    with pytest.raises(ConfigError, match="tokenizer_hash"):
        recipe(copy, prompts).train(out, resume=True)


def test_a_vocabulary_with_padding(target: Path, prompts: Path, tmp_path: Path) -> None:
    """288 tokens in 320 rows: the draft has as many rows, and texts stay those of the target."""
    from transformers import AutoModelForCausalLM

    padded, out = shutil.copytree(target, tmp_path / "target"), tmp_path / "out"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(padded)
    model.resize_token_embeddings(pad_to_multiple_of=64)
    with torch.no_grad():  # padding as if it were trained
        model.lm_head.weight[288:].normal_(0.0, 0.45)
    model.save_pretrained(padded)
    recipe(padded, prompts, loss="fkl", top_k=4).train(out)
    assert AutoModelForCausalLM.from_pretrained(out).config.vocab_size == 320
    served = forerun.load(str(padded), dtype="fp32")
    sampling = Sampling(temperature=0, max_new_tokens=12)
    plain = served.generate(["the cat"], sampling, drafter="none")[0]
    drafted = served.generate(["the cat"], sampling, drafter=f"draft_model:model={out}")[0]
    assert drafted.samples[0].tokens == plain.samples[0].tokens
    assert drafted.stats.drafted > 0
