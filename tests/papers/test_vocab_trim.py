"""VocabTrim (arXiv 2506.22694): a draft head with the target's frequent tokens only.

The paper's claims, in small: the output stays exact for every size of the head; a size in between
has the largest memory-bound speed-up where the head is most of the draft's bytes; texts of the
target are the best calibration. Made models: a target with a Zipf law over 64 tokens and a draft
near it. Loading: random llama checkpoints with tied and separate heads, on our kernels and torch.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import make_tiny

import forerun
from fakes import FakeRunner, FakeTarget, sequence, table_law
from forerun import registry
from forerun.cli.main import main
from forerun.compression import vocab_trim
from forerun.compression.vocab_trim import (
    ReducedHead,
    VocabTrim,
    best,
    mbsu,
    split,
    top_tokens,
    write_trimmed,
)
from forerun.core.dice import SeededDice
from forerun.core.records import Plan
from forerun.core.sampling import Sampling
from forerun.drafters.draft_model import DraftModel
from forerun.errors import ModelError
from forerun.models.draft_link import load_draft
from forerun.models.load import load_target
from forerun.models.vocab_map import VocabMap
from harness import EXACT, distance

pytestmark = pytest.mark.paper
VOCAB = 3


def reduced(kept: list[int]) -> DraftModel:
    """A draft model with a head for some of three tokens."""
    return DraftModel(model=ReducedHead(FakeRunner(table_law(2)), np.array(kept)))  # type: ignore[arg-type]


@pytest.mark.parametrize("request_", [Sampling(), Sampling(top_k=2), Sampling(temperature=0)])
@pytest.mark.parametrize("kept", [[0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]])
def test_the_law_is_kept_for_every_head(kept: list[int], request_: Sampling) -> None:
    verifier = registry.make("verifier", "speculative")
    error = distance(
        table_law(1), lambda: reduced(kept), verifier, plan=Plan(2, 2), sampling=request_
    )
    assert error <= EXACT


@pytest.mark.parametrize("kept", [[0], [0, 2], [1, 2]])
def test_drafts_are_drawn_from_the_reduced_law(kept: list[int]) -> None:
    drafter = reduced(kept)
    seq = sequence((0, 1), 5, SeededDice(0))
    drafter.bind(FakeTarget(table_law(1)))
    (q,) = drafter.source.next([(seq, ())])
    law = table_law(2)([0, 1])[kept]
    assert q is not None and q.ids.tolist() == kept
    assert q.probs == pytest.approx(law / law.sum())


# The file and the runners


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("draft") / "draft")


def tied(folder: Path, out: Path) -> Path:
    """The checkpoint with a head tied to its embedding."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)
    return out


def logits(runner, tokens: list[int]) -> torch.Tensor:
    seq = sequence(tokens, 4, SeededDice(0))
    return torch.as_tensor(runner.rows_at([(seq, ()), (seq, (7, 9))])).float()


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rows_of_the_head_are_those_of_the_full_one(
    draft: Path, tmp_path: Path, is_tied: bool, dtype: str
) -> None:
    source = tied(draft, tmp_path / "tied") if is_tied else draft
    kept = top_tokens(np.arange(288)[::-1], 50, [0, 280])
    write_trimmed(source, tmp_path / "trimmed", kept, 288)
    full = load_draft(str(source), dtype, "cpu", 4, None)
    small = load_draft(str(tmp_path / "trimmed"), dtype, "cpu", 4, None)
    assert type(small.decode).__name__ == type(full.decode).__name__
    text = [5, 200, 31, 287]  # tokens outside of the head too: the embedding is whole
    assert torch.equal(logits(small, text), logits(full, text)[:, kept])
    on_torch = small.torch_decoder(frozenset())
    small.decode = on_torch
    small.forget_cells()
    assert torch.allclose(logits(small, text), logits(full, text)[:, kept], atol=0.1)


def test_the_file_has_d2t_and_t2d(draft: Path, tmp_path: Path) -> None:
    kept = np.array([0, 3, 90, 287])
    write_trimmed(draft, tmp_path / "out", kept, 288)
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert (held["d2t"] + torch.arange(4)).tolist() == kept.tolist()
    assert torch.nonzero(held["t2d"]).flatten().tolist() == kept.tolist()
    assert (held["d2t"].dtype, held["t2d"].dtype) == (torch.int64, torch.bool)
    assert held["d2t"].tolist() == [0, 2, 88, 284] and held["t2d"].shape == (288,)
    full = load_file(draft / "model.safetensors")
    assert torch.equal(held["lm_head.weight"], full["lm_head.weight"][kept])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["draft_vocab_size"] == 4 and not config["tie_word_embeddings"]


