"""`constraint_sampling` of requests: how tokens are drawn, and what ASAp learns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from forerun.constraints.asap import AsapMemory
from forerun.constraints.choice import Choice
from forerun.core.dice import SeededDice
from forerun.core.records import Sequence
from forerun.core.sampling import Sampling
from forerun.serving.asap_memories import AsapMemories
from forerun.serving.tenants import Keys
from served import Served, thread

pytest.importorskip("llguidance")

ASK: Any = {"model": "tiny", "prompt": "the cat", "max_tokens": 40}
BIT = "[ab]{3}"


@pytest.fixture
def served(tiny_model: Any) -> Iterator[Served]:
    keys = Keys([("one", "key-one"), ("two", "key-two")])
    with thread(tiny_model, keys, operators=("one",)) as served:
        yield served


def texts(served: Served, key: str = "key-one", how: str = "asap", **call: Any) -> list[str]:
    body = {"guided_regex": BIT, "constraint_sampling": how}
    answer = served.client(key).completions.create(**ASK, **call, extra_body=body)
    return [choice.text for choice in answer.choices]


def memory_of(served: Served, tenant: str) -> AsapMemory:
    """What a tenant's requests without a seed have taught."""
    return served.server.service.asap._by_tenant[tenant]


def test_weights_of_awrs_come_with_every_answer(served: Served) -> None:
    """Streamed or not, with or without `statistics`: one per choice, and the same for a seed."""
    body = {"guided_regex": BIT, "constraint_sampling": "awrs"}
    call = ASK | {"n": 4, "seed": 3, "extra_body": body}
    client = served.client("key-one")
    whole = client.completions.create(**call)
    weights = [one["constraint"]["logw"] for one in whole.model_extra["speculation"]["choices"]]
    assert all(choice.text and {*choice.text} <= {*"ab"} for choice in whole.choices)
    assert len(weights) == 4 and all(weight < 0 for weight in weights)
    found = [""] * 4
    for chunk in client.completions.create(**call, stream=True):
        for choice in chunk.choices:
            found[choice.index] += choice.text
        last = chunk.model_extra
    assert found == [choice.text for choice in whole.choices]
    streamed = [one["constraint"]["logw"] for one in last["speculation"]["choices"]]
    assert streamed == pytest.approx(weights)


def test_asap_learns_per_tenant_and_is_counted(served: Served) -> None:
    """Texts that were seen change the bounds of their tenant only."""
    for key, count in (("key-one", 1), ("key-two", 2)):
        for text in texts(served, key, n=4):
            assert {*text} <= {*"ab"}
        assert served.server.service.asap.num_prompts == count
    (one,) = memory_of(served, "one").tries.values()
    (two,) = memory_of(served, "two").tries.values()
    assert one is not two and one.bound(()) < 1 and two.bound(()) < 1
    before = one.bound(()), two.num_nodes
    texts(served, "key-one", n=8)
    assert one.bound(()) <= before[0] and two.num_nodes == before[1]
    assert len(memory_of(served, "one").tries) == 1  # the same prompt and grammar
    key = {"Authorization": "Bearer key-one"}
    shown = httpx.get(f"{served.url}/metrics", headers=key, timeout=60.0).text
    assert re.search(r"\nforerun:asap_prompts{.*} 2.0\n", shown)
    assert re.search(r"\nforerun:asap_bytes{.*} [1-9]", shown)


def test_bounds_of_a_server_are_those_of_the_model(served: Served) -> None:
    """Once all texts were seen, the bound is the probability that the model writes one of them."""
    model = served.server.service.model
    how: dict[str, Any] = {"constraint": Choice(("a", "b")), "constraint_sampling": "asap"}
    model.generate([ASK["prompt"]], **how, n=64, max_new_tokens=9)
    body = {"guided_choice": ["a", "b"], "constraint_sampling": "asap"}
    for _ in range(8):
        served.client("key-one").completions.create(**ASK, n=8, extra_body=body)
    (wanted,), (found,) = model.asap.tries.values(), memory_of(served, "one").tries.values()
    assert found.num_nodes == wanted.num_nodes == 3
    assert found.bound(()) == pytest.approx(wanted.bound(()), rel=1e-6)
    assert found.law(())[1] == pytest.approx(wanted.law(())[1], rel=1e-6)


def test_asap_with_a_seed_depends_on_no_other_request(served: Served) -> None:
    first = texts(served, n=4, seed=5)
    assert not served.server.service.asap.num_prompts
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(texts, served, n=2) for _ in range(4)]
        assert texts(served, n=4, seed=5) == first
        found = [""] * 4
        body = {"guided_regex": BIT, "constraint_sampling": "asap"}
        call = ASK | {"n": 4, "seed": 5, "stream": True, "extra_body": body}
        for chunk in served.client("key-one").completions.create(**call):
            for choice in chunk.choices:
                found[choice.index] += choice.text
        assert found == first
    assert all(len(one.result()) == 2 for one in others)


def test_requests_of_all_kinds_share_a_batch(served: Served) -> None:
    kinds = ["mask", "asap", "awrs", "mask"]
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(texts, served, how=how, n=2) for how in kinds * 3]
        free = pool.submit(served.client("key-one").completions.create, **ASK)
    assert all({*text} <= {*"ab"} for one in found for text in one.result())
    assert free.result().choices[0].finish_reason in ("stop", "length")


def test_other_laws_have_other_tries(served: Served) -> None:
    """Grammar, prompt and what changes the model's law: each has bounds of its own."""
    texts(served)
    for more in (
        {"temperature": 0.5},
        {"presence_penalty": 1.0},
        {"extra_body": {"guided_regex": "a|b", "constraint_sampling": "asap"}},
    ):
        body = {"guided_regex": BIT, "constraint_sampling": "asap"}
        served.client("key-one").completions.create(**ASK | {"extra_body": body} | more)
    served.client("key-one").completions.create(**ASK | {"prompt": "a dog"}, extra_body=body)
    assert len(memory_of(served, "one").tries) == 5


def test_a_client_cannot_fill_the_memory_of_asap(served: Served) -> None:
    served.server.service.asap = AsapMemories(2, 8, max_bytes=400_000)
    for i in range(30):
        texts(served, n=8, logit_bias={str(65 + i % 9): float(i) / 10})
        assert memory_of(served, "one").num_bytes <= 200_000
    assert len(memory_of(served, "one").tries) >= 1


def test_one_prompt_that_outgrows_its_share_starts_again() -> None:
    memory, constraint = AsapMemory(100_000), Choice(("a", "b"))
    seq = Sequence([1, 2], 2, Sampling(), SeededDice(0, 0, 0), limit=4, tenant="t")
    trie = memory.trie(constraint, "", seq)
    node = trie.expand((), [0, 1], [0.5, 0.5])
    for depth in range(100):
        node = trie.expand((0,) * (depth + 1), [0, 1], [0.5, 0.5])
    assert memory.trie(constraint, "", seq) is not trie
    assert node.ids is None and memory.num_bytes < 1000


def test_an_engine_that_is_made_again_has_learned_nothing(served: Served) -> None:
    texts(served, n=4)
    assert served.server.service.asap.num_prompts == 1
    served.wait_idle()
    served.server.service.worker._batch.restart(RuntimeError("a test"))
    assert served.server.service.asap.num_prompts == 0
    assert len(texts(served, n=2)) == 2
