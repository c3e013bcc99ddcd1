"""Our proposers for vLLM: behind a loop that keeps vLLM's protocol, and (slow) behind vLLM itself.

The loop has what the runner of vLLM 0.32 has where we touch it, and judges drafts by its rule; what
it checks here are our sides of the protocol. The slow tests need `make peers`.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import forerun
from forerun.assets import embedded
from forerun.bench.peers import law
from forerun.bench.peers.client import WorkerProcess
from forerun.bench.peers.install import env_of, problem, python_of
from forerun.errors import ConfigError, UnknownName
from forerun.integrations import vllm, vllm_taps
from forerun.sampling import Sampling, softmax
from forerun.statistics import fit, ranks

ROOT = Path(__file__).parents[2]
V, CONTEXT, PROMPT = 6, 64, [0, 1, 2]
TABLE = np.random.default_rng(1).normal(0.0, 1.5, (V, V)).astype(np.float32)  # logits by last token
NAMES = {
    "stand": vllm.StandProposer,
    "recycling": vllm.TokenRecyclingProposer,
    "suffix": vllm.SuffixProposer,
}


class Loop:
    """As much of vLLM's runner and scheduler as proposers meet; one step per call of `step`."""

    def __init__(self, proposer: vllm.Proposer, seed: int = 0, chaos: bool = True) -> None:
        self.drafter, self.rng, self.chaos = proposer, np.random.default_rng(seed), chaos
        self.requests: dict[str, Any] = {}
        self.drafts: dict[str, list[int]] = {}
        self.input_batch = SimpleNamespace(req_ids=[])
        self.drafted = self.accepted = self.steps = 0

    def add(self, name: str, params: Any) -> None:
        self.requests[name] = SimpleNamespace(
            num_prompt_tokens=len(PROMPT), sampling_params=params, tokens=list(PROMPT)
        )

    def step(self) -> None:
        """Some requests advance, their drafts cut anywhere; now and then drafts are zeros."""
        names = list(self.requests)
        if self.chaos:  # rows move, and some requests wait
            self.rng.shuffle(names)
            names = names[: max(1, len(names) - int(self.rng.integers(2)))]
        self.input_batch.req_ids = names
        drafts = [self.drafts.pop(name, []) for name in names]
        if self.chaos:
            drafts = [d[: int(self.rng.integers(len(d) + 1))] for d in drafts]
        texts = [self.requests[name].tokens for name in names]
        pairs = zip(texts, drafts, strict=True)
        rows = [TABLE[token] for text, draft in pairs for token in [text[-1], *draft]]
        metadata = None
        if any(drafts):
            flat = torch.tensor([token for draft in drafts for token in draft])
            metadata = SimpleNamespace(num_draft_tokens=[*map(len, drafts)], draft_token_ids=flat)
        sampled = self._sample(torch.from_numpy(np.stack(rows)), metadata)
        self._count(drafts, sampled)
        for text, new in zip(texts, sampled, strict=True):
            text += new
        if self.chaos and self.rng.random() < 0.1:  # as where a draft might not fit
            self.drafts |= {name: [0, 0] for name in names}
            return
        lengths = np.array([len(text) for text in texts], np.int32)
        tokens = np.zeros((len(texts), CONTEXT + 8), np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        proposed = self.drafter.propose(sampled, lengths, tokens, slot_mappings=None)
        self.drafts |= dict(zip(names, proposed, strict=True))

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> list[list[int]]:
        """vLLM's rule; writes into its argument as vLLM does."""
        counts = [0] * len(self.input_batch.req_ids)
        drafts, q = np.empty(0, int), None
        if spec_decode_metadata is not None:
            counts = spec_decode_metadata.num_draft_tokens
            drafts = spec_decode_metadata.draft_token_ids.numpy()
            q = self._get_spec_decode_draft_probs(spec_decode_metadata)
        sampled, row, at = [], 0, 0
        for name, count in zip(self.input_batch.req_ids, counts, strict=True):
            t = self.requests[name].sampling_params.temperature
            sampled.append([])
            for i in range(count + 1):
                z = logits[row + i].numpy()
                p = softmax(z / t) if t else np.eye(V)[z.argmax()]
                if i == count:
                    sampled[-1].append(int(self.rng.choice(V, p=p / p.sum())))
                    break
                x = drafts[at + i]
                of = np.eye(V)[x] if q is None else q[at + i].double().numpy()
                assert abs(of.sum() - 1) < 1e-5
                if self.rng.random() * of[x] < p[x]:
                    sampled[-1].append(int(x))
                    continue
                rest = np.maximum(p - of, 0.0)
                sampled[-1].append(int(self.rng.choice(V, p=rest / rest.sum())))
                break
            row, at = row + count + 1, at + count
        if spec_decode_metadata is None:
            logits.zero_()
        return sampled

    def _get_spec_decode_draft_probs(self, spec_decode_metadata: Any) -> torch.Tensor | None:
        return None

    def _count(self, drafts: list[list[int]], sampled: list[list[int]]) -> None:
        self.steps += len(drafts)
        self.drafted += sum(map(len, drafts))
        self.accepted += sum(len(new) - 1 for new in sampled)


vllm_taps.wrap(Loop)


def params(temperature: float = 1.0, **options: Any) -> Any:
    """vLLM's sampling parameters, as far as they are read."""
    plain = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "seed": None, "structured_outputs": None}
    return SimpleNamespace(temperature=temperature, **plain | options)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Requests without a seed take theirs from torch."""
    torch.manual_seed(0)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds a proposer in one of its forms, without vLLM."""
    monkeypatch.setattr(vllm, "check_release", lambda: None)
    monkeypatch.setattr(vllm, "mend", lambda: False)

    def built(name: str, *, full: bool = True, k: int = 3, options: str = "") -> vllm.Proposer:
        monkeypatch.setattr(vllm, "open_taps", lambda world_size: full)
        model = SimpleNamespace(get_vocab_size=lambda: V, max_model_len=CONTEXT)
        config = SimpleNamespace(
            model_config=model,
            speculative_config=SimpleNamespace(num_speculative_tokens=k),
            parallel_config=SimpleNamespace(world_size=1),
            additional_config={"forerun": options} if options else {},
        )
        return NAMES[name](config)

    return built