def test_a_whole_head_drafts_the_same_tokens(draft: Path, tmp_path: Path) -> None:
    """k = V: the same ids from the same random draws."""
    write_trimmed(draft, tmp_path / "out", np.arange(288), 288)
    target = load_target(draft, dtype="fp32")
    trees = []
    for folder in (draft, tmp_path / "out"):
        drafter = DraftModel(model=load_draft(str(folder), "fp32", "cpu", 4, None), grower="gumbel")
        drafter.bind(target)
        seq = sequence([5, 6, 7], 20, SeededDice(3), Sampling(temperature=0.8))
        trees += drafter.propose([seq], [Plan(12, 4)], [seq.dice])
    assert trees[0].has_same_nodes(trees[1])
    assert np.array_equal(trees[0].q_probs, trees[1].q_probs)


def test_a_reduced_head_is_no_target(draft: Path, tmp_path: Path) -> None:
    write_trimmed(draft, tmp_path / "out", np.arange(20), 288)
    with pytest.raises(ModelError, match="head for 20 of its 288 tokens"):
        forerun.load(str(tmp_path / "out"))
    held = load_file(tmp_path / "out" / "model.safetensors")
    del held["d2t"]
    from safetensors.torch import save_file

    save_file(held, tmp_path / "out" / "model.safetensors")
    with pytest.raises(ModelError, match="lacks d2t"):
        load_draft(str(tmp_path / "out"), "auto", "cpu", 4, None)


# Which tokens, and how many


def test_frequent_and_special_tokens_are_kept() -> None:
    counts = np.array([0, 5, 9, 5, 1, 0])
    assert top_tokens(counts, 2, [0]).tolist() == [0, 1, 2]
    assert top_tokens(counts, 3, [0, 2]).tolist() == [0, 1, 2, 3]
    assert top_tokens(counts, 6, [0, 99]).tolist() == list(range(6))


@pytest.mark.parametrize("num", [1, 2, 3, 4, 9])
def test_sizes_are_measured_on_other_prompts_than_counted(num: int) -> None:
    prompts = [str(i) for i in range(num)]
    fit, held_out = split(prompts)
    assert fit and held_out
    if num > 1:
        assert sorted(fit + held_out) == prompts


def test_speed_ups_of_the_sheet() -> None:
    assert mbsu(3.6, 0.20, 5) == pytest.approx(1.80)
    assert mbsu(3.4, 0.12, 5) == pytest.approx(2.125)


SIZE = 64


def zipf(power: float, shift: int = 0):
    """A law over 64 tokens with most mass on few; the order depends on the last token a little."""
    weights = np.roll(1.0 / np.arange(1, SIZE + 1) ** power, shift)

    def law(tokens) -> np.ndarray:
        row = weights * np.where(np.arange(SIZE) % 3 == tokens[-1] % 3, 1.5, 1.0)
        return row / row.sum()

    return law


class Drafting(FakeRunner):
    def __init__(self, law) -> None:
        super().__init__(law)
        self.vocab_size = SIZE


class Measured(VocabTrim):
    """The sweep without files: tau by a run of the engine on made models."""

    def tau(self, target, draft, prompts) -> float:
        from forerun.controllers.fixed import Fixed
        from forerun.engine.engine import Engine

        drafter = DraftModel(model=draft)
        engine = Engine(
            target.target,
            drafter,
            registry.make("verifier", "speculative"),
            Fixed(nodes=self.gamma, depth=self.gamma),
        )
        seq = sequence([1], 1500, SeededDice(5))
        engine.submit(seq)
        steps = 0
        while seq.finish is None and len(seq.generated) < 1500:
            engine.step()
            steps += 1
        return len(seq.generated) / steps


class Pair:
    target = FakeTarget(zipf(1.6), SIZE)


def test_a_size_in_between_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """tau falls with the head, slowly at first; bytes fall at once, as most are the head's."""

    def bytes_read(model, rows: int | None = None) -> int:
        return 100 if rows is None else 4 + rows // 2  # a head of 32 in a draft of 36

    monkeypatch.setattr(vocab_trim, "bytes_read", bytes_read)
    counts = np.round(1e4 * zipf(1.6)([0])).astype(np.int64)
    draft = Drafting(zipf(1.5))
    points = Measured(calibrate="-", gamma=3).sweep(Pair(), draft, counts, [0], [])  # type: ignore[arg-type]
    sizes = [point.size for point in points]
    chosen = best(points)
    assert sizes == [64, 32, 16, 8, 4, 2, 1]
    assert points[0].tau > points[2].tau > points[-1].tau
    assert chosen.size not in (64, 1)
    assert chosen.mbsu > 1.05 * points[0].mbsu


