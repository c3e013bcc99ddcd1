"""Written-out solutions of the reasoning task: order, wording, checks, corrections."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ._reasoning_words import capital, prefer, vary
from ._reasoning_world import Node, Story

CHECK_RATE = 0.07
MISTAKE_RATE = 0.05
WORDS = {"+": " plus ", "-": " minus ", "*": " times ", "/": " divided by "}


@dataclass(frozen=True)
class Style:
    """Style of one solution: line breaks, signs, wordiness."""

    break_lines: bool
    times: str  # "*" or "x"
    wordy: float  # chance of an opener, a unit, a reason

    @classmethod
    def draw(cls, rng: random.Random) -> Style:
        """A style at random."""
        return cls(rng.random() < 0.5, rng.choice("**x"), rng.choice((0.15, 0.5, 0.85)))

    def join(self, op: str, *operands: object) -> str:
        """Operands with the sign between them."""
        sign = self.times if op == "*" else op
        return f" {sign} ".join(str(x) for x in operands)


def write_solution(story: Story, rng: random.Random) -> str:
    """A solution of the story's question, ending in the line `Answer: N`."""
    style = Style.draw(rng)
    lines = _opening(story, rng, style)
    for place, i in enumerate(_order(story, rng)):
        lines.extend(_step(story.nodes[i], rng, style, first=place == 0))
    goal = story.nodes[story.goal]
    if rng.random() < 0.3:
        template = "[So the answer is|That gives|The result is|We end with] {r}[| {u}]."
        lines.append(vary(rng, template, r=goal.value, u=goal.unit))
    return ("\n" if style.break_lines else " ").join(lines) + f"\nAnswer: {goal.value}"


def _order(story: Story, rng: random.Random) -> list[int]:
    """The computed nodes that the goal needs, in a random topological order."""
    needed = story.needed()
    waiting = [i for i in needed if story.nodes[i].op]
    done = {i for i in needed if not story.nodes[i].op}
    order: list[int] = []
    while waiting:
        ready = [i for i in waiting if done.issuperset(story.nodes[i].needs)]
        order.append(prefer(rng, ready))
        done.add(order[-1])
        waiting.remove(order[-1])
    return order


def _opening(story: Story, rng: random.Random, style: Style) -> list[str]:
    """Optional first lines: a plan, and the given numbers."""
    lines = []
    if rng.random() < style.wordy / 2:
        plan = (
            "[Let us|We can|I will] [go|work|solve this] step by step."
            "|[Let us|We can|I will] work it out."
            "|[First|Here] the known numbers, then the rest.|We need to find [{goal}|the answer]."
        )
        lines.append(vary(rng, f"[{plan}]", goal=f"the number of {story.nodes[story.goal].unit}"))
    given = [story.nodes[i] for i in story.needed() if not story.nodes[i].op]
    if given and rng.random() < 0.4:
        rng.shuffle(given)
        head = vary(rng, "[Given|Known|We know|At first]: ")
        lines.append(head + ", ".join(f"{node.label} {node.value}" for node in given) + ".")
    return lines


def _step(node: Node, rng: random.Random, style: Style, first: bool) -> list[str]:
    """The sentences of one computation, sometimes with a corrected mistake or a check."""
    if node.num_steps == 1 and rng.random() < MISTAKE_RATE:
        wrong = _near(node.value, rng)
        lines = [_sentence(node, rng, style, first, wrong)]
        template = (
            "[Wait, that is not right|No, that is wrong|Hmm, not quite|Let me redo that"
            "|I made a mistake]: {e}."
        )
        lines.append(vary(rng, template, e=_plain(node, style)))
        if rng.random() < 0.5:
            lines.append(vary(rng, "[So {c}|Then {c}] {r}.", c=vary(rng, node.claim), r=node.value))
        return lines
    lines = [_sentence(node, rng, style, first)]
    if node.num_steps == 1 and rng.random() < CHECK_RATE:
        template = "[Check|To check|We check]: {e}[, right|, good|, correct|, as it should be|]."
        lines.append(vary(rng, template, e=_inverse(node, style)))
    return lines


def _sentence(
    node: Node, rng: random.Random, style: Style, first: bool, wrong: int | None = None
) -> str:
    """One computation in words; `wrong` replaces its result."""
    slots = {"c": vary(rng, node.claim), "l": vary(rng, node.label), "w": vary(rng, node.why)}
    r = node.value if wrong is None else wrong
    slots["r"], slots["e"] = str(r), _arithmetic(node, rng, style, wrong)
    slots["u"] = f" {node.unit}" if rng.random() < style.wordy else ""
    forms: tuple[str, ...] = _CLAIMS if rng.random() > 0.5 + style.wordy / 2 else _REASONS
    if " is " in slots["e"]:  # "4 times 12 is 48" cannot follow a verb
        forms = _SPOKEN
    text = vary(rng, prefer(rng, forms), **slots)
    if rng.random() < 0.1 + style.wordy:
        return vary(rng, _FIRST_OPENERS if first else _OPENERS) + text
    return capital(text)


