"""The training loop and its data: it learns, resumes exactly, and survives a broken save."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from forerun.errors import ConfigError, DataError
from forerun.training.data.documents import (
    Batches,
    Documents,
    load_documents,
    save_documents,
    write_atomically,
)
from forerun.training.data.mixture import PackedBatches
from forerun.training.data.tokenizer import train_tokenizer
from forerun.training.export import save
from forerun.training.language_model import LanguageModel, Size, build_model
from forerun.training.loop import Loop, LoopOptions
from forerun.training.optimizers import rate_factor

TINY = Size(hidden=32, layers=2, heads=2, kv_heads=1, inner=48)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["one two three 12 = 12\n"] * 4, vocab_size=270, context=64)


def make_documents(tmp_path: Path, num: int = 24) -> Documents:
    rng = np.random.default_rng(0)
    made = [(rng.integers(2, 200, size=rng.integers(6, 40)).tolist(), 3) for _ in range(num)]
    save_documents(tmp_path / "shard-0.npz", made[: num // 2])
    save_documents(tmp_path / "shard-1.npz", made[num // 2 :])
    return load_documents([tmp_path / "shard-0.npz", tmp_path / "shard-1.npz"])


def make_loop(tokenizer, documents: Documents, steps: int, checkpoint: Path | None = None) -> Loop:
    batches = Batches(documents, budget=128, accumulate=2, pad=0)
    recipe = LanguageModel(build_model(TINY, tokenizer), batches)
    options = LoopOptions(max_steps=steps, warmup_steps=2, decay_share=0.0)
    return Loop(recipe, options, CPU, checkpoint)


def test_documents_come_back_as_saved(tmp_path):
    documents = make_documents(tmp_path, 10)
    assert len(documents) == 10
    assert documents.lengths().sum() == len(documents.tokens)
    rng = np.random.default_rng(0)
    first = rng.integers(2, 200, size=rng.integers(6, 40))
    assert documents.document(0).tolist() == first.tolist()


def test_damaged_shard_is_named(tmp_path):
    (tmp_path / "shard-0.npz").write_bytes(b"not a shard")
    with pytest.raises(DataError, match=r"shard-0.npz.*delete"):
        load_documents([tmp_path / "shard-0.npz"])
    with pytest.raises(DataError, match="none"):
        load_documents([])


def test_an_epoch_shows_every_document_once(tmp_path):
    documents = make_documents(tmp_path)
    groups = Batches(documents, budget=128, accumulate=2).groups(epoch=0)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(documents)))
    assert groups[0].tolist() != Batches(documents, budget=128, seed=1).groups(0)[0].tolist()


@pytest.mark.parametrize("kind", [Batches, PackedBatches])
def test_documents_of_one_token_are_left_out(kind: type[Batches]) -> None:
    """A micro-batch of them would have nothing to predict."""
    documents = Documents.of([([1], 0)] * 40 + [([1, 2, 3], 0)])
    for micro in next(kind(documents, budget=4, accumulate=2).steps()):
        assert micro.tokens.tolist()[0][:3] == [1, 2, 3] and float(micro.weights.sum()) > 0
    with pytest.raises(DataError, match="none of 1 documents has two tokens"):
        next(kind(documents, only=np.array([3])).steps())


def test_step_weights_sum_to_one_and_skip_padding(tmp_path):
    documents = make_documents(tmp_path)
    micros = next(Batches(documents, budget=128, accumulate=3, prompt_weight=0.0).steps())
    assert len(micros) == 3
    assert sum(float(m.weights.sum()) for m in micros) == pytest.approx(1.0, abs=1e-6)
    for m in micros:
        assert m.tokens.numel() <= 2 * 128
        assert int((m.tokens != 0).sum()) == m.num_tokens
        assert not m.weights[m.tokens == 0].any() and not m.weights[:, :3].any()


def test_steps_can_start_anywhere(tmp_path):
    batches = Batches(make_documents(tmp_path), budget=128, accumulate=2)
    steps = batches.steps()
    tenth = [next(steps) for _ in range(10)][9]
    assert all(map(torch.equal, *([m.tokens for m in s] for s in (tenth, next(batches.steps(9))))))


def test_learns_a_small_batch_by_heart(tmp_path, tokenizer):
    documents = make_documents(tmp_path, 4)
    loop = make_loop(tokenizer, documents, steps=60)
    micro = next(loop.recipe.batches(0))
    with torch.no_grad():
        before = sum(float(loop.recipe.loss(m)) for m in micro)
    loop.run()
    with torch.no_grad():
        after = sum(float(loop.recipe.loss(m)) for m in micro)
    assert before > 5.0 and after < 1.0


def test_resumed_run_equals_an_uninterrupted_one(tmp_path, tokenizer):
    documents = make_documents(tmp_path)
    whole = make_loop(tokenizer, documents, steps=8)
    whole.run()
    path = tmp_path / "run.pt"
    make_loop(tokenizer, documents, steps=4, checkpoint=path).run()
    rest = make_loop(tokenizer, documents, steps=8, checkpoint=path)
    assert rest.resume() and rest.progress.step == 4
    rest.run()
    assert rest.progress.step == 8 and rest.progress.tokens == whole.progress.tokens
    for name, p in whole.parameters.items():
        assert torch.equal(p, rest.parameters[name]), name


def test_interrupt_saves_what_was_learned(tmp_path, tokenizer):
    loop = make_loop(tokenizer, make_documents(tmp_path), steps=50, checkpoint=tmp_path / "run.pt")

    def stop(progress):
        if progress.step == 3:
            raise KeyboardInterrupt

    loop.on_step = stop
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    again = make_loop(tokenizer, make_documents(tmp_path), steps=50, checkpoint=tmp_path / "run.pt")
    assert again.resume() and again.progress.step == 3
    for name, p in loop.parameters.items():
        assert torch.equal(p, again.parameters[name]), name


def test_a_step_that_is_interrupted_within_its_gradients_is_repeated(tmp_path, tokenizer):
    documents, path = make_documents(tmp_path), tmp_path / "run.pt"
    whole = make_loop(tokenizer, documents, steps=6)
    whole.run()
    loop = make_loop(tokenizer, documents, steps=6, checkpoint=path)
    loss, calls = loop.recipe.loss, list[int]()

    def interrupted(micro):
        calls.append(1)
        if len(calls) == 8:  # the second micro-batch of the fourth step
            raise KeyboardInterrupt
        return loss(micro)

    loop.recipe.loss = interrupted
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    rest = make_loop(tokenizer, documents, steps=6, checkpoint=path)
    assert rest.resume() and rest.progress.step == 3
    rest.run()
    for name, p in whole.parameters.items():
        assert torch.equal(p, rest.parameters[name]), name


def test_failed_save_leaves_the_earlier_checkpoint(tmp_path, tokenizer, monkeypatch):
    path = tmp_path / "run.pt"
    loop = make_loop(tokenizer, make_documents(tmp_path), steps=2, checkpoint=path)
    loop.run()
    kept = path.read_bytes()

    def fail(state, file):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        loop.save()
    assert path.read_bytes() == kept
    assert [f.name for f in tmp_path.iterdir() if "part" in f.name] == []


def test_foreign_or_broken_checkpoints_are_refused(tmp_path, tokenizer):
    path = tmp_path / "run.pt"
    path.write_bytes(b"junk")
    loop = make_loop(tokenizer, make_documents(tmp_path), steps=2, checkpoint=path)
    with pytest.raises(DataError, match="not a readable checkpoint"):
        loop.resume()
    torch.save({"parameters": {}, "optimizers": [], "progress": {}}, path)
    with pytest.raises(DataError, match="another model"):
        loop.resume()
    other = {name: torch.zeros(3) for name in loop.parameters}
    torch.save({"parameters": other, "optimizers": [], "progress": {}}, path)
    with pytest.raises(DataError, match="another model"):
        loop.resume()


def test_no_checkpoint_no_resume(tmp_path, tokenizer):
    loop = make_loop(tokenizer, make_documents(tmp_path), steps=2, checkpoint=tmp_path / "none.pt")
    assert not loop.resume()


def test_rate_warms_up_holds_and_decays():
    options = LoopOptions(max_steps=100, warmup_steps=10, decay_share=0.4)
    factors = [rate_factor(step, step / 100, options) for step in (0, 9, 50, 80, 99)]
    assert factors == pytest.approx([0.1, 1.0, 1.0, 0.5, 0.025])
    with pytest.raises(ConfigError, match="max_steps or minutes"):
        LoopOptions()


def test_a_larger_budget_raises_the_rate_again_and_then_decays():
    short = LoopOptions(max_steps=100, warmup_steps=10, decay_share=0.4)
    long = LoopOptions(max_steps=200, warmup_steps=10, decay_share=0.4)
    assert rate_factor(99, 0.99, short) == pytest.approx(0.025)
    factors = [rate_factor(step, step / 200, long) for step in (100, 119, 160, 199)]
    assert factors == pytest.approx([1.0, 1.0, 0.5, 0.0125])


def test_a_finished_run_goes_on_with_a_larger_budget(tmp_path, tokenizer):
    documents, path = make_documents(tmp_path), tmp_path / "run.pt"
    loop = make_loop(tokenizer, documents, steps=2, checkpoint=path)
    assert loop.run().finished
    longer = make_loop(tokenizer, documents, steps=3, checkpoint=path)
    longer.resume()
    assert not longer.progress.finished and longer.run().step == 3


def test_write_atomically_makes_folders(tmp_path):
    write_atomically(tmp_path / "a" / "b.txt", lambda part: part.write_text("x"))
    assert (tmp_path / "a" / "b.txt").read_text() == "x"


def test_export_loads_in_transformers(tmp_path, tokenizer):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = build_model(TINY, tokenizer)
    save(model, tmp_path / "model", tokenizer=tokenizer, card="# a card\n")
    assert (tmp_path / "model" / "README.md").read_text() == "# a card\n"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    again = AutoTokenizer.from_pretrained(tmp_path / "model")
    for name, p in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), p.to(torch.bfloat16).float()), name
    assert again("one two 12")["input_ids"] == tokenizer("one two 12")["input_ids"]
    assert again.eos_token == "<|end|>" and again.pad_token_id == tokenizer.pad_token_id
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
