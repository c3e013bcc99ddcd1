"""`forerun chat`: a conversation, its commands, and where each piece of text came from."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from command import Call
from rich.console import Console

import forerun
from forerun.cli.chat import COMMANDS, HELP, Chat, Terminal, with_memory
from forerun.cli.main import main
from forerun.core.sampling import Sampling
from forerun.engine.token_sources import OWN


@pytest.fixture(scope="module")
def model(tiny_folder: Path):
    return forerun.load(str(tiny_folder), dtype="fp32")


@pytest.fixture
def chat(model) -> Chat:
    law = Sampling(temperature=0, max_new_tokens=30, seed=0)
    return Chat(model, law, "prompt_lookup")


def terminal(chat: Chat, *lines: str, monkeypatch: pytest.MonkeyPatch) -> str:
    out = io.StringIO()
    said = iter(lines)

    def read(prompt: str = "") -> str:
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    Terminal(chat, Console(file=out, width=200, highlight=False)).run()
    return out.getvalue()


def test_pieces_joined_are_the_text_of_plain_decoding(chat: Chat, model) -> None:
    (plain,) = model.generate([chat.prompt("the cat sat")], chat.sampling, drafter="none")
    pieces = list(chat.answer("the cat sat"))
    assert "".join(piece.text for piece in pieces) == plain.text
    assert {piece.origin for piece in pieces} <= {OWN, "prompt_lookup"}


def test_accepted_drafts_carry_the_name_of_their_drafter(model) -> None:
    law = Sampling(temperature=0, max_new_tokens=60, ignore_eos=True)
    found = [
        piece
        for event in model.stream(
            ["the cat sat on the mat and the cat"],
            law,
            drafter="prompt_lookup",
            controller="fixed",
        )
        for piece in event.pieces
    ]
    (result,) = model.generate(
        ["the cat sat on the mat and the cat"], law, drafter="prompt_lookup", controller="fixed"
    )
    assert "".join(piece.text for piece in found) == result.text
    names = {piece.origin for piece in found}
    assert ("prompt_lookup" in names) == (result.stats.accepted > 0)
    assert result.stats.accepted > 0


def test_a_conversation_is_told_again(chat: Chat) -> None:
    chat.turns = [("user", "one"), ("assistant", "two")]
    shown = chat.prompt("three")
    if isinstance(shown, str):
        assert shown == "User: one\nAssistant: two\nUser: three\nAssistant:"
    chat.system = "Be kind."
    assert isinstance(shown, list) or str(chat.prompt("x")).startswith("Be kind.\nUser: one")


def test_answers_and_commands(chat: Chat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "said.txt"
    out = terminal(
        chat,
        "/stats",
        "the cat sat",
        "/stats",
        "/drafter none",
        "/temperature 0.5",
        "/temperature warm",
        "/drafter stnd",
        f"/save {file}",
        "/save /no/such/folder/x",
        f"/save {file}",
        "/save /dev/full",
        "/history",
        "/nonsense",
        "/reset",
        "/quit",
        "never read",
        monkeypatch=monkeypatch,
    )
    assert "no answer has ended yet" in out
    assert out.count("tau") >= 2
    assert chat.drafter == "none" and chat.sampling.temperature == 0.5
    terminal(chat, "/drafter auto", monkeypatch=monkeypatch)
    assert chat.drafter == "auto:scope=tenant"  # as at the start
    assert "expected a number, got 'warm'" in out
    assert "did you mean 'stand'" in out
    assert file.read_text().startswith("user: the cat sat\n\nassistant:")
    assert out.count("/x: No such file or directory; give another file") == 1
    for there in (file, "/dev/full"):
        assert f"{there} exists; give another file" in out
    assert "never read" not in out
    assert chat.turns == []


def test_an_empty_line_and_the_end_of_input(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    assert terminal(chat, "", monkeypatch=monkeypatch) == ""
    assert chat.turns == []


def test_ctrl_c_stops_an_answer_and_keeps_what_there_is(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Chat.answer

    def interrupted(self: Chat, text: str):
        for count, piece in enumerate(answer(self, text)):
            yield piece
            if count == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(Chat, "answer", interrupted)
    out = terminal(chat, "the cat sat", "/history", monkeypatch=monkeypatch)
    assert "stopped" in out
    assert [role for role, _ in chat.turns] == ["user", "assistant"]


def test_words_that_say_what_is_missing_or_unknown(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = terminal(
        chat, "/save", "/nonsense", "/drafter stand:entries=x", "/history", monkeypatch=monkeypatch
    )
    assert "/save needs the name of a file" in said
    assert "there is no command /nonsense; /help lists them" in said
    assert "takes a whole number, got 'x'" in said and chat.drafter == "prompt_lookup"
    assert said.endswith("the conversation is empty\n")


def test_a_system_message_is_shown_changed_and_dropped(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat.turns = [("user", "one"), ("assistant", "two")]
    said = terminal(chat, "/system", monkeypatch=monkeypatch)
    assert said == "there is no system message; /system TEXT sets one\n" and len(chat.turns) == 2
    assert terminal(chat, "/system Be kind.", monkeypatch=monkeypatch) == "Be kind.\n"
    assert chat.system == "Be kind." and not chat.turns
    chat.turns = [("user", "one"), ("assistant", "two")]
    assert terminal(chat, "/system ", monkeypatch=monkeypatch) == "Be kind.\n" and chat.turns
    terminal(chat, "/system -", monkeypatch=monkeypatch)
    assert not chat.system and not chat.turns


def test_a_drafter_remembers_the_whole_chat_unless_it_says_otherwise() -> None:
    assert with_memory("stand:context=3") == "stand:context=3,scope=tenant"
    assert with_memory("stand:scope=group") == "stand:scope=group" and with_memory("none") == "none"


def test_a_system_message_that_would_not_be_shown_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reasoner = Chat(forerun.load("reasoner"), Sampling(), "stand")
    turns = [("user", "one"), ("assistant", "two")]
    reasoner.turns = list(turns)
    said = terminal(reasoner, "/system Be kind.", monkeypatch=monkeypatch)
    assert "error: the prompt of reasoner has no place for a system message" in said
    assert not reasoner.system and reasoner.turns == turns
    assert terminal(reasoner, "/system -", monkeypatch=monkeypatch) and not reasoner.turns
    assert main(["chat", "--system", "Be kind."]) == 2
    assert capsys.readouterr().err.startswith(
        "error: the prompt of reasoner has no place for a system message"
    )


def test_every_command_is_known_and_a_misspelt_one_is_guessed(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = terminal(chat, "/hlep", "/tmperature 3", "/help", monkeypatch=monkeypatch)
    assert "did you mean /help?" in said and "did you mean /temperature?" in said
    assert said.endswith(f"{HELP}\n") and {"save", "quit", "system"} < set(COMMANDS)
    assert chat.sampling.temperature == 0
    said = terminal(chat, *(f"/{name}" for name in COMMANDS), monkeypatch=monkeypatch)
    assert "there is no command" not in said


def test_a_line_that_is_not_utf8_is_refused_and_the_next_is_answered(
    call: Call, monkeypatch: pytest.MonkeyPatch, tiny_folder: Path
) -> None:
    typed = io.BytesIO(b"the \xff cat\nthe c\xc3\xa4t\n/history\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(typed, encoding="ascii"))
    status, out, err = call("chat", tiny_folder, "--max-new-tokens=4")
    first, *rest = out.splitlines()
    assert first.startswith("error: this line is not UTF-8 text: byte 0xff after 4 characters; ")
    assert status == 0
    assert "user: the c\u00e4t" in rest and "error" not in err


def test_closed_input_is_told(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> None:
    from forerun.cli.main import main

    monkeypatch.setattr("sys.stdin", None)
    assert main(["chat", str(tiny_folder)]) == 2


def test_a_drafter_that_cannot_draft_is_refused_at_once(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = terminal(chat, "/drafter draft_model:model=draft", "/stats", monkeypatch=monkeypatch)
    assert "the draft and the target have different vocabularies" in said
    assert chat.drafter == "prompt_lookup"


def test_other_parts_of_a_chat_are_chosen_by_commands(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An answer under a constraint is that of Python; mistakes leave the parts as they were."""
    text = tmp_path / "style.txt"
    text.write_text("zzz zz z " * 50)
    spec = f"ngram_style:style={text},strength=1"
    model, shown = chat.model, [chat.prompt("the cat sat")]
    (held,) = model.generate(shown, chat.sampling, drafter="none", constraint=spec)
    (free,) = model.generate(shown, chat.sampling, drafter="none")
    assert held.text != free.text
    out = terminal(
        chat,
        f"/constraint {spec}",
        "/constraint corpsu:index=x",
        "/verifier recursive",
        "/verifier recursif",
        "/controller fixed:nodes=4",
        monkeypatch=monkeypatch,
    )
    assert "did you mean 'corpus'" in out and "did you mean 'recursive'" in out
    assert (chat.parts["verifier"], chat.parts["controller"]) == ("recursive", "fixed:nodes=4")
    assert "".join(piece.text for piece in chat.answer("the cat sat")) == held.text
    terminal(chat, "/constraint none", "/reset", monkeypatch=monkeypatch)
    assert "".join(piece.text for piece in chat.answer("the cat sat")) == free.text


def test_statistics_of_a_chat_have_no_tau_below_one(chat: Chat) -> None:
    text = "the cat sat on the mat"
    plain = "".join(piece.text for piece in chat.answer(text))
    assert chat.last is not None and chat.last.tau >= 1, plain
    chat.last.cut, chat.last.generated, chat.last.passes = 3, 7, 9
    assert chat.stats_text().startswith("7 tokens and 3 of a stop string in 9 passes, tau 1.11")


def test_a_line_that_is_too_long_is_not_called_prompt_0(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = terminal(chat, "cat " * 5000, monkeypatch=monkeypatch)
    assert "error: the prompt has" in said and "prompt 0" not in said
