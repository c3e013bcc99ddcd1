"""OmniDraft's losses: values by hand, gradients in closed form, positions of real tokenizers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import make_tokenizer

from fakes import sequence
from forerun.core.dice import SeededDice
from forerun.drafters._translation import Translation
from forerun.models.tokenizer import Tokenizer
from forerun.training.losses import TopK
from forerun.training.online.corrections import OpenRequest
from forerun.training.online.cross_vocab_losses import hybrid_loss, mapped_kl, run_logq
from forerun.training.online.translated import Translated, TranslatedEpisode, draft_runs

MAPPED = torch.tensor([0, 2, 3])  # of five draft tokens
TEXTS = "the cat sat on the log", "ten nine — naïve 日本 eight", " the rain\n\none two", "xyzzy"


def restricted(student: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(student[:, MAPPED], -1)


@pytest.fixture
def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the draft [4, 5], and of the target over the mapped tokens [4, 3]."""
    torch.manual_seed(3)
    return torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)


def test_the_direct_loss_is_the_reverse_kl_of_the_mapped_tokens(rows) -> None:
    student, teacher = rows
    logq, logp = restricted(student), F.log_softmax(teacher, -1)
    expected = (logq.exp() * (logq - logp)).sum(-1).mean()
    assert float(mapped_kl(student, teacher, MAPPED)) == pytest.approx(float(expected))
    moved = student.clone()
    moved[:, [1, 4]] += 7.0  # tokens without a counterpart have no influence
    assert float(mapped_kl(moved, teacher, MAPPED)) == pytest.approx(float(expected))
    assert float(mapped_kl(student, student[:, MAPPED], MAPPED)) == pytest.approx(0.0, abs=1e-12)


def test_the_gradient_of_the_direct_loss(rows) -> None:
    """d KL / d z_v = q(v) (log q(v) / p(v) - KL) at mapped tokens, 0 at others."""
    student, teacher = rows
    student.requires_grad_(True)
    mapped_kl(student, teacher, MAPPED).backward()
    logq, logp = restricted(student.detach()), F.log_softmax(teacher, -1)
    kl = (logq.exp() * (logq - logp)).sum(-1, keepdim=True)
    expected = torch.zeros_like(student)
    expected[:, MAPPED] = logq.exp() * (logq - logp - kl) / len(student)
    torch.testing.assert_close(student.grad, expected)


def hybrid(student: torch.Tensor, teacher: torch.Tensor, weights: list[float]) -> torch.Tensor:
    """Three positions: direct, an n-gram of two, direct; of the four rows of the student."""
    return hybrid_loss(
        student,
        torch.tensor([0, 4, 1, 3]),
        torch.tensor([0, 1, 1, 2]),
        torch.tensor([True, False, True]),
        teacher[[0, 3]],
        MAPPED,
        torch.tensor(weights),
    )


def test_the_hybrid_loss_is_a_mean_over_positions(rows) -> None:
    student, teacher = rows
    direct = mapped_kl(student[[0, 3]], teacher[[0, 3]], MAPPED) * 2
    ngram = F.cross_entropy(student[[1, 2]], torch.tensor([4, 1]), reduction="sum")
    for w in (0.0, 0.2, 1.0):
        found = hybrid(student, teacher, [9.0, w, 9.0])  # weights of direct positions are ignored
        assert float(found) == pytest.approx(float((direct + w * ngram) / 3))


def test_the_gradient_of_an_ngram_is_that_of_its_draft_tokens(rows) -> None:
    student, teacher = rows
    student.requires_grad_(True)
    hybrid(student, teacher, [0.0, 0.6, 0.0]).backward()
    labels = F.one_hot(torch.tensor([4, 1]), 5)
    expected = 0.6 / 3 * (F.softmax(student.detach()[[1, 2]], -1) - labels)
    torch.testing.assert_close(student.grad[[1, 2]], expected)
    assert bool((student.grad[[0, 3]][:, MAPPED] != 0).all())


