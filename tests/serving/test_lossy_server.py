"""A server whose operator allowed a lossy rule serves it and says so.

That it is refused otherwise: tests/unit/test_lossy_refused.py.
"""

from __future__ import annotations

import httpx
import pytest

from served import command


@pytest.mark.parametrize("rule", ["typical", pytest.param("judge", marks=pytest.mark.slow)])
def test_it_serves_where_it_is_allowed_and_says_what_it_is(rule: str) -> None:
    with command("--verifier", rule, "--allow-lossy") as served:
        told = httpx.get(f"{served.url}/v1/models").json()["data"][0]["speculation"]
        assert told["verifier"] == rule and told["lossless"] is False
        body = {"model": "reasoner", "prompt": "Problem: Ann has 3 plums.", "max_tokens": 12}
        answer = served.post("/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 12 and answer["lossless"] is False
