"""Our proposers for vLLM behind a loop that keeps its protocol (vLLM itself: test_vllm_inside)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm_loop import CONTEXT, NAMES, PROMPT, TABLE, Loop, V, make, params, seeded, warm

from forerun.core.sampling import softmax
from forerun.utils.stats import fit, ranks

__all__ = ["make", "seeded"]  # fixtures


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


class TestForms:
    def test_the_full_form_tells_what_drafts_were_drawn_from(self, make: Any) -> None:
        loop = Loop(make("stand"), chaos=False)
        warm(loop)
        loop.drafter.receive_logits(loop, torch.zeros(8, V), metadata_of(loop))
        q = loop.drafter.draft_probs()
        assert q is not None and q.shape == (6, V)
        assert (q > 0).sum() > 6 and torch.allclose(q.sum(1), torch.ones(6))

    @pytest.mark.parametrize("options", [{"temperature": 0.0}, {"structured_outputs": object()}])
    def test_nothing_is_drawn_greedily_or_beside_a_grammar(
        self, make: Any, options: dict[str, Any]
    ) -> None:
        loop = Loop(make("stand"), chaos=False)
        warm(loop, **options)
        loop.drafter.receive_logits(loop, torch.zeros(8, V), metadata_of(loop))
        assert loop.drafter.draft_probs() is None

    def test_requests_of_both_kinds_in_one_batch(self, make: Any) -> None:
        loop = Loop(make("stand"), chaos=False)
        loop.add("greedy", params(0.0))
        warm(loop)
        metadata = metadata_of(loop)
        loop.drafter.receive_logits(loop, torch.zeros(12, V), metadata)
        q, first = loop.drafter.draft_probs(), metadata.draft_token_ids[:3]
        assert q[:3].equal(torch.eye(V)[first]) and (q[3:] > 0).sum() > 6

    def test_stand_learns_more_than_tokens_in_the_full_form(self, make: Any) -> None:
        held = {}
        for full in (True, False):
            loop = Loop(make("stand", full=full), chaos=False)
            warm(loop, steps=1)
            text = next(iter(loop.drafter._requests.values()))[0]
            held[full] = loop.drafter.drafter.drafter.memory(text.seq).lookup(PROMPT)
        assert len(held[True].ids) == V and len(held[False].ids) <= 2

    def test_equal_prompts_share_a_memory(self, make: Any) -> None:
        loop = Loop(make("stand"))
        warm(loop)
        assert len({t.seq.group for texts in loop.drafter._requests.values() for t in texts}) == 1

    @pytest.mark.parametrize("full", [True, False])
    def test_rows_that_move_keep_their_texts(self, make: Any, full: bool) -> None:
        loop = Loop(make("suffix", full=full), chaos=False)
        warm(loop, steps=3)
        before = {id(t.seq) for texts in loop.drafter._requests.values() for t in texts}
        loop.requests = dict(reversed(loop.requests.items()))
        loop.step()
        texts = [t.seq for texts in loop.drafter._requests.values() for t in texts]
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
        assert sum(map(len, loop.drafter._requests.values())) == 1

    def test_a_request_that_waits_keeps_its_q(self, make: Any) -> None:
        loop = Loop(make("stand"), chaos=False)
        warm(loop)
        tree, waiting = loop.drafter._requests["0"][0].drafted, loop.requests.pop("0")
        loop.requests, both = {"1": loop.requests["1"]}, loop.requests | {"0": waiting}
        loop.input_batch.req_ids = ["1"]
        loop.drafter._runner = SimpleNamespace(requests=both, input_batch=loop.input_batch)
        step_with(loop, both)
        assert len(tree) and loop.drafter._requests["0"][0].drafted is tree

    def test_no_draft_leaves_the_context(self, make: Any) -> None:
        loop = Loop(make("recycling"), chaos=False)
        loop.add("0", params())
        longest = 0
        while len(loop.requests["0"].tokens) < CONTEXT - 1:
            loop.step()
            room = CONTEXT - 1 - len(loop.requests["0"].tokens)
            assert len(loop.drafts["0"]) <= max(0, room)
            longest = max(longest, len(loop.drafts["0"]))
        assert longest


def step_with(loop: Loop, requests: dict[str, Any]) -> None:
    """A step of all of the loop's requests, while the runner knows of `requests`."""
    see = loop.drafter.receive_logits

    def seen(runner: Any, *args: Any) -> None:
        see(SimpleNamespace(requests=requests, input_batch=loop.input_batch), *args)

    loop.drafter.receive_logits = seen
    loop.step()


def metadata_of(loop: Loop) -> Any:
    """What vLLM would say of the drafts that wait."""
    loop.input_batch.req_ids = list(loop.drafts)
    flat = torch.tensor([token for draft in loop.drafts.values() for token in draft])
    counts = [len(draft) for draft in loop.drafts.values()]
    return SimpleNamespace(num_draft_tokens=counts, draft_token_ids=flat)
