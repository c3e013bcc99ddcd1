"""The runner's accounts: what is computed, what is shared, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import branching, error, expected, forward, prompt, saved, sequence, worst

from forerun.core.forward_batch import ForwardBatch
from forerun.core.tree import EMPTY, Tree, TreeBuilder, chain
from forerun.errors import CapacityError
from forerun.models.load import load_target
from forerun.runner.attention import Masks, Span, lowest
from forerun.runner.forward_batch import Work, lay_out
from forerun.runner.model_runner import CHUNK, ModelRunner
from forerun.runner.native import kernels

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return saved("llama", folder, max_position_embeddings=2048)


@pytest.fixture
def runner(model: Any, folder: Path) -> ModelRunner:
    target = load_target(folder)
    assert isinstance(target, ModelRunner)
    return target


def test_trajectories_of_one_prompt_cost_one_prefill(model: Any, runner: ModelRunner) -> None:
    seqs = [sequence(prompt(40)) for _ in range(5)]
    outputs = forward(runner, seqs, [EMPTY] * 5)
    assert runner.num_rows == 39 + 1
    assert all(worst(model, s, EMPTY, r) < TOLERANCE for s, r in zip(seqs, outputs, strict=True))
    for k, seq in enumerate(seqs):
        seq.tokens += [50 + k]
        runner.release(seq)
    late = sequence(prompt(40))
    assert worst(model, late, EMPTY, forward(runner, [late], [EMPTY])[0]) < TOLERANCE
    assert runner.num_rows == 39 + 1 + 1, "a later one finds the prompt in a free slot"


def test_what_samples_have_in_common_is_computed_once(model: Any, runner: ModelRunner) -> None:
    seqs, other = [sequence(prompt(40)) for _ in range(4)], sequence([9, *prompt(40)[1:]])
    draft = branching()
    size = len(draft)
    rounds = [  # tokens that each says, the trees of the next pass, its rows, whose rows all take
        (((), (), (), (), ()), [EMPTY] * 5, 39 + 1 + 39 + 1, "0000."),  # one ends as the others do
        (((7,), (7,), (7,), (8,), (7,)), [EMPTY] * 5, 3, "000.."),
        (((6,), (6,), (6,), (6,), (6,)), [draft, draft, EMPTY, EMPTY, EMPTY], 3 + size, "000.."),
        (((5,), (5,), (5,), (5,), (5,)), [chain([4]), chain([3]), EMPTY, EMPTY, EMPTY], 6, "0.0.."),
        (((4,), (4,), (4,), (4,), (4,)), [EMPTY] * 5, 4, "0.0.."),  # who has a slot keeps it
        (((2, 3), (2, 3), (3, 3), (3,), (3,)), [EMPTY] * 5, 2 + 2 + 2 + 1 + 1, "....."),
    ]
    for said, trees, count, leads in rounds:
        for seq, tokens in zip((*seqs, other), said, strict=True):
            seq.tokens += tokens
        before = runner.num_rows
        outputs = forward(runner, (*seqs, other), trees)
        for i, (seq, tree, rows) in enumerate(zip((*seqs, other), trees, outputs, strict=True)):
            assert len(rows.logits) == 1 + len(tree)
            assert worst(model, seq, tree, rows) < TOLERANCE
            lead = None if leads[i] in f".{i}" else int(leads[i])
            assert rows.lead == lead
            assert runner.cache.holds(seq) == (lead is None)
        assert (runner.num_rows - before, runner.num_held) == (count, 5)
    assert [runner.reused(seq) for seq in seqs] == [0, 39, 39, 39], "of the prompt, never more"


def test_samples_of_a_short_prompt_are_one_pass(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, run = list[int](), runner.run

    def counted(works: list[Work], needs: frozenset[str]) -> Any:
        passes.append(len(works))
        return run(works, needs)

    monkeypatch.setattr(runner, "run", counted)
    forward(runner, [sequence(prompt(40)) for _ in range(5)], [EMPTY] * 5)
    assert passes == [1]


def test_who_follows_keeps_a_place(runner: ModelRunner) -> None:
    """It may need a slot at any step; until its rows were computed it has found nothing."""
    seqs, long = [sequence(prompt(40)) for _ in range(3)], sequence(prompt(3000))
    with pytest.raises(CapacityError):
        forward(runner, [long, *seqs], [EMPTY] * 4)
    assert [runner.reused(seq) for seq in seqs] == [0, 0, 0]
    forward(runner, seqs[1:], [EMPTY] * 2)
    forward(runner, seqs, [EMPTY] * 3)
    assert [runner.reused(seq) for seq in seqs] == [40, 0, 39]
    held = []
    for seq in seqs:
        held.append(runner.num_held)
        runner.release(seq)
    assert [*held, runner.num_held] == [3, 2, 1, 0]


def test_who_ends_leaves_its_cells_to_who_goes_on(runner: ModelRunner) -> None:
    first, second = sequence(prompt(40)), sequence(prompt(40))
    forward(runner, [first, second], [EMPTY] * 2)
    first.tokens += [2]
    second.tokens += [3]
    runner.release(first)
    forward(runner, [second], [EMPTY])
    assert runner.num_rows == 39 + 1 + 1
    assert len(runner.cache.slots) == 1


def test_one_after_another_shares_the_prompt_too(runner: ModelRunner) -> None:
    for k in range(3):
        seq = sequence(prompt(30))
        forward(runner, [seq], [chain([4, 5, 6])])
        seq.tokens += [4, 9]
        forward(runner, [seq], [EMPTY])
        runner.release(seq)
        assert runner.num_rows == 29 + (k + 1) * (1 + 3 + 1)


def test_what_was_not_read_of_a_text_is_known(runner: ModelRunner) -> None:
    seq, other = sequence(prompt(40)), sequence(prompt(40) + [9, 9])
    assert runner.num_unread(seq) == 40
    forward(runner, [seq], [EMPTY])
    assert runner.num_unread(seq) == 0
    assert runner.num_unread(other) == 42, "a seed draws the same whoever was here before"
    seq.tokens += [5] * 7
    assert runner.num_unread(seq) == 7


def test_equal_siblings_and_nodes_are_interchangeable(model: Any, runner: ModelRunner) -> None:
    builder = TreeBuilder()  # independent draws may meet: the same token twice below one node
    for token, parent in ((7, -1), (7, -1), (8, 0), (9, 1), (9, 0)):
        builder.add(token, parent)
    seq, tree = sequence(prompt(12)), builder.build()
    assert worst(model, seq, tree, forward(runner, [seq], [tree])[0]) < TOLERANCE
    seq.tokens += [7, 9, 3]
    assert worst(model, seq, tree, forward(runner, [seq], [tree])[0]) < TOLERANCE


def test_the_same_tokens_may_be_asked_again(model: Any, runner: ModelRunner) -> None:
    seq = sequence(prompt(12))
    for tree in (branching(1), branching(2), EMPTY):
        assert worst(model, seq, tree, forward(runner, [seq], [tree])[0]) < TOLERANCE


def test_paths_grow_level_by_level(model: Any, runner: ModelRunner) -> None:
    seq = sequence(prompt(10))
    levels = [[()], [(7,), (8,), (7,)], [(7, 9), (8, 9), (7, 4)], [(7, 9, 3), (8, 9, 3), (7, 9)]]
    computed = [10, 2, 3, 2]
    for paths, count in zip(levels, computed, strict=True):
        before = runner.num_rows
        rows = runner.rows_at([(seq, path) for path in paths])
        for path, row in zip(paths, rows, strict=True):
            assert error(row, expected(model, [*seq.tokens, *path])[-1]) < TOLERANCE
        assert runner.num_rows - before == count, "only what is new is computed"
    assert runner.memory_report()["scratch"] > 0
    seq.tokens += [8, 9, 5]  # what a target accepted is found again
    before = runner.num_rows
    row = runner.rows_at([(seq, ())])[0]
    assert error(row, expected(model, seq.tokens)[-1]) < TOLERANCE
    assert runner.num_rows - before == 1


def test_rows_read_in_place_are_those_of_their_sequence(model: Any, runner: ModelRunner) -> None:
    seqs, trees = [sequence(prompt(n)) for n in (20, 4, 11)], [branching(), EMPTY, chain([4, 5])]
    found = runner.forward(ForwardBatch(seqs, trees))
    assert len({id(rows.row(-1).base) for rows in found}) == 1, "nothing is copied"
    for rows, seq, tree in zip(found, seqs, trees, strict=True):
        assert len(rows.logits) == 1 + len(tree)
        assert error(torch.from_numpy(rows.row(-1)), expected(model, seq.tokens)[-1]) < TOLERANCE
        for node in range(-1, len(tree)):
            assert np.array_equal(rows.row(node), rows.logits[node + 1].numpy())
        fewer = rows.split(0)  # all nodes are probes
        assert np.array_equal(fewer.row(-1), rows.row(-1))
        assert fewer is rows or np.array_equal(fewer.probe(0), rows.row(0))


def test_paths_of_a_batch(model: Any, runner: ModelRunner) -> None:
    seqs = [sequence(prompt(n)) for n in (20, 4, 11)]
    for paths in ([()], [(3,), (4, 5)], [(4, 5, 6), (9,)]):
        requests = [(seq, path) for path in paths for seq in seqs]
        for (seq, path), row in zip(requests, runner.rows_at(requests), strict=True):
            assert error(row, expected(model, [*seq.tokens, *path])[-1]) < TOLERANCE


def test_paths_after_a_tree_pass(model: Any, runner: ModelRunner) -> None:
    seq = sequence(prompt(10))
    forward(runner, [seq], [branching()])
    for path in ((), tuple(branching().path(6))):
        row = runner.rows_at([(seq, path)])[0]
        assert error(row, expected(model, [*seq.tokens, *path])[-1]) < TOLERANCE


def test_hidden_rows_come_when_asked(model: Any, runner: ModelRunner) -> None:
    seq = sequence(prompt(10))
    assert forward(runner, [seq], [EMPTY])[0].hidden is None
    seqs = [seq, sequence(prompt(5))]
    for rows in runner.forward(ForwardBatch(seqs, [branching(), EMPTY], frozenset({"hidden"}))):
        assert rows.hidden is not None
        with torch.inference_mode():
            assert error(model.lm_head(rows.hidden), rows.logits) < TOLERANCE


def test_long_prompts_are_prefilled_in_chunks(model: Any, runner: ModelRunner) -> None:
    seq = sequence(prompt(CHUNK + 30))
    assert worst(model, seq, EMPTY, forward(runner, [seq], [EMPTY])[0]) < TOLERANCE


def test_many_steps_in_a_batch_that_changes(model: Any, runner: ModelRunner) -> None:
    running = [sequence(prompt(9 + k)) for k in range(3)]
    for step in range(6):
        trees: list[Tree] = [branching(step + k) if k % 2 else EMPTY for k in range(len(running))]
        for k, rows in enumerate(forward(runner, running, trees)):
            assert worst(model, running[k], trees[k], rows) < TOLERANCE
            running[k].tokens += [*(trees[k].path(5) if len(trees[k]) else []), step + 3]
        if step == 2:  # one leaves, two join
            runner.release(running.pop(0))
            running += [sequence(prompt(14)), sequence(prompt(10))]


def test_cells_are_laid_out_as_the_tree_says() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        num, total = int(rng.integers(0, 4)), int(rng.integers(0, 12))
        tree = TreeBuilder()
        for node in range(total):
            tree.add(node, int(rng.integers(-1, node)) if node else -1)
        made = tree.build()
        places, sees = np.empty(num + total, np.int64), np.empty((num + total, num + total), bool)
        lay_out(7, num, made.parents, places, sees)
        assert places.tolist() == [*range(7, 7 + num), *(6 + num + made.depths).tolist()]
        want = np.tri(num + total, dtype=bool)  # each pending token sees those before it
        want[num:, num:] = made.ancestors
        assert np.array_equal(sees, want)


def test_what_exceeds_the_context_is_refused(folder: Path, model: Any) -> None:
    runner = load_target(folder, context=16)
    with pytest.raises(CapacityError, match="17 tokens, but the context is 16"):
        forward(runner, [sequence(prompt(17))], [EMPTY])
    with pytest.raises(CapacityError, match="15 tokens and a tree of depth 3"):
        forward(runner, [sequence(prompt(15))], [branching()])
    seq = sequence(prompt(13))
    assert worst(model, seq, branching(), forward(runner, [seq], [branching()])[0]) < TOLERANCE


def test_a_failed_pass_leaves_right_state(
    model: Any, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    seq = sequence(prompt(10))
    forward(runner, [seq], [branching()])
    seq.tokens += [*branching().path(6), 7]
    with monkeypatch.context() as patched:
        patched.setattr("forerun.runner.kv_cache.available_bytes", lambda device: 0)
        long = sequence(prompt(400))
        with pytest.raises(CapacityError, match="use fewer sequences"):
            forward(runner, [seq, long], [branching(), EMPTY])
    for rows, s, t in zip(
        forward(runner, [seq, long], [branching(), EMPTY]),
        [seq, long],
        [branching(), EMPTY],
        strict=True,
    ):
        assert worst(model, s, t, rows) < TOLERANCE


def test_too_many_sequences_are_refused(folder: Path, model: Any) -> None:
    runner = load_target(folder, max_seqs=2)
    seqs = [sequence(prompt(5 + n)) for n in range(3)]
    with pytest.raises(CapacityError, match="max_seqs"):
        forward(runner, seqs, [EMPTY] * 3)


def test_memory_report(runner: ModelRunner, model: Any) -> None:
    forward(runner, [sequence(prompt(5))], [EMPTY])
    report = runner.memory_report()
    size = sum(p.numel() for p in model.parameters()) * 4
    assert report["weights"] >= size  # packed weights are padded
    head = 16 if kernels() else 12  # as the kernels want it
    assert report["kv cache"] == 3 * 256 * 2 * 2 * head * 4
    assert report["scratch"] == runner.decode.nbytes > 0
    runner.rows_at([(sequence(prompt(5)), ())])
    assert runner.memory_report()["scratch"] > runner.decode.nbytes


def plain_mask(span: Span, low: int, stop: int, window: int | None) -> np.ndarray:
    """Visibility of the cells [low, stop) row by row, from its definition."""
    sees = np.zeros((span.num_rows, stop - low), dtype=bool)
    for row, place in enumerate(span.positions):
        for cell in range(low, span.stop):
            own = cell - span.base
            if own < 0:
                seen, at = True, cell
            else:
                at = span.places[own]
                seen = cell <= span.start + row if span.sees is None else span.sees[row, own]
            sees[row, cell - low] = seen and (window is None or place - at < window)
    return sees


def some_span(rng: np.random.Generator) -> Span:
    """Pending tokens, or a tree, or new nodes below older ones."""
    base, num, kind = int(rng.integers(0, 40)), int(rng.integers(1, 7)), rng.integers(0, 3)
    if kind == 0:
        return Span(0, base, np.arange(base, base + num), num)
    old = int(rng.integers(0, 5)) if kind == 2 else 0
    sees = np.tril(rng.random((old + num, old + num)) < 0.5) | np.eye(old + num, dtype=bool)
    places = base + np.minimum(rng.integers(0, 6, old + num), np.arange(old + num))
    return Span(0, base, places, num, sees[old:])


def test_masks_that_persist_equal_their_definition() -> None:
    rng, masks, fold = np.random.default_rng(0), Masks(torch.float32, torch.device("cpu")), 2
    for i in range(150):
        masks.clear()
        bases = rng.integers(0, 40, rng.integers(1, 4)).tolist()
        single = [Span(0, base, np.array([base]), 1) for base in bases]  # plain decoding
        spans = single if i % 3 == 0 else [some_span(rng) for _ in bases]
        stop = max(span.stop for span in spans)
        made = []
        for window in (None, int(rng.integers(1, 12)), 1000):
            low = lowest(spans, window)
            made.append((low, window, masks.make(spans, fold, low, stop, window)))
        for low, window, mask in made:
            assert set(mask.unique().tolist()) <= {0.0, -torch.inf}
            parts = (mask == 0).view(len(spans), fold, -1, stop - low)
            for span, part in zip(spans, parts, strict=True):
                want = torch.from_numpy(plain_mask(span, low, stop, window))
                for copy in part:
                    assert torch.equal(copy[: span.num_rows], want)
                    assert copy[span.num_rows :].any(-1).all(), "no division by zero in padding"


@pytest.mark.parametrize("case", ["gemma2", "gemma3_text", "mistral", "qwen3_moe-sparse"])
def test_windows_stay_right_over_many_passes(case: str, tmp_path: Path) -> None:
    model = saved(case, tmp_path)
    runner = load_target(tmp_path)
    running = [sequence(prompt(n)) for n in (3, 12, 30)]
    for step in range(5):
        trees = [branching(step), EMPTY, branching(step + 1) if step % 2 else EMPTY]
        for seq, tree, rows in zip(running, trees, forward(runner, running, trees), strict=True):
            assert worst(model, seq, tree, rows) < TOLERANCE
            seq.tokens += [*(tree.path(5) if len(tree) else []), step + 3]
        paths = [(seq, path) for seq in running for path in ((7,), (8, 9), (8, 9, 4, 5))]
        for (seq, path), row in zip(paths, runner.rows_at(paths), strict=True):  # type: ignore[attr-defined]
            assert error(row, expected(model, [*seq.tokens, *path])[-1]) < TOLERANCE


def test_siblings_known_before_and_new_ones_mix(model: Any, runner: ModelRunner) -> None:
    seq = sequence(prompt(10))
    forward(runner, [seq], [EMPTY])
    many = [(n,) for n in range(20)]
    for paths in (many, [(3, n) for n in range(9)] + many, [(3, 4, 5), (7,), (3, 4)]):
        for path, row in zip(paths, runner.rows_at([(seq, p) for p in paths]), strict=True):
            assert error(row, expected(model, [*seq.tokens, *path])[-1]) < TOLERANCE
