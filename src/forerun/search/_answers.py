"""Final answers in texts, and votes among them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many

from forerun.core.sampling import MAX_SAMPLES
from forerun.errors import ConfigError

Parse = Callable[[str], str | None]
_LINE = re.compile(  # stars are Markdown's
    r"^[ \t]*(?:\**Answer(?:\**:\**|\**[ \t])|####)[ \t]*\**[ \t]*([^\s:*].*?)[ \t]*\**[ \t]*$",
    re.M | re.I,
)
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")  # 1,200; not the list 1,2


def last_answer(text: str) -> str | None:
    r"""The last `\boxed{...}`, otherwise the last line `Answer: ...` or `#### ...`.

    Numbers are compared by value: 1,200 and 1200.0 are the same answer.
    """
    found = _boxed(text)
    if found is None:
        lines = _LINE.findall(text)
        found = lines[-1] if lines else None
    return _canonical(found) if found else None


def pattern(regex: str) -> Parse:
    """A parser: the last match's first group, or the whole match. Raises ConfigError."""
    try:
        wanted = re.compile(regex, re.MULTILINE)
    except re.error as error:
        raise ConfigError(
            f"{regex!r} is not a regular expression: {error}; escape special characters with a "
            "backslash"
        ) from None

    def parse(text: str) -> str | None:
        matches = [*wanted.finditer(text)]
        found = matches[-1].group(1 if wanted.groups else 0) if matches else None
        return _canonical(found) if found else None

    return parse


def as_parser(given: Parse | str | None) -> Parse:
    """A parser for a regular expression; None: `last_answer`."""
    if given is None:
        return last_answer
    return pattern(given) if isinstance(given, str) else given


def read(parse: Parse, texts: Iterable[str]) -> list[str | None]:
    """The answers of texts. Raises ConfigError if the parser returns neither text nor None."""
    answers = []
    for text in texts:
        answer = parse(text)
        if answer is not None and not isinstance(answer, str):
            raise ConfigError(
                f"parse must return a text, or None for no answer; got {answer!r:.80}"
            )
        answers.append(answer)
    return answers


def check_num(n: int) -> None:
    """Raises ConfigError if n is out of range."""
    if not isinstance(n, int) or not 1 <= n <= MAX_SAMPLES:
        raise ConfigError(
            f"n must be a whole number from 1 to {MAX_SAMPLES}, got {n!r}: a search keeps all "
            "samples in memory"
        )


def count_votes(answers: Many[str | None], weights: Many[float]) -> dict[str, float]:
    """Answer -> sum of its weights, largest first; ties: the answer seen first."""
    sums: dict[str, float] = {}
    for answer, weight in zip(answers, weights, strict=True):
        if answer is not None:
            sums[answer] = sums.get(answer, 0.0) + weight
    return dict(sorted(sums.items(), key=lambda pair: -pair[1]))


def usable_selection(select: str, scores: Many[float], note: Callable[[str], None]) -> str:
    """The selection; "score" in place of "weighted" if a score is negative."""
    if select != "weighted" or min(scores, default=0.0) >= 0:
        return select
    note("weighted votes need scores of at least 0; selecting by score instead")
    return "score"


def line_of_votes(answer: str | None, votes: dict[str, float]) -> str:
    """The chosen answer and the six largest votes, as text."""
    first = [*votes.items()][:6]
    shown = ", ".join(f"{other}: {weight:.4g}" for other, weight in first)
    return f"answer {answer or '(none)'}; votes {shown or '(none)'}"


def is_decided(answers: Many[str | None], left: int) -> bool:
    """Whether `left` further answers cannot change the majority, not even to a tie."""
    counts = [*count_votes(answers, [1.0] * len(answers)).values(), 0.0, 0.0]
    return counts[0] - counts[1] > left


def _boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for at in range(begin, len(text)):
        if text[at] == "}" and depth == 0:
            return text[begin:at]
        depth += {"{": 1, "}": -1}.get(text[at], 0)
    return None


def _canonical(answer: str) -> str:
    plain = answer.strip().rstrip(".").strip("$ ")
    if not _NUMBER.fullmatch(plain):
        return plain
    value = float(plain.replace(",", ""))
    is_long = len(plain) > 15  # more digits than a float has
    return plain if is_long else str(int(value)) if value == int(value) else repr(value)