def test_the_source_says_whose_texts_are_counted(draft: Path, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "target", seed=1)
    target, alone = forerun.load(folder), forerun.load(draft)
    prompts = [target.tokenizer.encode(text) for text in ("the cat", "one two three")]
    runner = load_draft(str(draft), "auto", "auto", 4, target.tokenizer)
    how = Sampling(temperature=0, max_new_tokens=12)
    texts = {
        "target": [r.samples[0].tokens for r in target.generate(prompts, how, drafter="none")],
        "draft": [r.samples[0].tokens for r in alone.generate(prompts, how, drafter="none")],
        "raw": prompts,
    }
    assert texts["target"] != texts["draft"]
    for source, expected in texts.items():
        trim = VocabTrim(calibrate="-", source=source, tokens=12)
        counts = trim.count(target, runner, prompts)
        assert counts.tolist() == np.bincount(np.concatenate(expected), minlength=288).tolist()


def test_prompts_are_in_the_chat_template_of_the_target(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, path, seen = make_tiny(tmp_path / "target"), tmp_path / "p.jsonl", []
    (folder / "chat_template.jinja").write_text("one {{ messages[0].content }} two")
    path.write_text('{"prompt": "the cat"}\n' * 2)

    def count(self: VocabTrim, target: forerun.Model, draft: object, prompts: list) -> np.ndarray:
        seen.extend(map(target.tokenizer.decode, prompts))
        return np.ones(288, np.int64)

    monkeypatch.setattr(VocabTrim, "count", count)
    list(VocabTrim(calibrate=path, model=str(folder), keep="9").trim(draft, tmp_path / "out"))
    assert seen == ["one the cat two"]


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        ("auto", "only 2 prompts to measure sizes on; give 64 or more to --calibrate"),
        ("200", "179 of the 200 tokens to keep do not occur in the counted texts; give a smaller"),
    ],
)
def test_few_prompts_are_mentioned(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str, said: str
) -> None:
    folder, path = make_tiny(tmp_path / "target"), tmp_path / "p.jsonl"
    path.write_text('{"prompt": "the cat"}\n' * 8)
    monkeypatch.setattr(VocabTrim, "count", lambda *_: (np.arange(288) < 21).astype(np.int64))
    trim = VocabTrim(calibrate=path, model=str(folder), keep=keep, tokens=4)
    lines = list(trim.trim(draft, tmp_path / "out"))
    assert any(line.startswith(said) for line in lines)


def test_texts_of_the_target_are_the_best_calibration() -> None:
    """Against texts of another domain, where other tokens are frequent."""
    taus = defaultdict(float)
    for source, shift in (("target", 0), ("raw", 20)):
        counts = np.round(1e4 * zipf(1.6, shift)([0])).astype(np.int64)
        head = ReducedHead(Drafting(zipf(1.5)), top_tokens(counts, 8, []))  # type: ignore[arg-type]
        taus[source] = Measured(calibrate="-", gamma=3).tau(Pair(), head, [])  # type: ignore[arg-type]
    assert taus["target"] > 1.3 * taus["raw"]


def test_the_command_writes_a_draft_that_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedded pair: counted in the target's own texts, exact, special tokens kept."""
    from forerun.tasks.reasoning import ReasoningTask

    prompts = tmp_path / "prompts.jsonl"
    task = ReasoningTask()
    rows = [json.dumps({"prompt": task.example(i).prompt}) for i in range(4)]
    prompts.write_text("\n".join(rows) + "\n")
    command = ["compress", "vocab-trim", "--draft", "draft", "--calibrate", str(prompts)]
    command += ["--tokens", "48", "--out", str(tmp_path / "out")]
    assert main([*command, "--keep", "768"]) == 2
    assert "leave nothing to remove of 768 tokens" in capsys.readouterr().err
    assert main([*command, "--keep", "96"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("tokens") and "a head of" in lines[-1]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "with a head of" in card and "answers of the target to prompts of prompts.jsonl" in card
    assert not (tmp_path / "out" / "draft.json").exists()
    held = load_file(tmp_path / "out" / "model.safetensors")
    model = forerun.load()
    head = VocabMap.from_offsets(held["d2t"].numpy(), model.target.vocab_size)
    specials = {*model.tokenizer.specials, *model.tokenizer.eos_ids}
    assert {i for i in specials if i < len(head.back)} <= set(head.forward.tolist())
    said = model.generate([json.loads(rows[0])["prompt"]], temperature=0, max_new_tokens=48)
    assert set(said[0].samples[0].tokens) <= set(head.forward.tolist())
    answers = [
        model.generate([json.loads(rows[0])["prompt"]], temperature=0, max_new_tokens=40, **parts)
        for parts in (
            {"drafter": "none"},
            {"drafter": f"draft_model:model={tmp_path / 'out'}", "controller": "fixed"},
        )
    ]
    assert answers[0][0].text == answers[1][0].text
    assert answers[1][0].stats.tau > 1.5
