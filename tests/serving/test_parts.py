"""Parts of the server that need no server."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes import FakeTarget, sequence, table_law
from forerun import registry
from forerun.cli.serve_checks import REASONER_TEMPLATE
from forerun.core.cost import Cost
from forerun.core.dice import EnumeratedDice, SeededDice
from forerun.core.records import Plan, Sequence, Step, Verdict
from forerun.core.sampling import Sampling
from forerun.core.tree import EMPTY, Tree, chain
from forerun.drafters.base import PerSequence
from forerun.engine.engine import Engine
from forerun.engine.stopping import Stops, Stream
from forerun.errors import ConfigError
from forerun.models.token_bytes import byte_alphabet
from forerun.models.tokenizer import Tokenizer
from forerun.serving.active_sequences import Choice
from forerun.serving.admission import Admission, Group
from forerun.serving.errors import ApiError
from forerun.serving.jobs import Job
from forerun.serving.methods import Methods
from forerun.serving.prediction import FIRST_CHAIN, PredictedText, Prediction
from forerun.serving.request_parser import parse
from forerun.serving.routing import MethodControllers, MethodDispatcher
from forerun.serving.schemas import ChatRequest
from forerun.serving.service import Service, freeze_garbage
from forerun.serving.settings import Settings
from forerun.serving.token_text import TokenText
from forerun.verifiers.recursive import Recursive
from served import environment


def job(tenant: str = "red", n: int = 1, prompts: int = 1, tokens: int = 4) -> Job:
    return Job([[1] * tokens] * prompts, Sampling(n=n), 0, "none", tenant)


def taken(groups: list[Group]) -> list[Job]:
    return [group.job for group in groups]


@pytest.mark.parametrize(
    "wrong",
    [{"drain": -1.0}, {"drain": math.inf}, {"drain": math.nan}, {"request_timeout": math.nan}],
)
def test_seconds_that_are_none(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be"):
        Settings(**wrong)


def test_places_go_to_who_has_fewest() -> None:
    queue = Admission(10, 4)
    reds, blue = [job() for _ in range(4)], job("blue")
    for one in [*reds, blue]:
        queue.add(one, 1.0)
    assert taken(queue.take(3, 100)) == [reds[0], blue, reds[1]]
    queue.release(reds[0])
    assert taken(queue.take(1, 100)) == [reds[2]]
    assert len(queue) == 1 and queue.num_sequences == 1


def test_a_large_group_is_waited_for_and_not_overtaken() -> None:
    queue = Admission(10, 4)
    small, large, late = job(n=3), job(n=4), job(n=1)
    for one in (small, large, late):
        queue.add(one, 1.0)
    assert taken(queue.take(4, 100)) == [small]
    assert queue.take(1, 100) == []
    for _ in range(3):
        queue.release(small)
    assert taken(queue.take(4, 100)) == [large]


def test_a_request_of_many_prompts_does_not_hold_up_the_next() -> None:
    queue = Admission(10, 4)
    many, one = job(prompts=8), job()
    queue.add(many, 1.0)
    queue.add(one, 1.0)
    assert taken(queue.take(4, 1000)) == [many, one, many, many]
    assert queue.drop(many) and not queue.drop(one)
    assert len(queue) == 0


def test_long_prompts_join_one_by_one() -> None:
    queue = Admission(10, 4)
    for _ in range(3):
        queue.add(job(tokens=60), 1.0)
    assert [len(queue.take(8, 100)) for _ in range(4)] == [1, 1, 1, 0]


def test_the_queue_is_bounded_for_each_tenant() -> None:
    queue = Admission(2, 1)
    for tenant in ("red", "red", "red", "blue"):  # the first of them has a place
        queue.add(job(tenant), 1.0)
    with pytest.raises(ApiError) as caught:
        queue.add(job("red"), 7.2)
    assert caught.value.status == 429 and caught.value.retry_after == 7.2
    queue.add(job("blue"), 1.0)


def test_who_finds_a_place_does_not_wait() -> None:
    """A crowd comes between two steps: all places are free, and nobody was admitted yet."""
    queue = Admission(1, 16)
    crowd = [job(n=4), job(prompts=4), job(n=4, prompts=2)]
    for one in crowd:
        queue.add(one, 1.0)
    queue.add(job(), 1.0)
    with pytest.raises(ApiError):
        queue.add(job(), 1.0)
    first = taken(queue.take(16, 100))  # one waits, and no place is free
    with pytest.raises(ApiError):
        queue.add(job(), 1.0)
    queue.release(first[0])  # who waits gets this place
    queue.add(job(), 1.0)


def drafts(prediction: Prediction, generated: list[int], most: int = 99) -> list[int]:
    return prediction.draft(generated, most).tokens.tolist()


def test_a_prediction_is_followed_doubled_and_found_again() -> None:
    text = list(range(100, 180))
    prediction = Prediction(PredictedText(text))
    assert drafts(prediction, []) == text[:FIRST_CHAIN]
    prediction.update_length(FIRST_CHAIN, FIRST_CHAIN)
    said = text[: FIRST_CHAIN + 1]
    assert drafts(prediction, said) == text[FIRST_CHAIN + 1 : 3 * FIRST_CHAIN + 1]
    prediction.update_length(2 * FIRST_CHAIN, 3)  # then something else came
    said += [*text[FIRST_CHAIN + 1 : FIRST_CHAIN + 4], 7]
    assert drafts(prediction, said) == []
    said += text[30:32]  # and the text is taken up further on
    assert drafts(prediction, said) == text[32 : 32 + FIRST_CHAIN // 2]
    assert drafts(prediction, said, most=2) == text[32:34]
    assert prediction.num_matched(said) == FIRST_CHAIN + 4 + 2


@pytest.mark.parametrize("size", [1, 3, 20])
def test_what_was_said_of_a_prediction_does_not_depend_on_the_steps(size: int) -> None:
    """Copied or not: seven tokens, then another, the last five, and the eight before them."""
    text = list(range(100, 120))
    said = [*text[:7], 7, *text[15:], *text[7:15], 9]
    prediction = Prediction(PredictedText(text))
    for end in range(0, len(said), size):
        prediction.draft(said[:end], max_nodes=0)
    assert prediction.num_matched(said) == prediction.num_matched(said) == 20


def test_a_prediction_that_never_holds_costs_one_node() -> None:
    prediction = Prediction(PredictedText([1, 2, 3, 1, 2, 3, 1, 2]))
    said: list[int] = []
    sizes = []
    for _ in range(6):
        sizes.append(len(drafts(prediction, said)))
        prediction.update_length(sizes[-1], 0)
        said += [1, 2]
    assert sizes[0] == 8 and max(sizes[3:]) == 1


def test_a_prediction_ends_where_its_text_does() -> None:
    prediction = Prediction(PredictedText([5, 6, 7]))
    assert drafts(prediction, [5, 6]) == [7]
    assert drafts(prediction, [5, 6, 7]) == []
    assert drafts(Prediction(PredictedText([])), []) == []


class Chain(PerSequence):
    """Drafts one fixed token; notes what it is shown."""

    labels = frozenset({"point"})

    def __init__(self, token: int) -> None:
        self.token, self.seen, self.ended = token, [], 0

    def draft(self, seq: Any, plan: Plan, dice: Any) -> Tree:
        return chain([self.token] * min(plan.nodes, plan.depth, 2))

    def observe(self, step: Any) -> None:
        self.seen += [(seq, len(tree)) for seq, tree in zip(step.seqs, step.trees, strict=True)]

    def finish(self, seq: Any) -> None:
        self.ended += 1


def test_every_sequence_drafts_by_its_own_method() -> None:
    parts = {"a": Chain(0), "b": Chain(1)}
    dispatcher = MethodDispatcher(parts)
    plans = MethodControllers("fixed:nodes=4", dispatcher)
    target = FakeTarget(table_law(1))
    target.cost = None
    engine = Engine(target, dispatcher, Recursive(), plans, max_seqs=4)
    seqs = [sequence([0, 1], 6, SeededDice(i), index=i) for i in range(4)]
    sizes = [None, 1, 0, None]
    for seq, name, nodes in zip(seqs, "abab", sizes, strict=True):
        dispatcher.assign(seq, name)
        plans.assign([seq], name, nodes, is_own=False)
        engine.submit(seq)
    engine.run()
    drafting = [[seqs[0]], [seqs[1], seqs[3]]]  # where nothing may be drafted nobody is asked
    for part, own_seqs in zip(parts.values(), drafting, strict=True):
        assert {seq for seq, _ in part.seen} == set(own_seqs) and part.ended == len(own_seqs)
    most = [
        max((n for s, n in parts[name].seen if s is seq), default=0)
        for seq, name in zip(seqs, "abab", strict=True)
    ]
    assert most == [2, 1, 0, 2]


def test_who_never_drafts_is_never_planned_for() -> None:
    """No plan, no decision about one, no step to learn from: plain decoding costs no more."""
    dispatcher = MethodDispatcher({"none": registry.make("drafter", "none"), "a": Chain(0)})
    plans = MethodControllers("fixed", dispatcher)
    target = FakeTarget(table_law(1))
    dispatcher.bind(target)
    plans.bind(target, dispatcher)
    seqs = [sequence([0, 1], 6, SeededDice(i)) for i in range(2)]
    for seq, name in zip(seqs, ("none", "a"), strict=True):
        plans.assign([seq], name, None, is_own=False)
    assert plans.plan(seqs[0]) == Plan(0, learns=False) and plans.plan(seqs[1]).nodes


def test_what_strangers_have_in_common_changes_no_plan_of_a_seed() -> None:
    """Nor what ours have in common with each other, for strangers may be between them."""

    def plans_of(strangers: int, own: tuple[int, int]) -> list[Plan]:
        dispatcher = MethodDispatcher({"a": Chain(0)})
        plans = MethodControllers("budget", dispatcher)
        target = FakeTarget(table_law(1))
        target.cost = Cost((1, 16, 257), (1.0, 10.0, 25.0))
        plans.bind(target, dispatcher)
        seqs = [sequence([0, 1], 10**6, SeededDice(i)) for i in range(strangers + 2)]
        for seq in seqs:
            dispatcher.assign(seq, "a")
        plans.assign(seqs[:strangers], "a", None, is_own=False)
        plans.assign(seqs[strangers:], "a", None, is_own=True)
        found = []
        for _ in range(60):
            asked = [plans.plan(seq) for seq in seqs]
            found += asked[strangers:]
            trees = [chain([1] * min(plan.nodes, 2)) if plan.nodes else EMPTY for plan in asked]
            verdicts = [Verdict(list(range(len(tree))), 0) for tree in trees]
            emitted = [v.tokens(t) for v, t in zip(verdicts, trees, strict=True)]
            laws: Any = [None] * len(seqs)
            leads = [*[0] * strangers, *own]
            plans.observe(Step(seqs, asked, trees, laws, verdicts, emitted, leads=leads))
        return found

    alone = plans_of(0, (0, 0))
    assert any(plan.nodes > 0 for plan in alone)
    assert all(plans_of(8, own) == alone for own in ((8, 8), (8, 9), (0, 0), (0, 9)))


def test_no_request_compiles_what_joins_a_prediction_and_a_draft() -> None:
    """In a process of its own: here another test may have compiled it."""
    code = (
        "from types import SimpleNamespace\n"
        "from forerun import registry; from forerun.growers import _merge\n"
        "from forerun.serving.routing import MethodDispatcher\n"
        "parts = {'none': registry.make('drafter', 'none')}\n"
        "MethodDispatcher(parts).bind(SimpleNamespace(is_async=False))\n"
        "print(len(_merge.overlay.signatures))"
    )
    call = [sys.executable, "-c", code]
    done = subprocess.run(call, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_what_was_there_at_the_start_is_not_searched_for_garbage(tiny_model: Any) -> None:
    Service(tiny_model, Settings()).warm_up()
    assert gc.get_freeze_count() == 0  # the process may be somebody else's
    try:
        freeze_garbage()
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()


def test_predictions_beside_a_method_keep_the_law() -> None:
    """Enumerated: the text's law is the target's, whatever the prediction says."""
    from fakes import exact_law

    law = table_law(5)
    for said in ([1, 2, 0], [0, 0, 0, 0], [2, 1]):
        expected = PredictedText(said)

        def program(dice: EnumeratedDice, expected: PredictedText = expected) -> tuple[int, ...]:
            dispatcher = MethodDispatcher({"a": Chain(1)})
            plans = MethodControllers("fixed:nodes=3", dispatcher)
            engine = Engine(FakeTarget(law), dispatcher, Recursive(), plans)
            seq = sequence([0, 1], 3, dice)
            dispatcher.assign(seq, "a", Prediction(expected))
            plans.assign([seq], "a", None, is_own=True)
            engine.submit(seq)
            engine.run()
            return tuple(seq.generated)

        found: dict[tuple[int, ...], float] = {}
        for text, probability in EnumeratedDice().outcomes(program):
            found[text] = found.get(text, 0.0) + probability
        for text, probability in exact_law(law, [0, 1], 3, Sampling()).items():
            assert found.get(text, 0.0) == pytest.approx(probability, abs=1e-12)


def test_methods_that_learn_do_so_by_tenant() -> None:
    methods = Methods({"mine": "stand:context=3", "all": "stand:scope=global"}, None)
    parts = methods.dispatcher(Recursive()).by_name
    inner = {name: part.drafter for name, part in parts.items()}
    assert [inner[name]._memories.scope for name in ("stand", "mine", "all")] == ["tenant"] * 2 + [
        "global"
    ]
    assert inner["mine"].context == 3 and set(inner) == set(methods.specs)
    assert methods.choose(None) == methods.default
    assert methods.choose("prompt-lookup") == "prompt_lookup"


def test_a_method_may_have_its_own_name_and_no_other_method_s() -> None:
    assert Settings(methods={"stand": "stand:context=3"}).methods
    for name in ("prompt_lookup", "auto", "", "stand of its own"):
        with pytest.raises(ConfigError, match="methods must"):
            Settings(methods={name: "stand:context=3"})


def test_bytes_of_pieces(tiny_folder: Path) -> None:
    assert sorted(byte_alphabet().values()) == list(range(256))
    tokenizer = Tokenizer.load(tiny_folder)
    pieces = TokenText(tokenizer)
    for text in ("the cat", "Zoë 你好 \U0001f642", " \n\t"):
        ids = tokenizer.encode(text)
        assert b"".join(pieces.bytes(token) for token in ids) == text.encode()
    assert pieces.text(0) == "<end>" and pieces.bytes(10**6) == b""
    assert pieces.text(tokenizer.encode("\U0001f642")[0]).startswith("bytes:\\xf0")


def test_the_mailbox_needs_no_loop_of_its_own() -> None:
    async def put() -> int:
        one = job()
        one.mailbox.put_nowait(ApiError(503, "x"))
        return (await one.mailbox.get()).status

    assert asyncio.run(put()) == 503
    assert np.isfinite(job().arrived)


def test_system_messages_that_a_template_leaves_out_are_told_once(
    tiny_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    says = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the cat"}]
    body = json.dumps({"messages": says}).encode()

    def ask() -> list[int]:
        return service.intake.chat(parse(ChatRequest, body), "").prompts[0]

    service = Service(tiny_model, Settings())
    shown = ask()
    assert not caplog.records, "this template shows all"
    tiny_model.tokenizer.inner.chat_template = REASONER_TEMPLATE
    assert ask() == ask() != shown
    (record,) = caplog.records
    assert (
        "does not support system messages: they are accepted, but the model does not see"
        in record.getMessage()
    )


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        (("user", "tool"), "does not support tool and function messages; put their content into a"),
        (("function",), "does not support tool and function messages"),
        (("system",), "an empty prompt: the model's chat template drops messages of role system"),
        (("system", "developer"), "drops messages of role developer or system; add"),
    ],
)
def test_what_a_template_leaves_out_is_told_to_who_sent_it(
    tiny_model: Any, roles: tuple[str, ...], said: str
) -> None:
    tiny_model.tokenizer.inner.chat_template = REASONER_TEMPLATE
    body = json.dumps({"messages": [{"role": role, "content": "36"} for role in roles]}).encode()
    with pytest.raises(ApiError, match=re.escape(said)) as caught:
        Service(tiny_model, Settings()).intake.chat(parse(ChatRequest, body), "")
    assert caught.value.status == 400 and caught.value.param == "messages"


class Words(Stream):
    """Token 7 is the word w7, and a blank."""

    def push(self, token: int) -> str:
        return f"w{token} "


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        ((), ["w1 ", "w2 ", "w3 "]),
        (("\n",), ["w1 ", "w2 ", "w3 "]),
        (("\n", "END"), [None, "w1 ", "w2 "]),
    ],
)
def test_a_token_waits_only_where_a_stop_string_may_take_back_its_end(
    stop: tuple[str, ...], shown: list[str | None]
) -> None:
    stops, seq = Stops((), Words), Sequence([9], 1, Sampling(stop=stop), SeededDice(1), limit=50)
    stops.start(seq)
    choice, found = Choice(job(), 0, seq), []
    for token in (1, 2, 3):
        seq.tokens += stops.cut(seq, [token])
        piece = choice.next_piece(stops)
        found.append(piece and piece.text)
    assert found == shown


CONTENTS = "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_a_template_leaves_out_nothing_of_messages_without_text(
    tiny_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Empty texts are messages, whatever their role, unless all of them are."""

    def ask(**contents: str) -> list[int]:
        messages = [{"role": role, "content": content} for role, content in contents.items()]
        body = json.dumps({"messages": messages}).encode()
        return service.intake.chat(parse(ChatRequest, body), "").prompts[0]

    tiny_model.tokenizer.inner.chat_template = CONTENTS
    service = Service(tiny_model, Settings())
    assert ask(user="the cat", tool="", system="") == ask(user="the cat") != []
    assert not caplog.records
    for contents in ({"user": ""}, {"user": "", "tool": ""}, {"system": ""}):
        with pytest.raises(ApiError, match="an empty prompt: none of them has text") as caught:
            ask(**contents)
        assert caught.value.status == 400 and caught.value.param == "messages"


def test_results_of_tools_that_a_template_shows_are_shown(tiny_model: Any) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tiny_model.tokenizer.inner.chat_template = template
    body = json.dumps({"messages": [{"role": "tool", "content": "36"}]}).encode()
    (prompt,) = Service(tiny_model, Settings()).intake.chat(parse(ChatRequest, body), "").prompts
    assert tiny_model.tokenizer.decode(prompt) == "tool: 36\n"