# The subject, and mostly the reason, come before the numbers, so that attention can use them.
_CLAIMS = ("{c} {e}{u}.", "{l}: {e}{u}.", "{c} {e}{u}[, since|, because|, as] {w}.")
_REASONS = ("{l}: {w}[, so|, and|, hence|, giving] {e}{u}.", "{l}: {w}. [So|Then] {e}{u}.")
_SPOKEN = ("{l}: {w}[, so|, and|, hence] {e}{u}.",)
_FIRST_OPENERS = "[First|To start|To begin|At the start|Here|Well|Okay], "
_OPENERS = (
    "[Next, |Then |Also, |After that, |Further, |Again, |Okay, |Now for the next: "
    "|In turn, |Well, ]"
)


# Arithmetic.


def _arithmetic(node: Node, rng: random.Random, style: Style, wrong: int | None) -> str:
    """`a + b = r`, in signs or words; large ones with an intermediate form."""
    r = node.value if wrong is None else wrong
    args = list(node.args)
    if node.op in "+*" and len(args) == 2 and rng.random() < 0.15:
        rng.shuffle(args)
    if len(args) > 2:
        return _chain(args, style, rng.random() < 0.5)
    middle = _middle(node.op, args[0], args[1], rng, style)
    if not middle and rng.random() < 0.1:
        return WORDS[node.op].join(map(str, args)) + " is " + str(r)
    return " = ".join([style.join(node.op, *args), *middle, str(r)])


def _chain(args: list[int], style: Style, fold: bool) -> str:
    """A sum of several terms as running totals; three may be one chain: a + b + c = s + c = t."""
    total, parts = args[0], []
    if fold and len(args) == 3:
        a, b, c = args
        return " = ".join([style.join("+", a, b, c), style.join("+", a + b, c), str(a + b + c)])
    for x in args[1:]:
        parts.append(style.join("+", total, x) + " = " + str(total + x))
        total += x
    return ", ".join(parts)


def _middle(op: str, a: int, b: int, rng: random.Random, style: Style) -> list[str]:
    """Intermediate forms: by decimal places, or partial products."""
    if op == "*":
        return _product(a, b, rng, style)
    if op == "/":
        return _quotient(a, b, rng, style)
    if min(a, b) < 100 or rng.random() > 0.85:
        return []
    top = b - b % 100
    if b == top:
        return []
    return [
        style.join(op, style.join(op, a, top), b - top),
        style.join(op, a + top if op == "+" else a - top, b - top),
    ]


def _product(a: int, b: int, rng: random.Random, style: Style) -> list[str]:
    small, big = sorted((a, b))
    if big < 20 and small < 10 or big < 100 and small < 10 and rng.random() < 0.5:
        return []
    if small < 10:
        split = _places(big)
        return [style.join("+", *(small * part for part in split))] if len(split) > 1 else []
    split = _places(small)
    if len(split) == 1:
        return []
    products = [style.join("*", big, part) for part in split]
    return [style.join("+", *products), style.join("+", *(big * part for part in split))]


def _quotient(a: int, b: int, rng: random.Random, style: Style) -> list[str]:
    quotient = a // b
    split = _places(quotient)
    if len(split) == 1 or (quotient < 100 and rng.random() < 0.5):
        return []
    parts = style.join("+", *(part * b for part in split))
    return [style.join("/", f"({parts})", b), style.join("+", *split)]


def _places(n: int) -> list[int]:
    """The number by decimal places: 407 -> [400, 7]."""
    digits = str(n)
    return [int(d) * 10 ** (len(digits) - 1 - i) for i, d in enumerate(digits) if d != "0"]


def _plain(node: Node, style: Style) -> str:
    return style.join(node.op, *node.args) + " = " + str(node.value)


def _inverse(node: Node, style: Style) -> str:
    """The inverse computation: a check that gives the first operand."""
    turned = {"+": "-", "-": "+", "*": "/", "/": "*"}[node.op]
    a, b = node.args
    return style.join(turned, node.value, b) + " = " + str(a)


def _near(value: int, rng: random.Random) -> int:
    """A typical wrong value: off by one, ten, a hundred, or with swapped digits."""
    swapped = int(str(value)[::-1])
    options = [value + 1, value - 1, value + 10, value - 10, value + 2, swapped]
    options += [value + 100, value - 100] if value > 100 else []
    return rng.choice([x for x in options if x > 0 and x != value])
