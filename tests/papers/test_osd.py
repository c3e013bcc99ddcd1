"""Online Speculative Decoding (arXiv 2310.07177): the draft learns from what the target corrected.

The paper's claims, in small: only positions where the target replaced a draft token are learned;
acceptance rises on the traffic and a frozen draft's does not; drafts of classes do not touch each
other; the output does not depend on the updates. Made steps check the positions against a recount;
random llama checkpoints, of which one is the target, check the learning.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import make_tiny

import forerun
from fakes import FakeTarget, sequence, table_law
from forerun import registry
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Rows, Step, Verdict
from forerun.core.tree import chain
from forerun.drafters._class_router import ClassRouter
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.online import ONE_CLASS, Online
from forerun.engine.engine import Engine
from forerun.errors import ConfigError, DataError
from forerun.training.online.corrections import Corrections, Episode, ErrorBuffer, corrected_row
from forerun.training.online.learner import Learner, OnlineLearner, OnlineOptions, draft_module
from forerun.training.recipes.online import RESULTS, OnlineDraft, read_traffic

pytestmark = pytest.mark.paper
VOCAB = 40


def law(tokens: Any) -> np.ndarray:
    """A target's distribution, marked by the token that it was computed after."""
    p = np.full(VOCAB, 0.5 / VOCAB)
    p[tokens[-1] % VOCAB] += 0.5
    return p


class Laws(dict):
    """`step.laws[i]`, from `law`."""

    def __init__(self, tokens: list[int], tree: Any) -> None:
        found = [law(tokens + tree.path(node)) for node in range(-1, len(tree))]
        super().__init__({node - 1: p for node, p in enumerate(found)})
        self.rows = Rows(torch.from_numpy(np.log(np.stack(found))))


def cycle(seq: Any, drafted: list[int], accepted: int, token: int) -> Step:
    """A step in which the first `accepted` drafted tokens were kept, and then `token` came."""
    tree, start = chain(drafted), len(seq.tokens)
    laws = Laws(seq.tokens, tree)
    verdict = Verdict(list(range(accepted)), token)
    emitted = verdict.tokens(tree)
    seq.tokens += emitted
    return Step([seq], [Plan(3)], [tree], [laws], [verdict], [emitted], starts=[start])  # type: ignore[list-item]


def worked_example(**options: Any) -> Episode:
    """Prompt of ten tokens; cycle 1 drafts a b c, b is corrected; cycle 2 keeps d e f, and g comes.

    Then a plain step, which shows the row after g.
    """
    seq, found = sequence(range(10), 20, SeededDice(0)), list[Episode]()
    listen = Corrections(
        lambda seq: ONE_CLASS,
        lambda kind, episode, is_held, stats: found.append(episode),  # type: ignore[arg-type]
        vocab_size=VOCAB,
        **{"hold_every": 0, "top_k": 3} | options,
    )
    a, b, c, corrected, d, e, f, g = range(20, 28)
    listen(cycle(seq, [a, b, c], 1, corrected))
    listen(cycle(seq, [d, e, f], 3, g))
    last = cycle(seq, [], 0, 39)
    seq.finish = "length"
    listen(last)
    assert seq.tokens[10:16] == [a, corrected, d, e, f, g]
    return found[0]


def test_the_row_of_a_correction_is_the_one_before_it() -> None:
    episode = worked_example()
    assert episode.rows.tolist() == [10]  # the corrected token has index 11
    assert episode.tokens.tolist() == [*range(10), 20]  # row 10 reads token a
    assert episode.ids[0][np.argmax(episode.logp[0])] == 20, "the law at row 10"
    mass = np.exp(episode.logp[0]).sum() + np.exp(episode.tail[0])
    assert mass == pytest.approx(1.0, abs=1e-6)