def sampled_fit(loop: Loop, num_texts: int, length: int = 6) -> float:
    """p-value of the tokens of texts, three at a time, given what each came after."""
    rng, u, number = np.random.default_rng(0), [], 0
    done = 0
    while done < num_texts:
        while len(loop.requests) < 3:
            loop.add(f"r{number}", params())
            number += 1
        loop.step()
        for name, request in list(loop.requests.items()):
            if len(request.tokens) >= len(PROMPT) + length:
                text = request.tokens[len(PROMPT) - 1 :][: length + 1]
                for before, token in zip(text, text[1:], strict=False):
                    p = softmax(TABLE[before]).astype(np.float64)
                    u.append(float(ranks(p / p.sum(), np.array([token]), rng)[0]))
                del loop.requests[name]
                loop.drafts.pop(name, None)
                done += 1
    return fit(np.array(u), np.full(20, 0.05))[2]


class TestLaw:
    @pytest.mark.parametrize("full", [True, False])
    @pytest.mark.parametrize("name", NAMES)
    def test_is_the_models(self, make: Any, name: str, full: bool) -> None:
        loop = Loop(make(name, full=full))
        assert sampled_fit(loop, 400) > 1e-3
        assert loop.accepted > 100

    def test_another_q_is_found_out(self, make: Any) -> None:
        loop = Loop(make("stand"))
        told = loop.drafter.draft_probs
        loop.drafter.draft_probs = lambda: sharper(told())
        assert sampled_fit(loop, 400) < 1e-3

    @pytest.mark.parametrize("name", NAMES)
    def test_greedy_texts_are_the_same(self, make: Any, name: str) -> None:
        expected = list(PROMPT)
        while len(expected) < CONTEXT:
            expected.append(int(TABLE[expected[-1]].argmax()))
        loop = Loop(make(name))
        for i in range(4):
            loop.add(str(i), params(0.0))
        for _ in range(12):
            loop.step()
        for request in loop.requests.values():
            assert request.tokens[:CONTEXT] == expected[: len(request.tokens)]
        assert loop.accepted > 0


