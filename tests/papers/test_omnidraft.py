"""OmniDraft (arXiv 2507.02659): n-grams of draft tokens reach target tokens that no one has alone.

A made pair with different BPE tokenizers of the same text: the target merges far more, and both
models know the text almost by heart, so a draft fails where its tokens cannot be translated. The
paper's claims: direct mapping alone stops at every merged token; the n-gram cache recovers most of
it; the cache grows with the texts and serves later ones. The siblings (TLI, SLEM) run on the same
pair. Laws: tests/laws/test_cross_vocab.py.

Distillation: random llama checkpoints with these tokenizers; the draft learns along a stream, its
KL to the target falls on the stream's texts and acceptance rises, while a frozen draft's does not.
On the workbench models (slow): the arms of benchmarks/drafts/omnidraft.py.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence as Many
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import TEXT, make_tiny, tokenizer_pair
from two_vocabularies import LetterRunner

import forerun
from fakes import FakeTarget, sequence
from forerun import registry
from forerun.controllers.acceptance_head import AcceptanceHead as HeadController
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.records import Step
from forerun.core.sampling import Sampling
from forerun.drafters.cross_vocab import CrossVocab
from forerun.drafters.online import ONE_CLASS, Online
from forerun.engine.engine import Engine
from forerun.errors import ConfigError, DataError
from forerun.models.draft_link import ForeignDraft
from forerun.models.tokenizer import Tokenizer
from forerun.training.online.cross_vocab_losses import mapped_kl
from forerun.training.online.learner import Learner, OnlineLearner, OnlineOptions, draft_module
from forerun.training.online.objectives import teacher_of
from forerun.training.online.replay import Labels, Replay, ReplaySettings, read_traffic
from forerun.training.online.translated import TranslatedEpisode, objective_for
from forerun.training.recipes.acceptance_head import AcceptanceHead
from forerun.training.recipes.online import RESULTS, OnlineDraft

pytestmark = pytest.mark.paper
WORDS = "".join(TEXT)
SHARP = 0.9  # probability that a model gives the next token of the text


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizers of draft and target."""
    return tokenizer_pair(tmp_path_factory.mktemp("tokenizers"))


def reciting(tokenizer: Tokenizer, sharp: float = SHARP):
    """A law that continues WORDS after the longest known end of a text, in a tokenizer's tokens."""
    size, text = tokenizer.vocab_size, WORDS * 2

    @cache
    def law(last: str) -> np.ndarray:
        row = np.full(size, (1 - sharp) / (size - 1))
        known = next(last[i:] for i in range(len(last) + 1) if last[i:] in text)
        start = text.find(known) + len(known)
        row[tokenizer.encode_inside(text[start:][:24])[0]] = sharp
        return row / row.sum()

    return lambda tokens: law(tokenizer.decode_inside(list(tokens[-24:]))[-12:])


def run(
    drafter: CrossVocab, target: Tokenizer, *, tokens: int = 200, temperature: float = 1.0
) -> tuple[list[Step], list[int]]:
    """The steps of one text, and its tokens."""
    steps = list[Step]()
    engine = Engine(
        FakeTarget(reciting(target), target.vocab_size),
        drafter,
        registry.make("verifier", "speculative"),
        Fixed(nodes=4, depth=4),
        listeners=[steps.append],
    )
    prompt = target.encode(WORDS[:30])
    seq = sequence(prompt, tokens, SeededDice(1), Sampling(temperature=temperature))
    engine.submit(seq)
    engine.run()
    return steps, seq.generated


def tau(steps: Many[Step]) -> float:
    return float(np.mean([len(step.emitted[0]) for step in steps]))


def made(
    pair: tuple[Tokenizer, Tokenizer], method: str = "omni", kind: type = CrossVocab
) -> CrossVocab:
    draft, target = pair
    runner = LetterRunner(reciting(draft), draft.vocab_size)
    model = ForeignDraft(runner, draft)  # type: ignore[arg-type]
    return kind(model=model, method=method, tokenizer=target)


class WithoutCache(CrossVocab):
    """Direct mapping only."""

    def _learn(self, seq, tokens) -> None:
        """Nothing is learned."""


def test_ngrams_recover_what_direct_mapping_loses(pair: tuple[Tokenizer, Tokenizer]) -> None:
    """tau of direct mapping, of the growing cache, and of a cache that knows the text."""
    target = pair[1]
    plain = made(pair, kind=WithoutCache)
    direct, _ = run(plain, target)
    omni = made(pair)
    first, _ = run(omni, target)
    later, _ = run(omni, target)
    assert tau(direct) < 0.8 * tau(first)
    assert tau(later) >= tau(first)
    assert tau(later) > 1.5 * tau(direct)