def test_rows_without_a_draft_are_an_option() -> None:
    """Of the last step, which drafted nothing; the row after a bonus token is no correction."""
    episode = worked_example(records_undrafted=True)
    assert episode.rows.tolist() == [10, 15]
    assert [ids[np.argmax(p)] for ids, p in zip(episode.ids, episode.logp, strict=True)] == [20, 27]


def test_the_published_rows_are_an_option() -> None:
    episode = worked_example(compat=True)
    assert episode.rows.tolist() == [11, 15]
    assert [ids[np.argmax(p)] for ids, p in zip(episode.ids, episode.logp, strict=True)] == [23, 27]


@pytest.mark.parametrize(
    ("options", "all_rows", "kept"),
    [
        ({}, [10, 12, 13], [10, 13]),
        ({"compat": True}, [11, 13, 14], [14]),  # row 13 comes after an unknown step
        ({"hold_every": 1}, [9, 10, 11, 12, 13], [9, 10, 13]),
        ({"records_undrafted": True}, [10, 12, 13, 14], [10, 13, 14]),
        ({"records_undrafted": True, "hold_every": 1}, [9, 10, 11, 12, 13, 14], [9, 10, 13, 14]),
        ({"records_undrafted": True, "compat": True}, [11, 13, 14], [14]),
    ],
)
def test_rows_of_a_step_that_is_not_recorded_are_missing(
    options: dict[str, Any], all_rows: list[int], kept: list[int]
) -> None:
    """The second of four steps is left out."""
    for records, rows in ((True, all_rows), (False, kept)):
        seq, found = sequence(range(10), 20, SeededDice(0)), list[Any]()
        listen = Corrections(
            lambda seq: ONE_CLASS,
            lambda *given: found.append(given),  # noqa: B023
            vocab_size=VOCAB,
            **{"hold_every": 0, "top_k": 3} | options,
        )
        listen(cycle(seq, [20, 21], 1, 30))  # rows 9, 10
        listen(cycle(seq, [22, 23], 1, 31), record=records)  # rows 11, 12
        listen(cycle(seq, [24], 0, 32))  # row 13
        last = cycle(seq, [], 0, 33)  # row 14, which no draft was tried at
        seq.finish = "length"
        listen(last)
        ((kind, episode, is_held, stats),) = found
        assert (kind, is_held) == (ONE_CLASS, "hold_every" in options)
        assert episode.rows.tolist() == rows
        assert stats.steps == (4 if records else 3)
        laws = [law(seq.tokens[: row + 1]) for row in rows]
        assert [ids[np.argmax(p)] for ids, p in zip(episode.ids, episode.logp, strict=True)] == [
            np.argmax(one) for one in laws
        ]


@pytest.mark.parametrize("records", [True, False])
def test_a_request_that_ends_in_a_step_left_out_counts_if_another_was_recorded(
    records: bool,
) -> None:
    seq, found = sequence(range(10), 20, SeededDice(0)), list[Any]()
    listen = Corrections(
        lambda seq: ONE_CLASS,
        lambda kind, episode, is_held, stats: found.append(episode.rows.tolist()),  # type: ignore[union-attr]
        vocab_size=VOCAB,
        hold_every=0,
    )
    listen(cycle(seq, [20, 21], 1, 30), record=records)
    last = cycle(seq, [22, 23], 1, 31)
    seq.finish = "length"
    listen(last, record=False)
    assert found == ([[10]] if records else [])
    assert listen.counts == ({ONE_CLASS: 0} if records else {})
    assert listen not in seq.scratch


