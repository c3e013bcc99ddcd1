"""Tenants share nothing that can be observed: attacks by one API key on another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

import forerun
from forerun.serving.methods import named
from forerun.serving.tenants import Keys
from served import GO, Served, command, thread

RED, BLUE = ({"Authorization": f"Bearer {key}"} for key in ("red-key", "blue-key"))
WORDS = ("dog", "home", "mat", "cat", "went", "sat", "old")
SECRET = "cat sat mat old cat went home"
LINES = ("red:red-key", "blue:blue-key", "ops:ops-key")
LONG = SECRET + " the man and the dog" * 20  # long prompts keep their cells


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tenants, and an operator."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("\n".join(LINES))
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def guarded(tiny_chat: Path, keys: Path) -> Iterator[Served]:
    """A server for them."""
    options = ("--name", "tiny", "--max-seqs", 8, "--controller", "fixed", "--api-keys", keys)
    with command(tiny_chat, *options, "--operator", "ops") as served:
        yield served


def fresh(folder: Path, **settings: Any) -> AbstractContextManager[Served]:
    """A server for them that has not answered anything yet."""
    return thread(forerun.load(folder), Keys.read(LINES), **settings)


def ask(served: Served, headers: dict[str, str], prompt: str = SECRET, **fields: Any) -> Any:
    """The JSON of a completion."""
    call = GO | {"max_tokens": 2, "prompt": prompt} | fields
    answer = served.post("/v1/completions", json=call, headers=headers)
    assert answer.is_success, answer.text
    return answer.json()


def cached(answer: Any) -> int:
    """Prompt tokens that the answer reports as cached."""
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("shares", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_prompt_cannot_be_recovered_word_by_word(tiny_chat: Path, shares: bool) -> None:
    """The attack: of all next words, keep the one with which most tokens are cached.

    It works among tenants that share prefixes; without, what is seen does not depend on others.
    """

    def attack(served: Served) -> list[list[int]]:
        known, seen = "", []
        for _ in SECRET.split():
            counts = [cached(ask(served, BLUE, f"{known}{word} zzz")) for word in WORDS]
            seen.append(counts)
            known += WORDS[counts.index(max(counts))] + " "
        return [*seen, [known.strip() == SECRET]]

    with fresh(tiny_chat, share_prefixes=shares) as served:
        before = attack(served)
    with fresh(tiny_chat, share_prefixes=shares) as served:
        ask(served, RED, LONG)
        assert cached(ask(served, RED, LONG)) > 0  # its own cells are reused
        after = attack(served)
    assert (before == after) == (not shares)
    assert after[-1] == [shares]


def test_a_seeded_request_and_a_chat_share_nothing_either(guarded: Served) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 2}
    assert guarded.post("/v1/chat/completions", json=chat, headers=RED).is_success
    answer = guarded.post("/v1/chat/completions", json=chat, headers=BLUE).json()
    assert cached(answer) == 0
    ask(guarded, RED, SECRET + " seeded", seed=3)
    assert cached(ask(guarded, RED, SECRET + " seeded", seed=4)) > 0
    assert cached(ask(guarded, BLUE, SECRET + " seeded", seed=3)) == 0


def test_equal_prompts_that_join_together_compute_their_own_rows(tiny_chat: Path) -> None:
    """Rows of a pass are shared by the samples of one tenant only."""
    from forerun.core.dice import SeededDice
    from forerun.core.forward_batch import ForwardBatch
    from forerun.core.records import Sequence
    from forerun.core.sampling import Sampling
    from forerun.core.tree import EMPTY

    target = forerun.load(tiny_chat, max_seqs=4).target
    tokens = list(range(3, 40))
    seqs = [
        Sequence(list(tokens), 37, Sampling(), SeededDice(0), limit=1, tenant=tenant)
        for tenant in ("red", "red", "blue")
    ]
    rows = target.forward(ForwardBatch(seqs, [EMPTY] * 3))
    assert [row.lead for row in rows] == [None, 0, None]
    assert [target.reused(seq) for seq in seqs] == [0, 36, 0]


def test_those_who_trust_all_keys_may_share(tiny_chat: Path, keys: Path) -> None:
    with command(tiny_chat, "--name", "tiny", "--api-keys", keys, "--share-prefixes") as served:
        ask(served, RED)
        assert cached(ask(served, BLUE)) > 0


METHODS = ("auto", "stand", "suffix", "sam", "token_recycling", "aded", "lookahead", "router")
METHODS += ("fuse:parts=stand+suffix", "rasd:drafter=stand", "cascade:parts=suffix+stand")


def test_drafts_of_one_tenant_do_not_depend_on_another(tiny_chat: Path) -> None:
    """The statistics of a tenant are those of a server of its own, whatever another asked."""
    methods = named(METHODS)

    def drafted(served: Served, headers: dict[str, str]) -> dict[str, list[int]]:
        found = {}
        for name in methods:
            spec = {"method": name, "statistics": True}
            answer = ask(served, headers, temperature=0, max_tokens=24, speculation=spec)
            stats = answer["speculation"]
            found[name] = [stats[key] for key in ("accepted", "drafted", "passes")]
        return found

    with fresh(tiny_chat, methods=methods, controller="fixed") as served:
        alone = drafted(served, BLUE)
    with fresh(tiny_chat, methods=methods, controller="fixed") as served:
        taught, again = drafted(served, RED), drafted(served, RED)
        assert alone == taught != again  # memories matter, so the next line means something
        assert drafted(served, BLUE) == alone


def test_a_controller_sees_no_drafts_of_other_tenants() -> None:
    from forerun.core.dice import SeededDice
    from forerun.core.records import Plan, Sequence, Step, Verdict
    from forerun.core.sampling import Sampling
    from forerun.core.tree import chain
    from forerun.serving.routing import _seen_by

    seqs = [
        Sequence([1, 2, 3, 4], 1, Sampling(), SeededDice(0), limit=9, tenant=tenant)
        for tenant in ("red", "blue", "blue\x007.0")
    ]
    trees = [chain([2, 3, 4])] * 3
    verdicts = [Verdict([0, 1], 4) for _ in range(3)]
    step = Step(seqs, [Plan()] * 3, trees, [None] * 3, verdicts, [[2, 3, 4]] * 3)  # type: ignore
    seen = _seen_by("blue", step)
    assert [len(tree) for tree in seen.trees] == [0, 3, 3]
    assert [len(tokens) for tokens in seen.emitted] == [1, 3, 3]
    assert [verdict.nodes for verdict in seen.verdicts] == [[], [0, 1], [0, 1]]
    assert seen.plans[0].is_empty and [seen.start(i) for i in range(3)] == [1, 1, 1]


def test_ids_do_not_count_the_requests_of_others(guarded: Served) -> None:
    first = ask(guarded, BLUE)["id"]
    ask(guarded, RED)
    second = ask(guarded, BLUE)["id"]
    parts = [set(name.split("-")[1:]) for name in (first, second)]
    assert first != second and not parts[0] & parts[1]
    assert all(len(part) >= 16 and not part.isdecimal() for part in parts[0] | parts[1])


def test_counts_of_all_tenants_are_for_the_operator(guarded: Served) -> None:
    url = f"{guarded.url}/metrics"
    assert httpx.get(url).status_code == 401
    refused = httpx.get(url, headers=BLUE)
    assert refused.status_code == 403 and "--operator" in refused.json()["error"]["message"]
    seen = httpx.get(url, headers={"Authorization": "Bearer ops-key"})
    assert seen.is_success and "vllm:prompt_tokens_total" in seen.text
    assert not re.search(r'"(red|blue)"', seen.text)


def test_the_headers_of_answers_are_those_of_an_empty_server(guarded: Served) -> None:
    def names(headers: dict[str, str]) -> set[str]:
        call = GO | {"max_tokens": 1}
        return set(guarded.post("/v1/completions", json=call, headers=headers).headers)

    assert names(BLUE) == names(RED) == {"content-length", "content-type", "date"}
