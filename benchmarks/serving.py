"""Servers under concurrent streaming clients: throughput, time to first token, gaps.

    python benchmarks/serving.py                              # forerun's server
    python benchmarks/serving.py --vllm .peers                # compared with vLLM's server
    python benchmarks/serving.py --url other=http://127.0.0.1:8001/v1 --model other=reasoner
    python benchmarks/serving.py --clients 1 4 16 64 --rounds 4 --out serving.json
    python benchmarks/serving.py --soak 600 --clients 16      # is memory flat?

All servers run at the same time and take turns, A B then B A, on the same prompts of the reasoning
task, so that a busy machine disturbs them alike. Use an even number of rounds: the second
contestant finds the prompts in our server's cache. Our server is measured as `default` (requests
without `speculation`) and, in the same process, as `plain` (method none). Every client streams one
request after the other.

TTFT is the time from sending to the first text. A gap is the time between two chunks with text of
one stream. ITL is (last - first) / (tokens - 1) of a stream, whatever the chunks. A request without
an end, without usage or with an error is lost, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import scripts

from forerun.assets import embedded
from forerun.bench.peers.client import environment
from forerun.bench.peers.install import env_of, python_of
from forerun.tasks.reasoning import ReasoningTask

try:
    import fastapi  # noqa: F401 - our server's needs, too
    import httpx
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401
except ModuleNotFoundError as error:
    scripts.skip(f"it needs the package {error.name}; pip install '.[serve]' httpx")


@dataclass(frozen=True)
class Side:
    """One contestant: a server, what it calls the model, and what is added to each request."""

    name: str
    url: str
    model: str
    extra: dict[str, Any] = field(default_factory=dict)
    pid: int | None = None  # the process to watch in a soak


@dataclass
class Take:
    """What one stream brought."""

    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0  # from the first text to the last
    tokens: int = 0
    error: str = ""

    @property
    def itl(self) -> float:
        return self.seconds / max(self.tokens - 1, 1)


async def stream(client: httpx.AsyncClient, side: Side, prompt: str, most: int) -> Take:
    """One streamed completion."""
    body = {"model": side.model, "prompt": prompt, "max_tokens": most, "temperature": 0.6}
    body |= {"stream": True, "stream_options": {"include_usage": True}} | side.extra
    take, start, last, is_done = Take(), time.perf_counter(), 0.0, False
    try:
        async with client.stream("POST", f"{side.url}/completions", json=body) as answer:
            if answer.status_code != 200:
                return Take(error=f"{answer.status_code} {(await answer.aread())[:200]!r}")
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if not line or data == "[DONE]":
                    is_done = is_done or data == "[DONE]"
                    continue
                chunk, now = json.loads(data), time.perf_counter()
                if "error" in chunk:
                    return Take(error=str(chunk["error"]))
                if usage := chunk.get("usage"):
                    take.tokens = usage["completion_tokens"]
                if any(choice["text"] for choice in chunk["choices"]):
                    if last:
                        take.gaps.append(now - last)
                    else:
                        take.ttft = now - start
                    last = now
    except httpx.HTTPError as error:
        return Take(error=repr(error))
    take.seconds = max(0.0, last - start - take.ttft)
    take.error = "" if is_done and take.tokens else "the stream ended early"
    return take


async def crowd(
    side: Side, prompts: list[str], clients: int, most: int
) -> tuple[list[Take], float]:
    """All prompts by so many clients; what they brought and the seconds of all together."""
    left, takes = iter(prompts), list[Take]()
    limits = httpx.Limits(max_connections=clients)

    async def one(client: httpx.AsyncClient) -> None:
        for prompt in left:
            takes.append(await stream(client, side, prompt, most))

    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        start = time.perf_counter()
        await asyncio.gather(*(one(client) for _ in range(clients)))
        return takes, time.perf_counter() - start


def figures(takes: list[Take], seconds: float) -> dict[str, float]:
    """The numbers of one turn, times in milliseconds."""
    good = [take for take in takes if not take.error]
    gaps = [gap for take in good for gap in take.gaps] or [0.0]
    ttfts, itls = [t.ttft for t in good] or [0.0], [t.itl for t in good] or [0.0]
    return {
        "requests": len(takes),
        "lost": len(takes) - len(good),
        "tokens": sum(take.tokens for take in good),
        "tokens_per_second": sum(take.tokens for take in good) / seconds,
        "ttft_p50": 1e3 * float(np.percentile(ttfts, 50)),
        "ttft_p99": 1e3 * float(np.percentile(ttfts, 99)),
        "itl_p50": 1e3 * float(np.percentile(itls, 50)),
        "itl_p99": 1e3 * float(np.percentile(itls, 99)),
        "gap_p50": 1e3 * float(np.percentile(gaps, 50)),
        "gap_p99": 1e3 * float(np.percentile(gaps, 99)),
    }


def turns(sides: list[Side], rounds: int) -> Iterator[tuple[int, Side]]:
    """A B, B A, A B, ..."""
    for i in range(rounds):
        yield from ((i, side) for side in (sides if i % 2 == 0 else sides[::-1]))


def compare(sides: list[Side], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every number of clients, every round, every side; prints a line for each."""
    task, records = ReasoningTask("heldout"), []
    for side in sides:  # a turn that does not count
        asyncio.run(crowd(side, [task.example(i).prompt for i in range(4)], 2, 16))
    print(f"{'clients':>7} {'side':12} {'tok/s':>8} {'ttft p50':>9} {'p99':>8} "
          f"{'itl p50':>8} {'p99':>8} {'gap p50':>8} {'p99':>8} {'lost':>5}")  # fmt: skip
    for clients in options.clients:
        count = max(options.requests, 2 * clients)
        for i, side in turns(sides, options.rounds):
            first = 100 + i * count
            prompts = [task.example(first + j).prompt for j in range(count)]
            takes, seconds = asyncio.run(crowd(side, prompts, clients, options.max_tokens))
            found = figures(takes, seconds)
            records.append({"clients": clients, "round": i, "side": side.name, **found})
            show(records[-1])
            for text in {take.error for take in takes if take.error}:
                print(f"        lost: {text}")
    return records