def sharper(probs: torch.Tensor | None) -> torch.Tensor | None:
    """Another q than the drafts were drawn from."""
    return None if probs is None else probs**3 / (probs**3).sum(-1, keepdim=True)


def warm(loop: Loop, steps: int = 8, **options: Any) -> None:
    """Steps of two requests, so that something is known."""
    for i in range(2):
        loop.add(str(i), params(**options))
    for _ in range(steps):
        loop.step()


class TestForms:
    def test_the_full_form_tells_what_drafts_were_drawn_from(self, make: Any) -> None:
        loop = Loop(make("stand"), chaos=False)
        warm(loop)
        loop.drafter.see(loop, torch.zeros(8, V), metadata_of(loop))
        q = loop.drafter.draft_probs()
        assert q is not None and q.shape == (6, V)
        assert (q > 0).sum() > 6 and torch.allclose(q.sum(1), torch.ones(6))

    @pytest.mark.parametrize("options", [{"temperature": 0.0}, {"structured_outputs": object()}])
    def test_nothing_is_drawn_greedily_or_beside_a_grammar(
        self, make: Any, options: dict[str, Any]
    ) -> None:
        loop = Loop(make("stand"), chaos=False)
        warm(loop, **options)
        loop.drafter.see(loop, torch.zeros(8, V), metadata_of(loop))
        assert loop.drafter.draft_probs() is None

    def test_requests_of_both_kinds_in_one_batch(self, make: Any) -> None:
        loop = Loop(make("stand"), chaos=False)
        loop.add("greedy", params(0.0))
        warm(loop)
        metadata = metadata_of(loop)
        loop.drafter.see(loop, torch.zeros(12, V), metadata)
        q, first = loop.drafter.draft_probs(), metadata.draft_token_ids[:3]
        assert q[:3].equal(torch.eye(V)[first]) and (q[3:] > 0).sum() > 6

    def test_stand_learns_more_than_tokens_in_the_full_form(self, make: Any) -> None:
        held = {}
        for full in (True, False):
            loop = Loop(make("stand", full=full), chaos=False)
            warm(loop, steps=1)
            text = next(iter(loop.drafter._texts.values()))[0]
            held[full] = loop.drafter.drafter.drafter.memory(text.seq).lookup(PROMPT)
        assert len(held[True].ids) == V and len(held[False].ids) <= 2

    def test_equal_prompts_share_a_memory(self, make: Any) -> None:
        loop = Loop(make("stand"))
        warm(loop)
        assert len({t.seq.group for texts in loop.drafter._texts.values() for t in texts}) == 1

    @pytest.mark.parametrize("full", [True, False])
    def test_rows_that_move_keep_their_texts(self, make: Any, full: bool) -> None:
        loop = Loop(make("suffix", full=full), chaos=False)
        warm(loop, steps=3)
        before = {id(t.seq) for texts in loop.drafter._texts.values() for t in texts}
        loop.requests = dict(reversed(loop.requests.items()))
        loop.step()
        texts = [t.seq for texts in loop.drafter._texts.values() for t in texts]
        assert {id(seq) for seq in texts} == before
        assert sorted(seq.tokens for seq in texts) == sorted(
            r.tokens for r in loop.requests.values()
        )

    @pytest.mark.parametrize("full", [True, False])
    def test_ended_requests_are_left(self, make: Any, full: bool) -> None:
        loop = Loop(make("stand", full=full), chaos=False)
        warm(loop)
        loop.requests.pop("0")
        loop.step()
        assert sum(map(len, loop.drafter._texts.values())) == 1

    def test_a_request_that_waits_keeps_its_q(self, make: Any) -> None:
        loop = Loop(make("stand"), chaos=False)
        warm(loop)
        tree, waiting = loop.drafter._texts["0"][0].drafted, loop.requests.pop("0")
        loop.requests, both = {"1": loop.requests["1"]}, loop.requests | {"0": waiting}
        loop.input_batch.req_ids = ["1"]
        loop.drafter._runner = SimpleNamespace(requests=both, input_batch=loop.input_batch)
        step_with(loop, both)
        assert len(tree) and loop.drafter._texts["0"][0].drafted is tree

    def test_no_draft_leaves_the_context(self, make: Any) -> None:
        loop = Loop(make("recycling"), chaos=False)
        loop.add("0", params())
        while len(loop.requests["0"].tokens) < CONTEXT - 1:
            loop.step()
            room = CONTEXT - 1 - len(loop.requests["0"].tokens)
            assert len(loop.drafts["0"]) <= max(0, room)