@pytest.mark.parametrize("grower", ["chain", "gumbel"])
def test_the_buffer_has_exactly_the_rejected_positions(grower: str) -> None:
    """A recount from the emitted tokens: they follow the tree until one is not in it."""
    found, wanted = list[int](), list[int]()
    target, draft = table_law(1, 5), table_law(2, 5)

    def recount(step: Step) -> None:
        tree, emitted = step.trees[0], step.emitted[0]
        at, begin = -1, len(step.seqs[0].tokens) - len(emitted)
        for offset, token in enumerate(emitted):
            tried = [n for n in range(len(tree)) if tree.parents[n] == at]
            match = [n for n in tried if tree.tokens[n] == token]
            if tried and not match:
                wanted.append(begin + offset - 1)
            if not match:
                break
            at = match[0]
        one = corrected_row(step, 0)
        found.extend([] if one is None else [one[0]])

    from fakes import FakeRunner

    runner = FakeRunner(draft)
    runner.vocab_size = 5
    engine = Engine(
        FakeTarget(target, 5),
        DraftModel(model=runner, grower=grower),  # type: ignore[arg-type]
        registry.make("verifier", "recursive" if grower == "gumbel" else "speculative"),
        Fixed(nodes=4, depth=2),
        listeners=[recount],
    )
    engine.submit(sequence((0, 1), 200, SeededDice(3)))
    engine.run()
    assert found == wanted and 10 < len(found) < 190


def episode_of(tokens: list[int], rows: list[int], model: Any) -> Episode:
    """Rows of a text, taught by a model, with all its tokens."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0][rows]
    logp = logits.log_softmax(-1).numpy()
    ids = np.tile(np.arange(logp.shape[1], dtype=np.int32), (len(rows), 1))
    tail = np.full(len(rows), -20.0, np.float32)
    return Episode(np.array(tokens, np.int32), np.array(rows), ids, logp, tail)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random target, and a draft near it: the same checkpoint with noise."""
    folder = make_tiny(tmp_path_factory.mktemp("osd") / "target", seed=1)
    draft = tmp_path_factory.mktemp("osd") / "draft"
    model = draft_module(str(folder))
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * p.std() * torch.randn_like(p))
    model.save_pretrained(draft)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (draft / name).write_bytes((folder / name).read_bytes())
    return folder, draft


def test_the_loss_is_the_mean_over_recorded_rows_only(pair: tuple[Path, Path]) -> None:
    target, draft = map(draft_module, map(str, pair))
    texts = [[5, 9, 40, 7, 81, 100], [3, 3, 60]]
    episodes = [episode_of(texts[0], [1, 4], target), episode_of(texts[1], [2], target)]
    losses = []
    for text, rows in zip(texts, ([1, 4], [2]), strict=True):
        logits = [m(input_ids=torch.tensor([text])).logits[0].double() for m in (draft, target)]
        logq, logp = (one.log_softmax(-1) for one in logits)
        losses += [float((logp[r].exp() * (logp[r] - logq[r])).sum().detach()) for r in rows]
    learner = Learner(draft, OnlineOptions(rate=1e-5))
    assert learner.update(episodes)
    assert learner.loss == pytest.approx(np.mean(losses), rel=1e-4)
    # a token behind the last row has no influence; nor does a batch neighbour
    other = Learner(draft_module(str(pair[1])), OnlineOptions(rate=1e-5))
    other.update([episode_of([*texts[0][:5], 99], [1, 4], target), episodes[1]])
    assert other.loss == learner.loss


def test_an_update_without_rows_changes_nothing(pair: tuple[Path, Path]) -> None:
    learner = Learner(draft_module(str(pair[1])), OnlineOptions())
    before = learner.copied()
    assert not learner.update([])
    assert learner.version == 0 and all(
        torch.equal(before[n], p) for n, p in learner.copied().items()
    )


def test_a_loss_that_is_not_finite_keeps_the_last_weights(pair: tuple[Path, Path]) -> None:
    target, draft = map(draft_module, map(str, pair))
    learner, good = Learner(draft, OnlineOptions()), episode_of([5, 9, 40], [1, 2], target)
    learner.update([good])
    before = learner.copied()
    bad = Episode(good.tokens, good.rows, good.ids, good.logp + np.float32("inf"), good.tail)
    with pytest.raises(DataError, match="loss became inf at update 2; try a lower learning rate"):
        learner.update([bad])
    assert learner.version == 1
    assert all(torch.equal(before[n], p) for n, p in learner.copied().items())