def show(record: dict[str, Any]) -> None:
    columns = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "gap_p50", "gap_p99")
    times = " ".join(f"{record[name]:8.1f}" for name in columns)
    print(f"{record['clients']:7} {record['side']:12} {record['tokens_per_second']:8.1f} {times} "
          f"{record['lost']:5}", flush=True)  # fmt: skip


METHODS = ("stand", "prompt_lookup", "none", None)
KINDS = ("stream", "stream", "chat", "whole", "predicted", "vanishing", "refused")


async def mixed(client: httpx.AsyncClient, side: Side, prompt: str, most: int, seed: int) -> str:
    """One random request of a soak; what was wrong with its answer, if anything was."""
    rng = np.random.default_rng(seed)
    kind = KINDS[rng.integers(len(KINDS))]
    body: dict[str, Any] = {"model": side.model, "max_tokens": int(rng.integers(8, most + 1))}
    body |= {"temperature": float(rng.choice([0.0, 0.6, 1.0])), "n": int(rng.choice([1, 1, 3]))}
    body["speculation"] = {"method": METHODS[rng.integers(len(METHODS))], "statistics": True}
    chat, wanted = kind == "chat", 400 if kind == "refused" else 200
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    body["stream"] = kind in ("stream", "chat", "vanishing")
    if kind == "whole":
        body["logprobs"] = 3
    elif kind == "predicted":
        body["prediction"] = {"type": "content", "content": prompt}
    elif kind == "refused":
        body["temperature"] = -1
    try:
        url = f"{side.url}/{'chat/' * chat}completions"
        async with client.stream("POST", url, json=body) as answer:
            if answer.status_code != wanted:
                return f"{answer.status_code} {(await answer.aread())[:200]!r}"
            last = ""
            async for line in answer.aiter_lines():
                last = line or last
                if kind == "vanishing" and rng.random() < 0.2:
                    return ""
        if body["stream"] or kind == "refused":
            return "" if last == "data: [DONE]" or kind == "refused" else f"no end: {last[:200]}"
        return "" if all(c["finish_reason"] for c in json.loads(last)["choices"]) else last[:200]
    except httpx.HTTPError as error:
        return repr(error)