def test_entries_are_the_draft_tokens_of_a_target_token(pair: tuple[Tokenizer, Tokenizer]) -> None:
    draft, target = pair
    omni = made(pair)
    run(omni, target)
    run(omni, target)
    trie = omni.translation.trie("")
    assert len(trie.runs) >= 10
    bytes_of, pieces = target.token_bytes(target.vocab_size), draft.token_bytes(draft.vocab_size)
    for token, ngram in trie.runs.items():
        assert b"".join(pieces[i] or b"" for i in ngram) == bytes_of[token]
        assert len(ngram) >= 2 and omni.translation.map.source_of(token) == -1


def test_drafts_are_the_text_of_the_draft_model(pair: tuple[Tokenizer, Tokenizer]) -> None:
    """Greedy: what is accepted is what the target says, and most of it comes from drafts."""
    target = pair[1]
    expected = run(made(pair, kind=WithoutCache), target, temperature=0)[1]
    for method in ("omni", "tli", "slem"):
        steps, tokens = run(made(pair, method), target, temperature=0)
        assert tokens == expected
    omni = made(pair)
    run(omni, target, temperature=0)
    steps, _ = run(omni, target, temperature=0)
    assert tau(steps) > 4.0  # of at most 5


def test_the_siblings_on_the_same_pair(pair: tuple[Tokenizer, Tokenizer]) -> None:
    """Shared tokens alone stop where direct mapping does; point masses accept p(t) of a token."""
    omni = made(pair)
    run(omni, pair[1])
    found = {"omni": tau(run(omni, pair[1])[0])}
    found |= {name: tau(run(made(pair, name), pair[1])[0]) for name in ("tli", "slem")}
    assert found["omni"] > found["tli"]
    assert found["slem"] > found["tli"]


def test_equal_tokenizers_reduce_to_speculative_sampling(pair: tuple[Tokenizer, Tokenizer]) -> None:
    """Q is the draft's law, token by token."""
    target = pair[1]
    runner = LetterRunner(reciting(target, 0.6), target.vocab_size)
    model = ForeignDraft(runner, target)  # type: ignore[arg-type]
    drafter = CrossVocab(model=model, tokenizer=target)
    steps, _ = run(drafter, target)
    law, checked = reciting(target, 0.6), 0
    for step in steps:
        ((seq, tree),) = zip(step.seqs, step.trees, strict=True)
        text = seq.tokens[: step.start(0)]
        for node in range(len(tree)):
            q = law([*text, *tree.path(node)[:-1]])
            known = tree.lazy[node]._known  # what the verifier asked for
            assert all(known[token] == pytest.approx(q[token]) for token in known if token > 0)
            checked += len(known)
    assert checked > 20


# Distillation: a random target and a random draft with fewer merges

STREAM = 40  # requests


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("checkpoints")
    return make_tiny(place / "target", vocab=320), make_tiny(place / "draft", vocab=262, seed=1)


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stream") / "stream.jsonl"
    lines = [json.dumps({"prompt": WORDS[7 * i % 60 :][:40]}) for i in range(STREAM)]
    path.write_text("\n".join(lines))
    return path


def distilled(
    checkpoints: tuple[Path, Path], stream: Path, out: Path, watch: Any = None, **options: Any
) -> Any:
    """Rows of a replay, and the folder of the trained draft."""
    target, draft = map(str, checkpoints)
    resume = options.pop("resume", False)
    made = {"interval": 2, "rate": 1e-2, "max_tokens": 24, "hold_every": 0} | options
    recipe = OnlineDraft(replay=stream, model=target, draft=draft, **made)
    recipe.train(out, resume=resume, **({} if watch is None else {"watch": watch}))
    rows = [json.loads(line) for line in (out / RESULTS).read_text().splitlines()]
    return SimpleNamespace(rows=rows, folder=out / ONE_CLASS)


@pytest.fixture(scope="module")
def learned(checkpoints, stream, tmp_path_factory) -> Any:
    return distilled(checkpoints, stream, tmp_path_factory.mktemp("learned") / "out")


@pytest.fixture(scope="module")
def frozen(checkpoints, stream, tmp_path_factory) -> Any:
    """The same stream with the first draft; also its positions."""
    model = forerun.load(str(checkpoints[0]), max_seqs=1)
    draft = str(checkpoints[1])
    drafter = Online(model=draft, tokenizer=model.tokenizer, target=model.target)
    drafter.router = Labels([ONE_CLASS])
    drafter.bind(model.target)
    options = OnlineOptions(hold_every=0, buffer_tokens=10**9)
    how = drafter.class_of, lambda kind, stats: None, objective_for(drafter, options)
    learner = OnlineLearner(draft_module(draft), options, *how)
    settings = ReplaySettings(max_tokens=24, learns=False)
    replay = Replay(model, drafter, learner, read_traffic(stream, STREAM), settings)
    replay.run(tmp_path_factory.mktemp("frozen") / "online.pt")
    episodes = learner.buffer(ONE_CLASS).episodes()
    return SimpleNamespace(rows=replay.rows, episodes=episodes, learner=learner, drafter=drafter)


