"""Records of a target: what is stored, resuming, packing, checks; batches drawn on-policy."""

from __future__ import annotations

from pathlib import Path
from time import sleep

import numpy as np
import pytest
import torch
from tiny import make_tiny

import forerun
from forerun.core.sampling import Sampling
from forerun.errors import ConfigError, DataError
from forerun.training import generate
from forerun.training.data.documents import Batches
from forerun.training.generate import features, generate_records, temperatures
from forerun.training.language_model import LanguageModel
from forerun.training.live import LiveBatches, draw_from, draw_from_module
from forerun.training.loop import Loop, LoopOptions
from forerun.training.records import check_target, files, finished, read_file, read_records

PROMPTS = ["the cat sat", "one two", "the dog", "ten nine eight", "rain fell on"]
SAMPLING = Sampling(temperature=0.8, top_p=0.95, max_new_tokens=12)


@pytest.fixture(scope="module")
def model(tiny_folder):
    return forerun.load(str(tiny_folder), dtype="fp32", max_seqs=4)


@pytest.fixture(scope="module")
def reference(tiny_folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()


def make(model, folder: Path, prompts=PROMPTS, sampling=SAMPLING, **options) -> None:
    generate_records(model, prompts, folder, sampling, drafter="none", batch=3, **options)


def texts(folder: Path) -> list[list[int]]:
    documents = read_records(folder)
    return [documents.document(i).tolist() for i in range(len(documents))]


def test_records_are_the_texts_of_the_target_with_its_rows(model, reference, tmp_path):
    make(model, tmp_path, top_k=5, features=True)
    documents = read_records(tmp_path, model)
    assert len(documents) == len(PROMPTS)
    for i, prompt in enumerate(PROMPTS):
        ids, start = documents.document(i), len(model.tokenizer.encode(prompt))
        assert ids[:start].tolist() == model.tokenizer.encode(prompt)
        assert documents.is_learned(i).tolist() == [at >= start for at in range(len(ids))]
        with torch.no_grad():
            tensor = torch.from_numpy(ids.astype(np.int64))[None]
            found = reference(tensor, output_hidden_states=True)
        logp = torch.log_softmax(found.logits[0], -1).numpy()
        top = documents.rows_of("top_ids", i)
        assert top.shape == (len(ids), 5) and (top[:, 0] == logp.argmax(-1)).all()
        np.testing.assert_allclose(
            documents.rows_of("top_logp", i), np.take_along_axis(logp, top, -1), atol=5e-3
        )
        hidden = found.hidden_states[-1][0].numpy()
        np.testing.assert_allclose(
            documents.rows_of("features", i).astype(np.float32), hidden, atol=1e-2, rtol=1e-2
        )


def test_the_mass_of_the_other_tokens_is_stored(model, reference, tmp_path):
    make(model, tmp_path, PROMPTS[:2], top_k=5)
    documents = read_records(tmp_path, model)
    for i in range(2):
        ids = torch.from_numpy(documents.document(i).astype(np.int64))[None]
        with torch.no_grad():
            probs = torch.softmax(reference(ids).logits[0].double(), -1)
        rest = 1 - probs.topk(5, -1).values.sum(-1)
        found = np.exp(documents.rows_of("tail_logp", i).astype(np.float64))
        np.testing.assert_allclose(found, rest.numpy(), rtol=5e-3)


GRID = temperatures((0.0, 0.5, 1.0), n=2, max_new_tokens=6)


def test_a_grid_answers_every_prompt_under_every_setting(model, tmp_path):
    assert [(s.temperature, s.top_p, s.n) for s in GRID] == [
        (0, 1, 1),
        (0.5, 0.95, 2),
        (1, 0.95, 2),
    ]
    make(model, tmp_path / "grid", PROMPTS[:3], GRID)
    records = [r for path in files(tmp_path / "grid") for r in read_file(path)]
    assert [r.setting for r in records] == [0, 1, 1, 2, 2] * 3
    assert [r.prompt for r in records] == [0] * 5 + [1] * 5 + [2] * 5
    assert read_records(tmp_path / "grid").numbers.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    make(model, tmp_path / "greedy", PROMPTS[:3], GRID[0])
    greedy = [r.ids.tolist() for r in records if r.setting == 0]
    assert greedy == texts(tmp_path / "greedy")
    assert len({tuple(r.ids.tolist()) for r in records}) > 9  # seeds and settings differ
    with pytest.raises(ConfigError, match="started with grid"):
        make(model, tmp_path / "grid", PROMPTS[:3], GRID[1:])
    with pytest.raises(ConfigError, match="grid of sampling settings is empty"):
        make(model, tmp_path / "none", PROMPTS[:3], [])


def test_a_killed_grid_continues_with_the_next_prompt(model, tmp_path):
    make(model, tmp_path / "whole", PROMPTS, GRID)

    def kill(title: str, share: float, note: str) -> None:
        if share >= 2 / len(PROMPTS):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(model, tmp_path / "killed", PROMPTS, GRID, watch=kill)
    assert 0 < len(finished(tmp_path / "killed")) < len(PROMPTS)
    make(model, tmp_path / "killed", PROMPTS, GRID)
    assert texts(tmp_path / "killed") == texts(tmp_path / "whole")


def test_features_do_not_depend_on_the_chunks(model, monkeypatch):
    tokens = list(range(5, 45))
    whole = features(model.target, tokens, top_k=3)
    monkeypatch.setattr(generate, "CHUNK", 7)
    parts = features(model.target, tokens, top_k=3)
    assert (whole.top_ids == parts.top_ids).all() and len(parts.features) == 40
    np.testing.assert_allclose(whole.features, parts.features, atol=2e-3, rtol=1e-2)
    assert model.target.num_held == 0


@pytest.mark.parametrize("written", [0, 1, 3])
def test_a_killed_run_continues_with_the_next_prompt(model, tmp_path, written):
    """Whatever it had written is kept as it is; the rest comes out as in a whole run."""
    make(model, tmp_path / "whole")

    class Killed(Exception):
        pass

    def kill(title: str, share: float, note: str) -> None:
        if share >= written / len(PROMPTS):
            raise Killed

    with pytest.raises(Killed):
        make(model, tmp_path / "killed", watch=kill)
    before = {path: path.read_bytes() for path in (tmp_path / "killed").glob("*.safetensors")}
    assert len(before) == written == len(finished(tmp_path / "killed"))
    made: list[str] = []
    make(model, tmp_path / "killed", watch=lambda title, share, note: made.append(note))
    assert made[0] == f"{written}/5 prompts" and len(made) == 6 - written
    assert all(path.read_bytes() == data for path, data in before.items())
    assert texts(tmp_path / "killed") == texts(tmp_path / "whole")


def test_more_prompts_may_be_added_and_several_samples_kept(model, tmp_path):
    sampling = Sampling(temperature=1.0, max_new_tokens=6, n=2)
    make(model, tmp_path, PROMPTS[:3], sampling)
    first = texts(tmp_path)
    make(model, tmp_path, PROMPTS, sampling)
    assert len(first) == 6 and texts(tmp_path)[:6] == first and len(texts(tmp_path)) == 10


def test_files_of_prompts_are_joined_into_shards(model, tmp_path, monkeypatch):
    make(model, tmp_path / "single", top_k=2)
    monkeypatch.setattr(generate, "SHARD", 2)
    make(model, tmp_path / "packed", top_k=2)
    names = sorted(path.name for path in (tmp_path / "packed").glob("*.safetensors"))
    assert names == [
        "prompt-0000004.safetensors",
        "shard-0000000.safetensors",
        "shard-0000002.safetensors",
    ]
    assert texts(tmp_path / "packed") == texts(tmp_path / "single")
    assert finished(tmp_path / "packed") == set(range(5))
    # a run that was killed between writing a shard and deleting what it holds
    (one,) = (r for r in read_file(tmp_path / "single" / "prompt-0000000.safetensors"))
    copy = tmp_path / "single" / "prompt-0000000.safetensors"
    (tmp_path / "packed" / copy.name).write_bytes(copy.read_bytes())
    assert texts(tmp_path / "packed") == texts(tmp_path / "single") and one.prompt == 0


def test_another_target_or_other_settings_are_refused(model, tmp_path):
    make(model, tmp_path / "records", PROMPTS[:1])
    other = forerun.load(str(make_tiny(tmp_path / "other", seed=1)), dtype="fp32")
    with pytest.raises(ConfigError, match=r"made by .* \(target_hash .* this run uses 'other'"):
        read_records(tmp_path / "records", other)
    with pytest.raises(ConfigError, match="target_hash"):
        make(other, tmp_path / "records")
    check_target(tmp_path / "records", model)
    with pytest.raises(ConfigError, match="started with temperature 0.8.* has temperature 0.5"):
        make(model, tmp_path / "records", sampling=Sampling(temperature=0.5, max_new_tokens=12))
    with pytest.raises(ConfigError, match="started with seed 0"):
        make(model, tmp_path / "records", seed=1)
    with pytest.raises(ConfigError, match="top_k must be from 0 to 288"):
        make(model, tmp_path / "new", top_k=1000)


def test_missing_and_damaged_records_are_named(model, tmp_path):
    with pytest.raises(DataError, match="there are no records"):
        read_records(tmp_path)
    make(model, tmp_path, PROMPTS[:1])
    (path,) = tmp_path.glob("prompt-*")
    path.write_bytes(b"short")
    with pytest.raises(DataError, match=r"prompt-0000000.safetensors is not a readable"):
        read_records(tmp_path)


def test_batches_carry_teacher_and_features(model, tmp_path):
    make(model, tmp_path, top_k=4, features=True)
    documents = read_records(tmp_path, model)
    (micro,) = next(Batches(documents, budget=10_000, accumulate=1, prompt_weight=0.0).steps())
    rows, width = micro.tokens.shape
    assert micro.top_ids.shape == micro.top_logp.shape == (rows, width, 4)
    assert micro.tail_logp.shape == (rows, width)
    assert micro.features.shape == (rows, width, 32) and micro.features.dtype == torch.float32
    order = np.argsort(-documents.lengths(), kind="stable")
    for row, ids in enumerate(micro.tokens):
        i = next(
            i
            for i in order
            if documents.document(i)[0] == ids[0]
            and (documents.document(i) == ids[: documents.lengths()[i]].numpy()).all()
        )
        n = documents.lengths()[i]
        assert (micro.top_ids[row, :n].numpy() == documents.rows_of("top_ids", i)).all()
        assert (micro.tail_logp[row, :n].numpy() == documents.rows_of("tail_logp", i)).all()
        assert not micro.features[row, n:].any() and not micro.weights[row, n:].any()
        assert ((micro.weights[row, :n] > 0).numpy() == documents.is_learned(i)).all()
    moved = micro.to(torch.device("meta"))
    assert moved.features.is_meta and moved.num_tokens == micro.num_tokens


class OnPolicy(LanguageModel):
    """Learns from its own texts of the current weights."""


def on_policy(folder: Path, checkpoint: Path, steps: int) -> tuple[Loop, list[list[list[int]]]]:
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = forerun.load(str(folder)).tokenizer
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    draw = draw_from_module(module, tokenizer, Sampling(temperature=1.0, max_new_tokens=5))
    seen: list[list[list[int]]] = []

    def drawn(prompts: list[list[int]], seed: int) -> list[list[int]]:
        found = draw(prompts, seed)
        seen.append([p + text for p, text in zip(prompts, found, strict=True)])
        return found

    recipe = OnPolicy(module, LiveBatches(prompts, drawn, size=3, seed=7))
    options = LoopOptions(max_steps=steps, warmup_steps=0, decay_share=0.0, other_rate=0.02)
    return Loop(recipe, options, torch.device("cpu"), checkpoint), seen


def test_a_resumed_on_policy_run_draws_the_same_batches(tiny_folder, tmp_path):
    whole, expected = on_policy(tiny_folder, tmp_path / "whole.pt", 6)
    whole.run()
    first, seen = on_policy(tiny_folder, tmp_path / "run.pt", 6)

    def stop(progress) -> None:
        if progress.step == 3:
            raise KeyboardInterrupt

    first.on_step = stop
    with pytest.raises(KeyboardInterrupt):
        first.run()
    rest, later = on_policy(tiny_folder, tmp_path / "run.pt", 6)
    assert rest.resume()
    rest.run()
    assert seen + later == expected and len(expected) == 6
    for name, p in whole.parameters.items():
        torch.testing.assert_close(rest.parameters[name], p, rtol=0, atol=0)
    fixed, unlearned = on_policy(tiny_folder, tmp_path / "none.pt", 6)
    fixed.recipe.data.batch(5)
    assert unlearned != expected[5:]  # the sixth batch depends on what was learned


def test_live_batches_show_every_prompt_once_per_epoch(model):
    live = LiveBatches([[5, i] for i in range(6)], draw_from(model, SAMPLING), size=4, seed=1)
    numbers = [n for step in range(3) for n in live.numbers(step)]
    assert sorted(numbers[:6]) == sorted(numbers[6:]) == list(range(6))
    assert live.numbers(1) == live.numbers(1) and live.seed_of(1) != live.seed_of(2)
    micros = live.batch(0)
    assert sum(float(micro.weights.sum()) for micro in micros) == pytest.approx(1.0, abs=1e-6)
    again = next(live.steps(0))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(micros, again, strict=True))