def soak(side: Side, options: argparse.Namespace) -> dict[str, Any]:
    """Mixed requests during so many looks at the server's memory, at least a second apart."""
    task, sizes, lost, counter = ReasoningTask("heldout"), list[int](), list[str](), count()
    clients = max(options.clients)

    async def one(client: httpx.AsyncClient) -> None:
        while len(sizes) < options.soak:
            number = next(counter)
            prompt = task.example(number % len(task)).prompt
            if wrong := await mixed(client, side, prompt, options.max_tokens, number):
                lost.append(wrong)

    async def watch() -> None:
        while len(sizes) < options.soak:
            sizes.append(resident(side.pid))
            if len(sizes) % 60 == 0:
                print(f"soak: {len(sizes)} looks, {len(lost)} lost, {sizes[-1] / 2**20:.1f} MiB",
                      flush=True)  # fmt: skip
            await asyncio.sleep(1)

    async def everybody() -> None:
        limits = httpx.Limits(max_connections=clients)
        async with httpx.AsyncClient(timeout=600, limits=limits) as client:
            await asyncio.gather(watch(), *(one(client) for _ in range(clients)))

    asyncio.run(everybody())
    third = max(len(sizes) // 3, 1)
    parts = [sizes[:third], sizes[third : 2 * third] or sizes, sizes[-third:]]
    mib = [float(np.median(part)) / 2**20 for part in parts]
    health = httpx.get(side.url.removesuffix("/v1") + "/health", timeout=60).json()
    found = {"requests": next(counter), "lost": len(lost), "mib_by_third": mib, "health": health}
    print(f"{found['requests']} requests, {len(lost)} lost; median memory by thirds "
          f"{', '.join(f'{m:.1f}' for m in mib)} MiB; then {health}")  # fmt: skip
    print(*dict.fromkeys(lost), sep="\n")
    return found


def resident(pid: int | None) -> int:
    """Bytes that a process holds in memory; 0 if unknown."""
    if pid is None:
        return 0
    text = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", text)[1])  # type: ignore[index]


@contextmanager
def ours(model: str, max_seqs: int) -> Iterator[list[Side]]:
    """Our server in a process of its own, as two contestants."""
    call = [sys.executable, "-m", "forerun.cli.main", "serve", model, "--port", "0"]
    call += ["--max-seqs", str(max_seqs), "--name", "model"]
    process = subprocess.Popen(call, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"at (http://\S+/v1)", line):
                url = found[1]
                threading.Thread(target=process.stderr.read, daemon=True).start()
                break
        else:
            raise SystemExit("forerun serve did not start")
        yield [
            Side("default", url, "model", {}, process.pid),
            Side("plain", url, "model", {"speculation": {"method": "none"}}, process.pid),
        ]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@contextmanager
def vllm(peers: Path, model: str, max_seqs: int) -> Iterator[list[Side]]:
    """vLLM's server in an environment of its own, as one contestant."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = str(door.getsockname()[1])
    call = [str(python_of(peers, "vllm")), "-m", "vllm.entrypoints.openai.api_server"]
    call += ["--model", embedded(model), "--served-model-name", "model", "--port", port]
    call += ["--host", "127.0.0.1", "--dtype", "bfloat16", "--max-num-seqs", str(max_seqs)]
    env = environment(0, env_of(peers, "vllm") | {"VLLM_CPU_KVCACHE_SPACE": "2"})
    env.pop(
        "VLLM_ENABLE_V1_MULTIPROCESSING", None
    )  # a server runs its engine in a process of its own
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(call, env=env, stdout=said, stderr=said)
        try:
            while not answers(f"{url}/health"):
                if process.poll() is not None:
                    said.seek(0)
                    raise SystemExit("no server of vLLM:\n" + said.read()[-4000:].decode())
                time.sleep(1)
            yield [Side("vllm", f"{url}/v1", "model", {}, process.pid)]
        finally:
            process.terminate()
            try:
                process.wait(30)
            finally:
                process.kill()


def answers(url: str) -> bool:
    """Whether a page is there."""
    try:
        return httpx.get(url, timeout=5).is_success
    except httpx.HTTPError:
        return False


def pair(text: str) -> tuple[str, str]:
    """An option NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value


def main() -> int:
    parser = scripts.parser(__doc__)
    parser.add_argument("--ours", default="reasoner", help="model of our server")
    parser.add_argument(
        "--url", type=pair, action="append", default=[], help="NAME=URL of another server"
    )
    parser.add_argument(
        "--model", type=pair, action="append", default=[], help="NAME=MODEL of that server"
    )
    parser.add_argument(
        "--vllm", type=Path, help="folder of `make peers`: also measure vLLM's server"
    )
    parser.add_argument("--clients", type=scripts.count, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument(
        "--requests", type=scripts.count, default=32, help="minimum requests per turn"
    )
    parser.add_argument("--rounds", type=scripts.count, default=2)
    parser.add_argument("--max-tokens", type=scripts.count, default=200)
    parser.add_argument(
        "--soak",
        type=scripts.measure,
        default=0.0,
        help="number of memory readings, a second apart; our server only",
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    models = dict(options.model)
    urls = dict(options.url)
    others = [Side(name, url.rstrip("/"), models.get(name, name)) for name, url in urls.items()]
    with ExitStack() as stack:
        own = stack.enter_context(ours(options.ours, max(options.clients)))
        if options.vllm:
            others += stack.enter_context(vllm(options.vllm, options.ours, max(options.clients)))
        if options.soak:
            found: Any = soak(own[0], options)
            lost = found["lost"]
        else:
            found = compare([*own, *others], options)
            lost = sum(record["lost"] for record in found)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if lost else 0


if __name__ == "__main__":
    scripts.run(main)