def alpha(rows: list[dict[str, Any]]) -> float:
    """Acceptance over all tried positions."""
    return sum(row["overlap"] for row in rows) / sum(row["tried"] for row in rows)


def kl_of(frozen: Any, folder: Path) -> tuple[float, float]:
    """Mean L_DM and mean -log q of an n-gram, on the texts of the frozen stream."""
    learner = Learner(draft_module(str(folder)), frozen.learner.options, frozen.learner.objective)
    mapped = torch.from_numpy(frozen.drafter.translation.map.shared)
    direct, ngrams = list[float](), list[float]()
    for episode in frozen.episodes:
        assert isinstance(episode, TranslatedEpisode)
        with torch.no_grad():
            logits = learner._logits(episode)
        is_direct = torch.from_numpy(episode.is_direct[episode.position])
        direct.append(float(mapped_kl(logits[is_direct], teacher_of(episode), mapped)))
        labels = torch.from_numpy(episode.labels)[:, None]
        ngrams += (-logits.log_softmax(-1).gather(-1, labels)[~is_direct]).flatten().tolist()
    return float(np.mean(direct)), float(np.mean(ngrams))


def test_distillation_lowers_the_kl_on_the_stream(checkpoints, frozen, learned) -> None:
    """Of direct tokens to the target, and the surprise of n-grams."""
    before, after = kl_of(frozen, checkpoints[1]), kl_of(frozen, learned.folder)
    assert after[0] < 0.9 * before[0] and after[1] < 0.7 * before[1], (before, after)


def test_acceptance_rises_along_the_stream_and_not_with_a_frozen_draft(frozen, learned) -> None:
    late = slice(STREAM // 2, None)
    assert {row["version"] for row in frozen.rows} == {0}
    assert learned.rows[-1]["version"] >= STREAM // 2 - 1
    assert alpha(learned.rows[late]) > 1.2 * alpha(frozen.rows[late])


def test_each_part_of_the_loss_teaches_its_positions(checkpoints, stream, frozen, tmp_path) -> None:
    """Without the n-gram loss n-grams stay as unlikely as they were, or become more so."""
    direct = distilled(checkpoints, stream, tmp_path / "direct", ngram_weight=0)
    strong = distilled(checkpoints, stream, tmp_path / "strong", ngram_weight=1)
    by_target = distilled(checkpoints, stream, tmp_path / "p", ngram_by_target=True)
    _, without = kl_of(frozen, direct.folder)
    for arm in (strong, by_target):
        assert kl_of(frozen, arm.folder)[1] < without


def test_positions_hold_the_laws_of_the_target(checkpoints, frozen) -> None:
    """Stored rows and p(t) against a pass of the target over the whole text."""
    target, translation = draft_module(str(checkpoints[0])), frozen.drafter.translation
    tokenizer = Tokenizer.load(checkpoints[1])
    ours = Tokenizer.load(checkpoints[0])
    checked = 0
    for episode in frozen.episodes[:6]:
        before = tokenizer.decode_inside(episode.tokens[: episode.rows[0] + 1].tolist())
        prompt = torch.tensor([ours.encode(before)])
        with torch.no_grad():
            logp = target(input_ids=prompt).logits[0, -1].log_softmax(-1)
        token = next(
            t
            for t in range(320)
            if translation.run_of(t) == tuple(episode.labels[episode.position == 0])
        )
        if not episode.is_direct[0] or ours.decode_inside(prompt[0].tolist()) != before:
            continue
        assert float(episode.p[0]) == pytest.approx(float(logp[token].exp()), abs=1e-3)
        goals = translation.map.forward[translation.map.shared[episode.ids[0]]]
        kept = logp[torch.from_numpy(translation.map.forward[translation.map.shared])]
        expected = logp[torch.from_numpy(goals)] - kept.logsumexp(-1)
        torch.testing.assert_close(
            torch.from_numpy(episode.logp[0]), expected, atol=1e-2, rtol=1e-2
        )
        checked += 1
    assert checked


def test_an_interrupted_stream_goes_on_as_if_it_had_not_been(
    checkpoints, stream, learned, tmp_path
) -> None:
    def stop(title: str, share: float, note: str) -> None:
        if share >= 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distilled(checkpoints, stream, tmp_path / "out", watch=stop)
    with pytest.raises(ConfigError, match="continue it with --resume"):
        distilled(checkpoints, stream, tmp_path / "out")
    again = distilled(checkpoints, stream, tmp_path / "out", resume=True)
    assert again.rows == learned.rows
    for one, two in zip(
        draft_module(str(again.folder)).parameters(),
        draft_module(str(learned.folder)).parameters(),
        strict=True,
    ):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)