def test_a_small_live_batch_is_computed_once():
    live = LiveBatches([[5, 6], [5, 7]], lambda prompts, seed: [[8]] * len(prompts), size=2)
    (micro,) = live.batch(0)
    assert micro.tokens[:, 1].sort().values.tolist() == [6, 7]


def test_generating_a_live_batch_counts_as_training_time(tiny_folder):
    loop, _ = on_policy(tiny_folder, Path("unused"), 2)
    loop.checkpoint = None
    draw = loop.recipe.data.draw

    def slow(prompts: list[list[int]], seed: int) -> list[list[int]]:
        sleep(0.5)
        return draw(prompts, seed)

    object.__setattr__(loop.recipe.data, "draw", slow)
    assert loop.run().seconds >= 1.0


def test_the_module_is_in_training_mode_after_a_draw(tiny_folder):
    loop, _ = on_policy(tiny_folder, Path("unused"), 1)
    loop.recipe.model.train()
    loop.recipe.data.batch(0)
    assert loop.recipe.model.training


def test_mixed_batches_take_stored_answers_for_some_prompts():
    prompts = [[5, i] for i in range(8)]
    answers = [[[100 + i], [200 + i]] for i in range(8)]

    def draw(prompts: list[list[int]], seed: int) -> list[list[int]]:
        return [[50 + prompt[1]] for prompt in prompts]

    live = LiveBatches(prompts, draw, size=4, seed=3, answers=answers, share=0.5)
    kinds = []
    for step in range(100):
        assert live.stored(step) == live.stored(step)
        rows = torch.cat([micro.tokens[:, :3] for micro in live.batch(step)])
        for _, number, token in rows.tolist():
            assert token in (50 + number, 100 + number, 200 + number)
            kinds.append((token - number) // 50)
    shares = {kind: kinds.count(kind) / len(kinds) for kind in (1, 2, 4)}
    assert shares == pytest.approx({1: 0.5, 2: 0.25, 4: 0.25}, abs=0.07)

    def refuse(prompts: list[list[int]], seed: int) -> list[list[int]]:
        raise AssertionError("nothing is to be generated")

    LiveBatches(prompts, refuse, size=4, answers=answers, share=0.0).batch(0)


def test_mixed_batches_need_answers_for_all_prompts():
    with pytest.raises(ConfigError, match="need stored answers for each of 2 prompts"):
        LiveBatches([[1], [2]], draw_from, answers=[[[3]]], share=0.5)
    with pytest.raises(ConfigError, match="share must be from 0 to 1"):
        LiveBatches([[1], [2]], draw_from, share=1.5)
