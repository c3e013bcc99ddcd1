"""A process scorer that checks arithmetic, without an answer key.

It recomputes every equation (`9 * 41 = 360 + 9 = 369`, `4 times 12 is 48`). Numbers on the left of
an equation, and numbers in sentences, must come from the problem or from earlier results. The
answer must be a computed result. It does not notice a correct sum that answers another question.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

# factors of the score
WRONG_EQUATION, RETRACTED_EQUATION = 0.1, 0.9
UNKNOWN_OPERAND, UNKNOWN_NUMBER, UNCOMPUTED_ANSWER = 0.3, 0.5, 0.1
MIN_SCORE = 1e-6

_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\d\w])")
_SPOKEN = re.compile(r"(\d+) (plus|minus|times|divided by) (\d+) is (\d+)")
_SIGNS = {"plus": "+", "minus": "-", "times": "*", "divided by": "/"}
_SIDE = r"[\d(][\d\s().+*/-]*[\d)]|\d"
_CHAIN = re.compile(rf"(?:{_SIDE})(?:\s*=\s*(?:{_SIDE}))+")
_ANSWER = re.compile(r"^\s*(?:Answer:|####)\s*(-?\d+(?:\.\d+)?)\s*$", re.MULTILINE)
_RETRACTION = re.compile(  # at the start of the next sentence
    r"(?:[^.\n]*[.\n])?\s*(?:wait|no|hmm|let me redo|i made a mistake|correction)\b", re.IGNORECASE
)
_WORDS = {
    "one": 1, "once": 1, "two": 2, "twice": 2, "double": 2, "doubles": 2, "half": 2, "three": 3,
    "triple": 3, "triples": 3, "third": 3, "four": 4, "quarter": 4, "five": 5, "fifth": 5,
    "six": 6, "sixth": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11,
    "twelve": 12, "dozen": 12,
}  # fmt: skip
_RULES: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass
class Ledger:
    """Known numbers and the score at a point of the text."""

    known: set[Fraction]
    computed: set[Fraction] = field(default_factory=set)  # results of correct equations
    score: float = 1.0


def arithmetic(prompt: str, text: str) -> float:
    """A score in (0, 1]: 1 without mistakes; every mistake multiplies it by a factor."""
    ledger = Ledger(numbers(prompt))
    text = normal(text)
    at = 0
    for chain in _CHAIN.finditer(text):
        _stated(text[at : chain.start()], ledger)
        _equation(chain.group(), text[chain.end() :], ledger)
        at = chain.end()
    _stated(text[at:], ledger)
    return max(ledger.score, MIN_SCORE)


def normal(text: str) -> str:
    """The text with products, sums in words and long numbers in one notation."""
    text = text.replace("$", "").replace("\u00d7", "*").replace("\u00f7", "/")
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    text = re.sub(r"(?<=[\d)]) x (?=[\d(])", " * ", text)
    return _SPOKEN.sub(lambda m: f"{m[1]} {_SIGNS[m[2]]} {m[3]} = {m[4]}", text)


def numbers(text: str) -> set[Fraction]:
    """Numbers that a text states, in digits or in words such as a third or twice."""
    text = normal(text)
    found = {Fraction(n) for n in _NUMBER.findall(text)}
    return found | {Fraction(_WORDS[w]) for w in re.findall(r"[a-z]+", text.lower()) if w in _WORDS}


def value(expression: str) -> Fraction | None:
    """The exact value of an arithmetic expression; None if it is not one."""
    try:
        return _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _evaluate(node: ast.expr) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in _RULES:
        return _RULES[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.Constant):
        return Fraction(str(node.value))
    raise ValueError


def _equation(chain: str, rest: str, ledger: Ledger) -> None:
    """Scores one chain a = b = c; adds its result to the known numbers."""
    sides = chain.split("=")
    values = [value(side) for side in sides]
    if None in values:
        return
    if not _are_equal(values, "." in chain):
        ledger.score *= RETRACTED_EQUATION if _RETRACTION.match(rest) else WRONG_EQUATION
        if not _RETRACTION.match(rest):
            ledger.known.update(v for v in values[-1:] if v is not None)
        return
    if not numbers(sides[0]) <= ledger.known:
        ledger.score *= UNKNOWN_OPERAND
    results = {v for v in values if v is not None}
    ledger.computed |= results
    ledger.known |= results


def _are_equal(values: list[Fraction | None], is_rounded: bool) -> bool:
    found = [v for v in values if v is not None]
    return max(found) - min(found) <= (Fraction(1, 200) if is_rounded else 0)


def _stated(text: str, ledger: Ledger) -> None:
    """Scores numbers outside equations, and the answer line."""
    for answer in _ANSWER.findall(text):
        if Fraction(answer) not in ledger.computed:
            ledger.score *= UNCOMPUTED_ANSWER
    for number in _plain(_ANSWER.sub("", text)):
        if number not in ledger.known:
            ledger.score *= UNKNOWN_NUMBER
            ledger.known.add(number)


def _plain(text: str) -> Iterator[Fraction]:
    return (Fraction(number) for number in _NUMBER.findall(text))