def test_a_changed_stream_is_refused(checkpoints, stream, tmp_path) -> None:
    path = tmp_path / "stream.jsonl"
    path.write_text(stream.read_text())
    distilled(checkpoints, path, tmp_path / "out", num_requests=4)
    with pytest.raises(DataError, match="learned from 4 requests, and there are only 2 now"):
        distilled(checkpoints, path, tmp_path / "out", num_requests=2, resume=True)
    path.write_text(stream.read_text().replace("the ", "a "))
    with pytest.raises(DataError, match="the first 4 requests of the traffic are not those"):
        distilled(checkpoints, path, tmp_path / "out", num_requests=6, resume=True)


def test_a_loss_for_equal_tokenizers_is_refused(checkpoints, stream, tmp_path) -> None:
    for options, said in [({"loss": "rkl"}, "loss rkl needs"), ({"compat": True}, "compat needs")]:
        with pytest.raises(ConfigError, match=said):
            distilled(checkpoints, stream, tmp_path / said[:4], **options)


def test_the_trained_draft_is_an_ordinary_checkpoint(checkpoints, learned) -> None:
    """It drafts for the target, with its own tokenizer; greedy texts are those of the target."""
    model = forerun.load(str(checkpoints[0]), dtype="fp32")
    how = {"temperature": 0, "max_new_tokens": 24}
    plain = model.generate([WORDS[:30]], drafter="none", **how)[0]
    found = model.generate([WORDS[:30]], drafter=f"cross_vocab:model={learned.folder}", **how)[0]
    assert found.text == plain.text and found.stats.drafted > 0
    assert Tokenizer.load(learned.folder).vocab_size == 262


# The adaptive length head


def test_a_head_learns_which_target_tokens_are_accepted(
    checkpoints, stream, learned, tmp_path
) -> None:
    target, draft = str(checkpoints[0]), str(learned.folder)
    options = {"problems": STREAM, "max_tokens": 64, "batch": 8, "layers": 1, "temperature": 1.0}
    options |= {"weight": 1.0, "rate": 1e-2, "max_steps": 400, "micro_tokens": 512}
    recipe = AcceptanceHead(target=target, draft=draft, prompts=stream, **options)
    recipe.train(tmp_path / "head")
    labels = recipe.scored.labels
    assert len(labels) > 50 and 0 <= float(labels.min()) < float(labels.max()) <= 1
    scores = recipe.head(recipe.scored.hidden)[:, 1].exp().detach()
    assert np.corrcoef(scores.numpy(), labels.numpy())[0, 1] > 0.2
    model = forerun.load(target, dtype="fp32")
    lengths = {}
    for threshold in (0.3, 0.9):
        how = {"drafter": f"cross_vocab:model={draft}", "max_new_tokens": 40, "seed": 1}
        plan = HeadController(head=str(tmp_path / "head"), threshold=threshold, least=1)
        (found,) = model.generate([WORDS[:30]], controller=plan, **how)
        lengths[threshold] = found.stats.drafted / found.stats.passes
    assert lengths[0.3] < lengths[0.9]


# The workbench models


WORKBENCH = Path(__file__).parents[1] / "assets" / "workbench"


@pytest.fixture
def run_arms(monkeypatch: pytest.MonkeyPatch, data_dir: Path, tmp_path: Path) -> Any:
    """Figures of all arms by name, after a stream and on other texts."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    module = importlib.import_module("drafts.omnidraft")
    bench = importlib.import_module("drafts.common").Bench(tmp_path, data_dir, WORKBENCH)

    def arms(stream: int, texts: int, noise: float) -> dict[str, dict[str, Any]]:
        found = module.counts(bench, module.Sizes(1, stream, texts), noise, 0)
        return {arm: module.summary(arm, np.array(counts)) for arm, counts in found.items()}

    return arms


@pytest.mark.slow
def test_ngrams_give_more_characters_per_pass_than_the_siblings(run_arms: Any) -> None:
    found = run_arms(60, 16, noise=0.0)
    characters = {arm: row["characters_per_pass"] for arm, row in found.items()}
    assert characters["cache"] > max(characters[arm] for arm in ("direct", "tli", "slem"))


@pytest.mark.slow
def test_distillation_repairs_a_draft_that_fits_badly(run_arms: Any) -> None:
    """The first draft has noise on its weights; one pass over a stream of 200 requests."""
    found = run_arms(200, 24, noise=0.4)
    for name in ("acceptance", "tau", "characters_per_pass"):
        others = [row[name] for arm, row in found.items() if arm != "distilled"]
        assert found["distilled"][name] > 1.15 * max(others), name
