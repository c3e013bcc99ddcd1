"""Spec-Bench answer files and accounting, as published.

"A Comprehensive Survey of Speculative Decoding" (2024) and its repository. The accounting differs
from our reports: tokens of a method are counted ids, those of the baseline are re-tokenised answers
minus one per turn; the speed-up is the ratio of mean speeds, not the mean of ratios; the mean
accepted length is over all steps of all questions and includes the token of every step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forerun.bench.json_fields import has_type, shown, type_in_words
from forerun.bench.results import Record, SampleRecord
from forerun.errors import ConfigError, DataError
from forerun.tasks._lines import objects
from forerun.tasks.spec_bench import MT_BENCH, MT_CATEGORIES, Question, question_id
from forerun.utils.files import write_whole

GROUPS = (MT_BENCH, "translation", "summarization", "qa", "math_reasoning", "rag", "overall")
Answers = Sequence[dict[str, Any]]  # lines of an answer file


def answers(
    questions: Iterable[Question], records: Iterable[Record], model_id: str, time: float = 0.0
) -> list[dict[str, Any]]:
    """Lines of an answer file from the records of one method in one round.

    Questions without all turns are left out. Wall time includes the prefill, new_tokens the end
    token. decoding_steps is null for contestants that do not report passes. Raises ConfigError for
    several methods or samples, DataError without texts.
    """
    found = _by_turn(records)
    lines = []
    for question in questions:
        if _missing_turn(question, found):
            continue
        key = f"{model_id}/{question.id}/{time}"
        lines.append(
            {
                "question_id": question.id,
                "category": question.category,
                "answer_id": hashlib.sha256(key.encode()).hexdigest()[:22],
                "model_id": model_id,
                "choices": [_choice([found[name] for name in question.turn_ids])],
                "tstamp": time,
            }
        )
    return lines


def unanswered(questions: Iterable[Question], records: Iterable[Record]) -> list[str]:
    """The questions that `answers` leaves out, as "82 (turn 2 failed)"."""
    found = _by_turn(records)
    pairs = ((question, _missing_turn(question, found)) for question in questions)
    return [f"{shown(question.id)} ({why})" for question, why in pairs if why]


def _missing_turn(question: Question, found: Mapping[str, Record]) -> str:
    """Why a question has no complete answer; "" if it has one."""
    for turn, name in enumerate(question.turn_ids, start=1):
        if name not in found:
            return f"turn {turn} was not measured"
        if found[name].error is not None:
            return f"turn {turn} failed"
    return ""


def _by_turn(records: Iterable[Record]) -> dict[str, Record]:
    found: dict[str, Record] = {}
    for record in records:
        if record.id in found:
            first = found[record.id]
            raise ConfigError(
                f"{record.id} was run by {first.method} in round {first.round} and by "
                f"{record.method} in round {record.round}; an answer file has one answer each"
            )
        if record.error is None and len(record.samples) != 1:
            raise ConfigError(
                f"{record.id} has {len(record.samples)} samples; Spec-Bench needs one, with -n 1"
            )
        if record.error is None and record.samples[0].text is None:
            raise DataError(f"{record.id} has no text; run again with --texts, into another folder")
        found[record.id] = record
    return found


def _choice(turns: Sequence[Record]) -> dict[str, Any]:
    samples = [record.samples[0] for record in turns]
    return {
        "index": 0,
        "turns": [(sample.text or "").strip() for sample in samples],
        "decoding_steps": [sample.passes for sample in samples],
        "new_tokens": [sample.tokens for sample in samples],
        "wall_time": [record.seconds for record in turns],
        "accept_lengths": [n for sample in samples for n in accept_lengths(sample)],
    }


def accept_lengths(sample: SampleRecord) -> list[int]:
    """Tokens of each pass, the longest first; they sum to the sample's tokens.

    A record has the number of passes that accepted i drafts or more, not their order. Tokens cut at
    the end of the text are subtracted from the longest. Empty without a count of passes.
    """
    if sample.passes is None:
        return []
    at_least = [sample.passes, *sample.per_position, 0]
    lengths = [
        depth + 1
        for depth in range(len(at_least) - 2, -1, -1)
        for _ in range(at_least[depth] - at_least[depth + 1])
    ]
    excess = sum(lengths) - sample.tokens
    for i, length in enumerate(lengths):
        cut = min(max(excess, 0), length)
        lengths[i], excess = length - cut, excess - cut
    return lengths


def write_answers(path: Path, lines: Answers) -> None:
    """Writes an answer file atomically. Raises CapacityError."""
    write_whole(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def read_answers(path: Path) -> list[dict[str, Any]]:
    """The lines of an answer file, also in EAGLE's form. Raises DataError with file and line."""
    found: dict[int | str, dict[str, Any]] = {}
    for where, value in objects(path):
        name = question_id(where, value)
        if name in found:
            raise DataError(f"{where}: question_id {name!r} occurs twice; keep one answer")
        choices = value.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(first, dict):
            raise DataError(f"{where}: expected choices, a list with one object or more")
        if not isinstance(value.get("category"), str):
            raise DataError(f"{where}: category must be a text, got {value.get('category')!r}")
        _check_choice(where, first)
        found[name] = value
    return list(found.values())


