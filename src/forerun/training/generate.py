"""Generates training records with a target: texts, optional top-k logits and hidden rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forerun import registry
from forerun.api import Model
from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Sequence
from forerun.core.roles import Target
from forerun.core.sampling import Sampling
from forerun.core.tree import chain
from forerun.engine.generation import Sample
from forerun.errors import ConfigError

from . import plans
from .data.documents import FIELDS
from .progress import Watch, counted, silent
from .records import Record, check_target, finished, identity, pack, prompt_file, write_records

CHUNK = 128  # tokens per forward pass of the target
SHARD = 256  # prompts per shard
TEMPERATURES = (0.0, 0.3, 0.6, 0.7, 0.8, 1.0)  # of target-generated training texts
HIDDEN, NOTHING = frozenset({"hidden"}), frozenset[str]()


@dataclass(frozen=True)
class TokenRows:
    """Outputs of a target at every token of a text; None if not requested."""

    top_ids: np.ndarray | None = None  # int32 [n, k]
    top_logp: np.ndarray | None = None  # float16 [n, k], at temperature 1
    tail_logp: np.ndarray | None = None  # float16 [n], log of the mass of all other tokens
    features: np.ndarray | None = None  # float16 [n, d]


def generate_records(
    model: Model,
    prompts: Many[str | list[int]],
    folder: Path,
    sampling: Sampling | Many[Sampling],
    *,
    seed: int = 0,
    batch: int = registry.DEFAULT_BATCH,
    top_k: int = 0,
    features: bool = False,
    drafter: str = registry.DEFAULT_DRAFTER,
    watch: Watch = silent,
) -> None:
    """Generates and writes the records of all prompts that are not in the folder yet.

    sampling: one, or a grid such as that of `temperatures`; each prompt is answered under every
    setting, `n` times. Each answer has its own random stream, so an interrupted run continues with
    the next prompt. top_k: number of most likely tokens to store per position, with the mass of all
    others. features: whether to store hidden rows. Raises ConfigError if the folder has records of
    another target or other settings.
    """
    annotate = _annotator(model.target, top_k, features)
    check_target(folder, model)
    grid = [sampling] if isinstance(sampling, Sampling) else list(sampling)
    wanted = grid_settings(grid, seed) | {"top_k_stored": top_k, "features": features}
    plans.check_plan(folder, wanted)
    plans.write_plan(folder, identity(model) | wanted, {"prompts": len(prompts)})
    done = finished(folder)
    left = [number for number in range(len(prompts)) if number not in done]
    show = counted(watch, "answers of the target", "prompts")
    show(len(done), len(prompts))
    run = _samples(model, prompts, left, grid, seed=seed, batch=batch, drafter=drafter)
    for num, (number, samples) in enumerate(run, len(done) + 1):
        ids = _ids(model, prompts[number])
        records = [_record(number, setting, ids, s, annotate) for setting, s in samples]
        write_records(prompt_file(folder, number), records)
        show(num, len(prompts))
    pack(folder, SHARD)


def settings(sampling: Sampling, seed: int) -> dict[str, Any]:
    """Generation settings for JSON."""
    known = asdict(sampling) | {"seed": seed}
    return {name: dict(v) if isinstance(v, dict) else v for name, v in known.items()}


def grid_settings(grid: Many[Sampling], seed: int) -> dict[str, Any]:
    """The settings of a grid for JSON; those of one setting are not nested."""
    if not grid:
        raise ConfigError("the grid of sampling settings is empty; give at least one")
    if len(grid) == 1:
        return settings(grid[0], seed)
    return {"grid": [settings(sampling, seed) for sampling in grid]}


def temperatures(
    values: Many[float] = TEMPERATURES, *, top_p: float = 0.95, n: int = 1, **fields: Any
) -> list[Sampling]:
    """A grid over temperatures; temperature 0 has one answer, the others n."""
    made = Sampling(top_p=top_p, n=n, **fields)
    greedy = replace(made, temperature=0.0, top_p=1.0, n=1)
    return [replace(made, temperature=t) if t else greedy for t in values]


def features(
    target: Target, tokens: Many[int], *, top_k: int = 0, hidden: bool = True
) -> TokenRows:
    """Top-k next tokens and hidden rows at every token of a text, in passes of CHUNK tokens."""
    seq = Sequence([tokens[0]], 1, Sampling(), SeededDice(0), limit=len(tokens))
    parts: dict[str, list[np.ndarray]] = {name: [] for name in FIELDS}
    try:
        for start in range(0, len(tokens), CHUNK):
            seq.tokens = list(tokens[: start + 1])
            tree = chain(list(tokens[start + 1 : start + CHUNK]))
            with target.lock:
                (rows,) = target.forward(ForwardBatch([seq], [tree], HIDDEN if hidden else NOTHING))
            if top_k:
                logp = torch.log_softmax(rows.logits.float(), -1)
                top = logp.topk(top_k, -1)
                tail = logp.scatter(-1, top.indices, -torch.inf).logsumexp(-1)
                parts["top_ids"].append(top.indices.int().cpu().numpy())
                parts["top_logp"].append(top.values.half().cpu().numpy())
                parts["tail_logp"].append(tail.half().cpu().numpy())
            if hidden:
                assert rows.hidden is not None
                parts["features"].append(rows.hidden.half().cpu().numpy())
    finally:
        target.release(seq)
    return TokenRows(**{name: np.concatenate(one) for name, one in parts.items() if one})


def _samples(
    model: Model, prompts: Many[Any], numbers: list[int], grid: list[Sampling], **options: Any
) -> Iterable[tuple[int, list[tuple[int, Sample]]]]:
    """Yields the number of each prompt and all its (setting, sample), in order of completion."""
    if not numbers:
        return
    waiting: dict[int, list[tuple[int, Sample]]] = {}
    size, num_answers = len(grid), sum(sampling.n for sampling in grid)
    run = model.run(
        [prompts[i] for i in numbers for _ in grid],
        grid * len(numbers),
        numbers=[size * i + setting for i in numbers for setting in range(size)],
        **options,
    )
    for sample in run:
        at, setting = divmod(sample.prompt_index, size)
        samples = waiting.setdefault(at, [])
        samples.append((setting, sample))
        if len(samples) == num_answers:
            del waiting[at]
            yield numbers[at], sorted(samples, key=lambda pair: (pair[0], pair[1].index))


def _annotator(target: Target, top_k: int, hidden: bool) -> Callable[[list[int]], TokenRows]:
    """A function that computes the rows of a text, on a twin: the run uses the target's cells."""
    if not top_k and not hidden:
        return lambda tokens: TokenRows()
    if top_k > target.vocab_size or top_k < 0:
        raise ConfigError(
            f"top_k must be from 0 to {target.vocab_size}, the vocabulary, got {top_k}"
        )
    twin = target.twin()
    return lambda tokens: features(twin, tokens, top_k=top_k, hidden=hidden)


def _ids(model: Model, prompt: str | list[int]) -> list[int]:
    return model.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)


def _record(
    number: int,
    setting: int,
    prompt: list[int],
    sample: Sample,
    annotate: Callable[[list[int]], TokenRows],
) -> Record:
    ids = [*prompt, *sample.tokens]
    mask = np.arange(len(ids)) >= len(prompt)
    return Record(number, np.array(ids, np.int32), mask, setting, **vars(annotate(ids)))
