"""Events of the reasoning task: changes of quantities, in time order."""

from __future__ import annotations

from ._reasoning_words import FRACTIONS, number
from ._reasoning_world import Node, Shape, Story, draw_divisor, draw_groups


def happen(story: Story, shape: Shape) -> None:
    reserve = 1 + len(story.subjects) // 2
    makers = [_gain, _lose, _gain_groups, _grow] + (
        [_give, _give, _give_part] if story.setting.give else [_lose_part]
    )
    have = sum(node.num_steps for node in story.nodes)
    for _ in range(12):
        if have >= story.rng.randint(*shape.steps) - reserve:
            return
        story.rng.choice(makers)(story, story.rng.choice(story.subjects))
        have = sum(node.num_steps for node in story.nodes)


def _change(story: Story, s: str, op: str, by: int, why: str, amount: int | None = None) -> None:
    """The subject's quantity after adding, taking or multiplying; `amount` is the node of `by`."""
    x = story.value(s)
    value = {"+": x + by, "-": x - by, "*": x * by}[op]
    needs = (story.current[s],) + (() if amount is None else (amount,))
    args = (by, x) if op == "*" else (x, by)
    claim = story.clause("{s} {now}", s=s)
    label = story.clause("{s} now", s=s)
    story.current[s] = story.add(Node(value, op, args, needs, claim, label, why, story.unit))


def _gain(story: Story, s: str) -> None:
    n = number(story.rng, 2, max(3, story.cap // 5))
    if story.value(s) + n > story.cap:
        return
    story.events.append(
        story.say(
            "[Then |Later |Next, |After that, |]{s} " + story.setting.gain + " {n} more {u}.",
            s=s,
            n=n,
        )
    )
    _change(story, s, "+", n, story.clause("[{n} more come in|we add {n}|{n} are added]", n=n))


def _lose(story: Story, s: str) -> None:
    if story.value(s) < 4:
        return
    n = number(story.rng, 2, story.value(s) - 1)
    story.events.append(
        story.say(
            "[Then |Later |Next, |After that, |]{s} " + story.setting.lose + " {n} {u}.", s=s, n=n
        )
    )
    _change(story, s, "-", n, story.clause("[{n} are gone|we take away {n}|{n} fall away]", n=n))


def _gain_groups(story: Story, s: str) -> None:
    k, n = draw_groups(story)
    if story.value(s) + k * n > story.cap:
        return
    g = story.rng.choice(story.setting.groups)
    story.events.append(
        story.say(
            "[Then |Later |]{s} " + story.setting.gain + " {k} {g} of {n} {u} each.",
            s=s,
            k=k,
            n=n,
            g=g,
        )
    )
    claim = story.clause("[{s} adds|the {g} of {s} come to]", s=s, g=g, k=k)
    why = story.clause("[it is {k} {g} of {n} each|there are {k} {g} of {n}]", k=k, g=g, n=n)
    amount = story.add(Node(k * n, "*", (k, n), (), claim, f"the {g} of {s}", why, story.unit))
    _change(
        story,
        s,
        "+",
        k * n,
        story.clause("[{m} more come in|we add {m}|{m} are added]", m=k * n),
        amount,
    )


def _grow(story: Story, s: str) -> None:
    k = story.rng.choice((2, 2, 3))
    if story.value(s) * k > story.cap:
        return
    word = {2: "doubles", 3: "triples"}[k]
    story.events.append(
        story.say("[Then |Later |]the number of {u} of {s} {word}.", s=s, word=word)
    )
    _change(story, s, "*", k, story.clause("[the number {word}|it {word}]", word=word))


def _give(story: Story, s: str) -> None:
    o = story.rng.choice([name for name in story.subjects if name != s])
    if story.value(s) < 4:
        return
    n = number(story.rng, 2, story.value(s) - 1)
    if story.value(o) + n > story.cap:
        return
    story.events.append(
        story.say(
            "[Then |Later |Next, |]{s} " + story.setting.give + " {n} {u} to {o}.", s=s, o=o, n=n
        )
    )
    _change(
        story,
        s,
        "-",
        n,
        story.clause("[{n} go to {o}|{s} gives {n} to {o}|{n} leave]", s=s, o=o, n=n),
    )
    _change(
        story,
        o,
        "+",
        n,
        story.clause("[{n} come from {s}|{o} gets {n} from {s}|{n} arrive]", s=s, o=o, n=n),
    )


def _amount_of_part(story: Story, s: str) -> tuple[int, int] | None:
    """(divisor, node) of a fraction of the subject's quantity; None if nothing divides it."""
    k = draw_divisor(story, story.value(s))
    if k is None:
        return None
    x, word = story.value(s), FRACTIONS[k]
    claim = story.clause("[{s} parts with|{word} of {s} is]", s=s, word=word)
    why = story.clause("[{word} of {x} goes|it is {word} of {x}]", word=word, x=x)
    node = Node(x // k, "/", (x, k), (story.current[s],), claim, f"{word} of {s}", why, story.unit)
    return k, story.add(node)


def _give_part(story: Story, s: str) -> None:
    o = story.rng.choice([name for name in story.subjects if name != s])
    if (
        story.value(o) + story.value(s) // 2 > story.cap
        or (part := _amount_of_part(story, s)) is None
    ):
        return
    k, amount = part
    m = story.nodes[amount].value
    template = "[Then |Later |Next, |]{s} " + story.setting.give + " {word} of the {u} to {o}."
    story.events.append(story.say(template, s=s, o=o, word=FRACTIONS[k]))
    _change(
        story,
        s,
        "-",
        m,
        story.clause("[{m} go to {o}|{s} gives {m} to {o}|{m} leave]", s=s, o=o, m=m),
        amount,
    )
    _change(
        story,
        o,
        "+",
        m,
        story.clause("[{m} come from {s}|{o} gets {m} from {s}|{m} arrive]", s=s, o=o, m=m),
        amount,
    )


def _lose_part(story: Story, s: str) -> None:
    if (part := _amount_of_part(story, s)) is None:
        return
    k, amount = part
    m = story.nodes[amount].value
    template = "[Then |Later |]{s} " + story.setting.lose + " {word} of the {u}."
    story.events.append(story.say(template, s=s, word=FRACTIONS[k]))
    _change(
        story, s, "-", m, story.clause("[{m} are gone|we take away {m}|{m} fall away]", m=m), amount
    )