def _check_choice(where: str, choice: dict[str, Any]) -> None:
    """Checks types and lengths of an answer's fields. Raises DataError with the field."""
    for key, kind in FIELDS.items():
        if key not in choice and key in OPTIONAL:
            continue
        items = choice.get(key)
        if not isinstance(items, list) or not has_type(items, kind):
            raise DataError(f"{where}: {key} must be {type_in_words(kind)}, got {shown(items)}")
        if key in PER_TURN and len(items) != len(choice["turns"]):
            raise DataError(
                f"{where}: {key} needs one number for each of {len(choice['turns'])} turns, got "
                f"{shown(items)}"
            )
    if not sum(choice["wall_time"]) > 0:
        raise DataError(f"{where}: wall_time must be above 0, got {shown(choice['wall_time'])}")


FIELDS: dict[str, Any] = {
    "turns": list[str],
    "new_tokens": list[int],
    "wall_time": list[float],
    "decoding_steps": list[int | None],
    "accept_lengths": list[int],
}
OPTIONAL = ("decoding_steps", "accept_lengths")
PER_TURN = ("new_tokens", "wall_time", "decoding_steps")


@dataclass(frozen=True)
class Speed:
    """The published figures of one group of questions."""

    group: str
    num_questions: int
    mean_accepted: float | None  # None if the file has no lengths
    tokens_per_second: float
    baseline_tokens_per_second: float
    speed_up: float


def speed(
    method: Answers, baseline: Answers, encode: Callable[[str], Sequence[int]], group: str
) -> Speed | None:
    """The published figures of one group; None if either file has no answers in it.

    encode: ids of a text by the model's tokenizer, default special tokens included.
    """
    here, there = _of_group(method, group), _of_group(baseline, group)
    if not here or not there:
        return None
    rates = [sum(c["new_tokens"]) / sum(c["wall_time"]) for c in here]
    plain = [sum(len(encode(t)) - 1 for t in c["turns"]) / sum(c["wall_time"]) for c in there]
    lengths = [n for choice in here for n in choice.get("accept_lengths", ())]
    rate, base = float(np.mean(rates)), float(np.mean(plain))
    accepted = float(np.mean(lengths)) if lengths else None
    return Speed(group, len(here), accepted, rate, base, rate / base if base else float("nan"))


def table(
    method: Answers, baseline: Answers, encode: Callable[[str], Sequence[int]]
) -> list[Speed]:
    """The published groups with answers in both files, "overall" last, over shared questions.

    Files with the same questions give Spec-Bench's own table.
    """
    here, there = _shared(method, baseline), _shared(baseline, method)
    found = (speed(here, there, encode, group) for group in GROUPS)
    return [row for row in found if row is not None]


def unshared(here: Answers, there: Answers) -> list[int | str]:
    """Ids of the questions answered only in the first file, in order."""
    keys = set(map(_key, there))
    return [line["question_id"] for line in here if _key(line) not in keys]


def _shared(here: Answers, there: Answers) -> Answers:
    """The first file's answers to questions of both files."""
    keys = set(map(_key, there))
    return [line for line in here if _key(line) in keys]


def _key(line: dict[str, Any]) -> tuple[int | str, str]:
    """Identity of a question."""
    return line["question_id"], line["category"]


def _of_group(lines: Answers, group: str) -> list[dict[str, Any]]:
    """First choices of the answers of a group."""
    return [
        line["choices"][0]
        for line in lines
        if group in ("overall", line["category"])
        or (group == MT_BENCH and line["category"] in MT_CATEGORIES)
    ]