def step_with(loop: Loop, requests: dict[str, Any]) -> None:
    """A step of all of the loop's requests, while the runner knows of `requests`."""
    see = loop.drafter.see

    def seen(runner: Any, *args: Any) -> None:
        see(SimpleNamespace(requests=requests, input_batch=loop.input_batch), *args)

    loop.drafter.see = seen
    loop.step()


def metadata_of(loop: Loop) -> Any:
    """What vLLM would say of the drafts that wait."""
    loop.input_batch.req_ids = list(loop.drafts)
    flat = torch.tensor([token for draft in loop.drafts.values() for token in draft])
    counts = [len(draft) for draft in loop.drafts.values()]
    return SimpleNamespace(num_draft_tokens=counts, draft_token_ids=flat)


class TestOptions:
    def test_reach_the_drafter(self, make: Any) -> None:
        made = make("stand", options="entries=3,scope=tenant").drafter.drafter
        assert (made.entries, made.scope) == (3, "tenant")

    def test_that_chains_fix_are_refused(self, make: Any) -> None:
        with pytest.raises(ConfigError, match="vLLM judges chains, so option branches of suffix"):
            make("suffix", options="branches=true")

    def test_unknown_ones_are_named(self, make: Any) -> None:
        with pytest.raises(UnknownName, match="entries"):
            make("stand", options="entris=3")

    def test_a_pass_of_our_own_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="vLLM runs the model"):
            vllm.Served(V, CONTEXT).forward([], [], frozenset())