def test_an_update_that_hurts_falls_back_to_the_average(pair: tuple[Path, Path]) -> None:
    target = draft_module(str(pair[0]))
    far = draft_module(str(pair[0]))
    with torch.no_grad():
        far.lm_head.weight.neg_()  # a teacher that likes what the target dislikes
    text = [5, 9, 40, 7, 81, 100, 3, 60]
    options = OnlineOptions(rate=1.0, tolerance=0.02)
    learner = Learner(copy.deepcopy(target), options)
    learner.held.append(episode_of(text, [2, 3, 4, 5], target))
    assert learner.acceptance(learner.held[0]) == pytest.approx(1.0, abs=1e-3)
    assert learner.update([episode_of(text, [2, 3, 4, 5], far)])
    assert (learner.num_fallbacks, learner.version) == (1, 1)
    assert learner.acceptance(learner.held[0]) == pytest.approx(1.0, abs=1e-3)
    free = Learner(copy.deepcopy(target), options)  # nothing is held out
    free.update([episode_of(text, [2, 3, 4, 5], far)])
    assert free.num_fallbacks == 0
    assert free.acceptance(learner.held[0]) < 0.9


def test_the_buffer_is_bounded_and_drops_the_oldest() -> None:
    buffer, made = ErrorBuffer(10), []
    for n in range(4):
        row = np.zeros((1, 2), np.float32)
        made.append(Episode(np.full(4, n, np.int32), np.array([3]), row, row, np.zeros(1)))
        buffer.add(made[-1])
    buffer.add(None)
    assert (buffer.num_tokens, buffer.num_dropped, buffer.num_requests) == (8, 2, 5)
    assert buffer.take() == made[2:] and buffer.num_tokens == 0 and buffer.num_requests == 0