def test_positions_of_one_kind_and_stored_rows(rows) -> None:
    """No direct position, no n-gram, and a teacher with its top k: all finite with gradients."""
    student, teacher = rows
    logp = F.log_softmax(teacher, -1)
    stored = TopK(torch.arange(3).expand(4, 3), logp, torch.full((4,), -30.0))
    assert float(mapped_kl(student, stored, MAPPED)) == pytest.approx(
        float(mapped_kl(student, teacher, MAPPED))
    )
    labels, order = torch.tensor([0, 1, 2, 3]), torch.arange(4)
    for is_direct, rows_of in ((True, teacher), (False, teacher[:0])):
        own = student.clone().requires_grad_(True)
        kinds = torch.full((4,), is_direct)
        hybrid_loss(own, labels, order, kinds, rows_of, MAPPED, torch.ones(4)).backward()
        assert bool(own.grad.isfinite().all()) and float(own.grad.abs().sum()) > 0


def test_the_probability_of_a_run_is_the_product(rows) -> None:
    student, _ = rows
    found = run_logq(student, torch.tensor([0, 4, 1, 3]), torch.tensor([0, 1, 1, 2]), 3)
    q = F.softmax(student, -1)
    expected = torch.stack([q[0, 0], q[1, 4] * q[2, 1], q[3, 3]])
    torch.testing.assert_close(found.exp(), expected)


@pytest.fixture(scope="module")
def translation(tmp_path_factory: pytest.TempPathFactory) -> Translation:
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, vocab in (("draft", 262), ("target", 320)):
        make_tokenizer(folder / name, vocab)
    ours, theirs = Tokenizer.load(folder / "target"), Tokenizer.load(folder / "draft")
    return Translation(ours, theirs, ours.vocab_size, theirs.vocab_size)


@pytest.mark.parametrize("text", TEXTS)
def test_runs_have_the_bytes_of_their_target_tokens(translation: Translation, text: str) -> None:
    encode = translation.to_target.encode
    tokens = [*encode(text.encode()), 0]  # the end of a text maps by its role
    ids, found = draft_runs(translation, tokens)
    assert len(found) >= len(tokens) - 2 and len(tokens) - 1 in found
    for i, (start, run) in found.items():
        assert tuple(ids[start : start + len(run)]) == run and start > 0
        pieces = [translation.to_target.piece(draft) or b"" for draft in run]
        assert b"".join(pieces) == (translation.to_draft.piece(tokens[i]) or b"")
        before = b"".join(translation.to_target.piece(draft) or b"" for draft in ids[:start])
        assert before == b"".join(translation.to_draft.piece(t) or b"" for t in tokens[:i])


def test_a_position_within_a_draft_token_is_left_out(translation: Translation) -> None:
    """Bytes that the draft merges: it has no distribution between them."""
    pieces = translation.to_target.source.pieces
    merged = next(i for i, p in enumerate(pieces) if p and len(p) == 2 and p.isalpha())
    letters = [translation.to_target.encode(bytes([byte]))[0] for byte in pieces[merged] or b""]
    space = translation.to_target.encode(b"!")[0]
    ids, found = draft_runs(translation, [space, *letters])
    if merged in ids:
        assert 1 not in found and 2 not in found
    assert translation.run_of(letters[0]) == (translation.map.source_of(letters[0]),)


def test_positions_of_steps_that_were_not_recorded_are_missing(translation: Translation) -> None:
    """The others are those of the request that was recorded whole."""
    tokens = translation.to_target.encode(TEXTS[1].encode())
    rows = np.random.default_rng(0).normal(size=(len(tokens), 320)).astype(np.float32)
    options: dict[str, Any] = {"vocab_size": 262, "top_k": 4}
    listen = Translated(lambda: translation, lambda seq: "all", lambda *given: None, **options)
    seq = sequence(tokens, 1, SeededDice(0))

    def positions(recorded: list[int]) -> dict[int, tuple[Any, ...]]:
        """Labels, p(t) and kind of each position, by the draft row that it begins at."""
        tops = [listen.stored(rows[row], tokens[row + 1]) for row in recorded]
        episode = listen.episode(OpenRequest("all", False, rows=recorded, tops=tops), seq)
        assert isinstance(episode, TranslatedEpisode)
        assert len(episode.ids) == len(episode.tail) == episode.is_direct.sum()
        found = {}
        for i, p in enumerate(episode.p):
            own = episode.position == i
            found[episode.rows[own][0]] = (*episode.labels[own], p, episode.is_direct[i])
        return found

    rest = list(range(len(tokens) - 1))
    whole, some = positions(rest), positions(rest[::3])
    assert 3 <= len(some) < len(whole) and some.items() <= whole.items()