class TestTaps:
    def test_the_entry_point_is_there(self) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        module, _, name = project["entry-points"][vllm_taps.GROUP]["forerun"].partition(":")
        assert getattr(importlib.import_module(module), name) is vllm_taps.register

    def test_the_extra_pins_tested_releases(self) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        pins = [line.partition("==")[2] for line in project["optional-dependencies"]["vllm"]]
        assert pins and set(pins) <= set(vllm_taps.TESTED)

    def test_without_the_entry_point(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(vllm_taps, "_permitted", set())
        with caplog.at_level(logging.WARNING, "forerun"):
            assert not vllm_taps.open_taps(1)
        assert "drafts are deterministic" in caplog.text
        vllm_taps.register()
        assert not vllm_taps.open_taps(2)
        assert "2 workers" in caplog.text

    def test_other_releases_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.99.1"))
        with pytest.raises(ConfigError, match=r"inside vLLM 0\.32\.0.*this is vLLM 0\.99\.1"):
            vllm_taps.check_release()
        tested = SimpleNamespace(__version__=f"{vllm_taps.TESTED[0]}+cpu")
        monkeypatch.setitem(sys.modules, "vllm", tested)
        vllm_taps.check_release()

    def test_other_drafters_are_left_alone(self) -> None:
        sample = Loop._sample
        vllm_taps.wrap(Loop)
        assert Loop._sample is sample  # once
        loop = Loop(SimpleNamespace(), chaos=False)  # type: ignore[arg-type]
        loop.add("0", params())
        loop.input_batch.req_ids = ["0"]
        metadata = SimpleNamespace(num_draft_tokens=[1], draft_token_ids=torch.tensor([0]))
        assert loop._get_spec_decode_draft_probs(metadata) is None
        assert len(loop._sample(torch.zeros(2, V), metadata)[0]) in (1, 2)


PEERS_DIR = Path(os.environ.get("PEERS_DIR", ".peers"))
LAW: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
LAW |= {"max_new_tokens": 16, "ends": [1]}


@pytest.fixture
def process() -> Iterator[WorkerProcess]:
    """A process of vLLM's environment; it holds one engine."""
    if reason := problem(PEERS_DIR, "vllm"):
        pytest.skip(f"vLLM {reason}")
    env = env_of(PEERS_DIR, "vllm") | {"PYTHONPATH": str(ROOT / "src")}
    path = ROOT / "benchmarks" / "vllm_worker.py"
    process = WorkerProcess(python_of(PEERS_DIR, "vllm"), path, threads=1, env=env)
    yield process
    process.close()


def loaded(process: WorkerProcess, mode: str, **options: int) -> list[int]:
    """Loads the reasoner; a prompt after which its law is wide."""
    folder = str(Path(embedded("reasoner")).absolute())
    options = {"tokens": 4, "eager": 1} | options
    fields = {"model": folder, "dtype": "float32", "context": 256, "options": options}
    process.request("load", 900, mode=mode, **fields)
    model = forerun.load("reasoner", dtype="fp32")
    tokens = model.tokenizer.encode("Question: Ann has 5 apples and buys 7 more.")
    return law.widest(model, [tokens], Sampling(temperature=1.0))


def texts(process: WorkerProcess, mode: str, prompt: list[int], n: int, **sampling: Any) -> Any:
    """n texts, all at once, and the counts of their drafts."""
    asked = {**LAW, "seeds": [*range(n)]} | sampling
    fields = {"mode": mode, "prompt": prompt, "sampling": asked, "batch": True}
    told = process.request("run", 900, **fields)
    return [sample["tokens"] for sample in told["samples"]], told["counts"]


@pytest.mark.slow
class TestInVllm:
    @pytest.mark.parametrize("mode", [name + form for form in ("", ":plain") for name in NAMES])
    def test_keeps_the_law(self, process: WorkerProcess, mode: str) -> None:
        """16 tokens of 400 texts; a greedy text is the model's own."""
        prompt = loaded(process, mode)
        model = forerun.load("reasoner", dtype="fp32")
        found, counts = texts(process, mode, prompt, 400)
        check = law.check_texts(model, prompt, found, Sampling(temperature=1.0))
        print(f"{mode}: {check}, {counts}")
        assert check.passed and check.entropy > 0.3 and counts["accepted"] > 500
        [greedy], counts = texts(process, mode, prompt, 1, temperature=0.0, max_new_tokens=100)
        length, gap = law.first_difference(model, prompt, greedy)
        print(f"{mode}: greedy {length} of {len(greedy)}, {counts}")
        assert counts["accepted"] > 0
        assert length == len(greedy) or gap < 1e-3  # rounding in fp32

    def test_another_q_is_found_out(self, process: WorkerProcess) -> None:
        prompt = loaded(process, "stand", planted=1)
        found, _counts = texts(process, "stand", prompt, 400)
        model = forerun.load("reasoner", dtype="fp32")
        check = law.check_texts(model, prompt, found, Sampling(temperature=1.0))
        print(check)
        assert not check.passed