def test_a_router_learns_classes_from_examples() -> None:
    examples = [([1, 2, 3, 1, 2], "a"), ([1, 2, 1], "a"), ([7, 8, 9, 7], "b"), ([8, 9], "b")]
    router = ClassRouter(examples)
    assert router.classes == ["a", "b"]
    assert [router.route(t) for t in ([1, 2, 9], [9, 8], [2], [5])] == ["a", "b", "a", "a"]


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of prompts, interleaved."""
    path = tmp_path_factory.mktemp("traffic") / "traffic.jsonl"
    words = {"first": "the cat sat on the mat", "second": "one two three four five"}
    lines = [{"prompt": text, "class": kind} for _ in range(24) for kind, text in words.items()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def replayed(pair: tuple[Path, Path], traffic: Path, out: Path, **options: Any) -> Any:
    """Results of a replay: rows, and the weights of each class."""
    made = {"interval": 2, "rate": 1e-2, "max_tokens": 24, "hold_every": 0} | options
    recipe = OnlineDraft(replay=traffic, model=str(pair[0]), draft=str(pair[1]), **made)
    recipe.train(out)
    rows = [json.loads(line) for line in (out / RESULTS).read_text().splitlines()]
    weights = {
        kind: (out / kind / "model.safetensors").read_bytes()
        for kind in ("first", "second")
        if (out / kind).is_dir()
    }
    return SimpleNamespace(rows=rows, weights=weights)


def alpha(rows: list[dict[str, Any]]) -> float:
    """Acceptance over all tried positions."""
    return sum(row["overlap"] for row in rows) / sum(row["tried"] for row in rows)


@pytest.fixture(scope="module")
def learned(pair, traffic, tmp_path_factory) -> Iterator[Any]:
    return replayed(pair, traffic, tmp_path_factory.mktemp("learned") / "out")


def test_acceptance_rises_on_the_traffic_and_stays_with_a_frozen_draft(
    pair, traffic, learned, tmp_path
) -> None:
    frozen = replayed(pair, traffic, tmp_path / "out", interval=0)
    assert {row["version"] for row in frozen.rows} == {0} and not frozen.weights
    late, late_frozen = alpha(learned.rows[-16:]), alpha(frozen.rows[-16:])
    assert late > late_frozen + 0.05, (late, late_frozen)
    assert [row["version"] for row in learned.rows[:8]] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_the_same_traffic_gives_the_same_versions(pair, traffic, learned, tmp_path) -> None:
    again = replayed(pair, traffic, tmp_path / "out")
    assert again.weights == learned.weights and again.rows == learned.rows


def test_a_class_does_not_touch_the_draft_of_another(pair, traffic, learned, tmp_path) -> None:
    path = tmp_path / "one.jsonl"
    kept = [line for line in traffic.read_text().splitlines() if '"second"' not in line]
    path.write_text("\n".join(kept))
    recipe = OnlineDraft(
        replay=path, model=str(pair[0]), draft=str(pair[1]), interval=2, max_tokens=8
    )
    recipe.train(tmp_path / "out")
    assert not (tmp_path / "out" / "second").exists()
    target, draft = map(draft_module, map(str, pair))
    learner = OnlineLearner(draft, OnlineOptions(interval=1), lambda seq: None)
    for kind in ("first", "second"):
        learner.buffers[kind] = ErrorBuffer(1000)
    other = learner.learner("second").copied()
    learner.buffers["first"].add(episode_of([5, 9, 40], [1, 2], target))
    assert learner.due() == "first" and learner.update("first")
    assert all(torch.equal(other[n], p) for n, p in learner.learner("second").copied().items())
    assert learner.version("second") == 0


def test_greedy_texts_do_not_depend_on_updates(pair: tuple[Path, Path]) -> None:
    model = forerun.load(str(pair[0]), max_seqs=2)
    drafter = Online(model=str(pair[1]), tokenizer=model.tokenizer, target=model.target)
    module, versions = draft_module(str(pair[1])), set[int]()

    def disturb(step: Step) -> None:
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(1.1)
        versions.add(drafter.version_of(step.seqs[0]))
        drafter.publish(ONE_CLASS, module.state_dict(), len(versions))

    prompts, how = ["the cat", "one two", "three"], {"temperature": 0, "max_new_tokens": 30}
    plain = model.generate(prompts, drafter="none", **how)
    drafted = model.generate(
        prompts,
        drafter=drafter,
        controller=Fixed(nodes=4, depth=4),
        batch=1,
        on_step=disturb,
        **how,
    )
    assert [r.samples[0].tokens for r in drafted] == [r.samples[0].tokens for r in plain]
    assert len(versions) == 3


def test_bad_traffic_and_options_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with pytest.raises(ConfigError, match="recipe online needs traffic; give --replay FILE"):
        OnlineDraft()
    with pytest.raises(DataError, match="cannot be read"):
        read_traffic(path, 9)
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(DataError, match=r"t.jsonl:2 is not a request"):
        read_traffic(path, 9)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="has no request"):
        read_traffic(path, 9)
    for options, said in [
        ({"loss": "kl"}, "loss must be one of fkl, rkl, mix, got 'kl'"),
        ({"rate": 0.0}, "rate must be above 0"),
        ({"interval": -1}, "interval must be at least 0"),
    ]:
        with pytest.raises(ConfigError, match=said):
            OnlineDraft(replay=path, **options)


def test_soft_labels_are_those_of_the_target() -> None:
    """The gradient of the loss at a row is q - p."""
    logits = torch.randn(1, VOCAB, requires_grad=True)
    p = F.softmax(torch.randn(1, VOCAB), -1)
    from forerun.training.losses import TopK, forward_kl

    ids = torch.arange(VOCAB)[None]
    forward_kl(logits, TopK(ids, p.log(), torch.full((1,), -20.0))).backward()
    assert torch.allclose(logits.grad, F.softmax(logits, -1).detach() - p, atol=1e-5)
