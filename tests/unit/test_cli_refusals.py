"""Bad input on the command line: one line, status 2, nothing lost."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command import CAT, Call, python, records
from safetensors.torch import load_file, save_file

from forerun.cli.output import Results
from forerun.cli.prompts import _read
from forerun.errors import CapacityError


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "--drafer", "stand"], "--drafter"),
        (["genrate"], "unknown command 'genrate'; did you mean 'generate'"),
        (["index", "buld"], "unknown command 'buld'; did you mean 'build'"),
        (["index", "fm", "find"], "known: build, count, locate (see `forerun index fm --help`)"),
        (["memory", "inspect", "a.mem"], "unknown command 'inspect'; known: cap, info, merge"),
        (["generate", *CAT, "-d", "stnd"], "'stand'"),
        (["serve", "--context", "1"], "--context must be at least 2 tokens, got 1"),
        (["serve", "--verifier", "typical"], "verifier 'typical' is lossy"),
        (["serve", "--method", "stand=prompt_lookup"], "--method must not use the name of another"),
        (["serve", "--method", "=stand"], "--method must be named by letters"),
        (["serve", "--method", "a=none", "--method", "a=stand"], "'a' is given twice, as none and"),
        (["serve", "--max-nodes", "1025"], "--max-nodes must be in 0..1024, got 1025"),
        (["serve", "--name", " "], "--name must not be empty"),
        (["serve", "--timeout", "-3"], "--timeout must be more than 0 seconds, got -3"),
        (["serve", "--dtype", "fp8"], "unknown dtype 'fp8'"),
        (["serve", "--device", "gpu"], "expected device auto, cpu, cuda or cuda:N, got 'gpu'"),
        (["serve", "--max-seqs", "0"], "--max-seqs must be at least 1, got 0"),
        (["serve", "--api-keys", "no.txt"], "keys from no.txt: No such file or directory; check"),
        (["serve", "--chat-template", "no.txt"], "no.txt: No such file or directory; check the"),
        (["serve", "--replicas", "0"], "'--replicas': Input should be greater than or equal"),
        (["serve", "--drain", "nan"], "--drain must be a number of seconds from 0 on, got nan"),
        (["generate", *CAT, "-d", "stand:contxt=3"], "'context'"),
        (["generate", *CAT, "-d", "kangaroo"], "'kangaroo' is not built yet"),
        (["generate", *CAT, "-d", "rsd"], "grower=gumbel --verifier recursive"),
        (["generate", *CAT, "--verifier", "transfer"], "verifiers that work: "),
        (["generate", *CAT, "-d", "auto:run=8,run=9"], "'run' of 'auto' is given twice, as 8"),
        (["generate", *CAT, "-d", "auto:parts=stand+stand"], "duplicate part 'stand'"),
        (["generate", *CAT, "-d", "auto:parts=none+stand"], "'none', which drafts nothing"),
        (["generate", *CAT, "--controller", "fixed:nodes=1,nodes=2"], "given twice, as 1 and as 2"),
        (["generate", *CAT, "--logit-bias", "5=1", "--logit-bias", "5=2"], "token 5 twice"),
        (["generate", "-p", ""], "--prompt is empty"),
        (["generate", "-p", "-", "-f", "-"], "can be read only once"),
        (["verify", "--law-prompts", "-1"], "--law-prompts must be at least 0"),
        (["generate", *CAT, "-d", "stand:context"], "context=VALUE"),
        (["generate", *CAT, "-d", "stand:entries=many"], "takes a whole number"),
        (["generate", *CAT, "-d", "draft_model"], "needs model"),
        (["generate", *CAT, "--verifier", "recursiv"], "'recursive'"),
        (["generate", *CAT, "--controller", "fixd"], "'fixed'"),
        (["generate", *CAT, "--controller", "additive", "--nodes", "3"], "'fixed'"),
        (["generate", *CAT, "--nodes", "-1"], "nodes"),
        (["generate", *CAT, "--controller", "additive:least=9,most=3"], "least <= depth"),
        (["generate", *CAT, "-d", "draft_model:model=X,grower=gumbl"], "'gumbel'"),
        (["generate", *CAT, "-d", "fuse:parts=stand+promt_lookup"], "'prompt_lookup'"),
        (["generate", *CAT, "-d", "fuse:parts=stand+draft_model"], "needs model"),
        (["generate", "-p", "a\udcffb"], "--prompt takes UTF-8, but what came is not UTF-8 text"),
        (["generate", *CAT, "--stop", "\udcff"], "stop must be non-empty texts in UTF-8, got"),
        (["generate", *CAT, "--temperature", "-0.5"], "temperature"),
        (["generate", *CAT, "--top-p", "0"], "top_p"),
        (["generate", *CAT, "-n", "0"], "'-n': Input should be greater than or equal to 1"),
        (["generate", *CAT, "-n", "two"], "integer"),
        (
            ["demo", "-n", "65537"],
            "n must be at most 65536 samples per prompt, got 65537; use more",
        ),
        (["fit-tree", "-n", "65537"], "n must be at most 65536 samples per prompt, got 65537"),
        (["generate", *CAT, "--min-new-tokens", "9", "--max-new-tokens", "8"], "min_new_tokens"),
        (["generate", *CAT, "--logit-bias", "5"], "ID=BIAS"),
        (["generate", *CAT, "--batch", "0"], "batch"),
        (
            ["generate", *CAT, "--prompt-file", "no/such.txt"],
            "such.txt: No such file or directory; check",
        ),
        (["generate", *CAT, "-m", "./no-such-folder"], "no-such-folder"),
        (["methods", "stnad"], "'stand'"),
        (["verify", "--prompts", "0"], "--prompts"),
        (["verify", "--temperature", "0"], "temperature"),
        (["verify", "--seconds", "-1"], "--seconds must be above 0, got -1"),
        (["verify", "--seconds", "nan"], "--seconds must be above 0, got nan"),
        (["demo", "--problems", "0"], "--problems must be in 1..10000, got 0"),
        (["demo", "--problems", "99999999"], "--problems must be in 1..10000, got 99999999"),
        (["memory", "cap", "a.mem", "--mb", "inf"], "--mb must be above 0 and at most"),
        (["memory", "info", "a.mem", "--nodes", "-1"], "'--nodes': Input should be greater"),
        (["index", "search", "ix", "a", "--seed", "-1"], "'--seed': Input should be greater"),
        (["index", "attribute", "ix", "a", "--limit", "-1"], "'--limit' / '-n': Input should be"),
        (["index", "fm", "build", "f", "a", "--sample", f"{10**30}"], "'--sample': Input should"),
        (["demo", "--drafter", "none"], "plain decoding"),
        (["verify", "--verifier", "greedy"], "verifier 'greedy' needs temperature 0, got 1.0"),
        (
            ["search", *CAT, "--verifier", "k_seq"],
            "'k_seq' does not accept the drafts of drafter 'auto'",
        ),
        (["search", *CAT, "-n", "0"], "n must be a whole number from 1 to 65536, got 0"),
        (["search", *CAT, "--batch", "0"], "--batch must be in 1..2147483647, got 0"),
        (["search", *CAT, "-m", "./nowhere"], "there is no model folder ./nowhere"),
        (["search", *CAT, "-m", "./nowhere", "--scorer", "reward:./gone"], "folder ./nowhere"),
        (["search", *CAT, "--out", __file__, "--scorer", "reward:./gone"], "and is not empty"),
        (["demo", "-m", "./nowhere"], "there is no model folder ./nowhere"),
        (["serve", "--verifier", "k_seq"], "'k_seq' does not accept the drafts of drafter 'auto'"),
        (["fit-tree", "--out", "."], "is a folder; give the name of a file"),
        (["bench", "run", "--out", __file__], "is a file; --out names a folder, give another"),
        (
            ["bench", "run", "--out", "no/such", "--methods", "stand:verifier=greedy"],
            "temperature 0",
        ),
        (["train", "reasner"], "'reasoner'"),
        (["train", "judge_head", "--out", __file__], "is a file; --out names a folder, give"),
        (["train", "reasoner", "--device", "auto"], "cpu, cuda or cuda:N to train on, got 'auto'"),
        (
            ["train", "reasoner", "--device", "cpu:0"],
            "cpu, cuda or cuda:N to train on, got 'cpu:0'",
        ),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_refused_before_a_model_is_loaded(call: Call, words: list[str], said: str) -> None:
    """And before the call is announced."""
    status, out, err = call(*words)
    assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith("error: "), err
    assert said in err


EARLY = {
    "--dtype fp8": "unknown dtype 'fp8'",
    "--device gpu": "expected device auto, cpu, cuda or cuda:N, got 'gpu'",
    "--weights int9": "weights must be auto, int8 or int8:INPUTS, got 'int9'; try int8",
    "-m ./nowhere": "there is no model folder ./nowhere; check the path",
    "-m ./reasonr": "there is no model folder ./reasonr; did you mean 'reasoner'?",
    "-m ''": "the name of the model is empty; give a folder, a hub id, a GGUF file",
    f"--batch {10**30}": "--batch must be in 1..2147483647, got 1000",
    "-d stand:context=99999999999": "context takes numbers from -2147483647 to 2147483647, got",
    "-d stand:context=99": "context must be a length or lengths in 1..32, got 99",
    "-d suffix:factor=nan": "factor takes numbers from -2147483647 to 2147483647, got 'nan'",
    "-d stand:context=-3": "context must be a length or lengths in 1..32, got -3",
    "-d suffix:min_prob=2": "min_prob",
    "-d fuse:parts=suffix+x": "'x'",
    "-d rasd": "rasd needs either a model or a drafter",
    "-d infini": "infini",
    "-d infini:index=nope": "index of drafter 'infini': there is no file or folder nope",
    "-d sam:corpus=nope": "corpus of drafter 'sam': there is no file or folder nope",
    "-d draft_model:model=./nowhere": "there is no model folder ./nowhere",
    "-d draft_model:model=draft,dtype=fp8": "unknown dtype 'fp8'",
    "--mix nope": "no index at nope",
    "--within nope": "nope does not exist; give a file made with `forerun index fm build`",
    "--style nope": "--style: there is no file nope; check the path",
    "--style ''": "--style: there is no file ''; check the path",
    "--style .": "--style: . is a folder; give the files in it",
    "--memory .": "is a folder; give the name of a file",
    "--memory nope/a.mem": "to write a.mem into; create it first",
    "--verifier greedy": "verifier 'greedy' needs temperature 0, got 1.0",
    "--verifier k_seq": "without replacement (swor); use verifier speculative, block, match",
}


def test_nothing_is_loaded_for_what_cannot_work(tmp_path: Path) -> None:
    """Real command lines in one fresh interpreter that cannot import torch."""
    code = (
        "import os, shlex, sys; sys.modules['torch'] = None; sys.stderr = sys.stdout; "
        f"os.chdir({str(tmp_path)!r}); from forerun.cli.main import main\n"
        f"for words in {list(EARLY)!r}:\n"
        "    print(main(['generate', '-p', 'the cat', '--json', *shlex.split(words)]))"
    )
    lines = python(code).splitlines()
    assert lines[1::2] == ["2"] * len(EARLY)
    for line, (words, said) in zip(lines[::2], EARLY.items(), strict=True):
        assert line.startswith("error: ") and said in line, words


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", 'column 1 (char 0); write an object per line, such as {"prompt": "..."}'),
        ('"a text"', 'line 2 needs an object with "prompt"'),
        ('{"prompt": [1, "a"]}', 'line 2 needs an object with "prompt"'),
        ('{"prompt": ""}', "line 2 has an empty prompt"),
        ('{"prompt": []}', "line 2 has an empty prompt"),
        ('{"prompt": "a", "temprature": 1}', "'temperature'"),
        ('{"prompt": "\\ud800"}', "line 2 is not UTF-8"),
        ('{"prompt": "a", "id": "\\ud800"}', "line 2 is not UTF-8"),
        ('{"prompt": "a", "stop": ["\\udc00"]}', "line 2 is not UTF-8"),
        ('{"prompt": "a", "top_p": 0}', "line 2: top_p"),
        ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", "a number in it has thousands of digits"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "line 2: logit_bias"),
    ],
)
def test_bad_prompt_lines_are_named(
    refuses: Callable[..., str], tiny: Path, tmp_path: Path, line: str, said: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    assert said in refuses("generate", "-m", tiny, "-f", file)


def test_bad_prompt_files(refuses: Callable[..., str], tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for name in ("empty.jsonl", "empty.txt"):
        said = refuses("generate", "-m", tiny, "-f", tmp_path / name)
        assert f"{name} is empty or blank: it holds no prompt; write" in said
    assert "UTF-8" in refuses("generate", "-m", tiny, "-f", tmp_path / "latin.txt")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_files_that_never_end_are_not_read_on(
    refuses: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.cli.prompts.MAX_PROMPT_BYTES", 1 << 20)
    said = "has more than 1 MiB; split it into several files"
    assert f"/dev/zero {said}" in refuses("generate", "-f", "/dev/zero")
    with open("/dev/zero") as endless:
        monkeypatch.setattr(sys, "stdin", endless)
        assert f"standard input {said}" in refuses("generate")


def test_prompts_are_read_in_pieces() -> None:
    """Room for the most that may come is not asked for at once."""
    asked: list[int] = []

    class Stream(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            asked.append(-1 if size is None else size)
            return super().read(size)

    data = "é".encode() * (3 << 20)
    assert _read("it", Stream(data)) == data.decode()
    assert min(asked) >= 0 and max(asked) <= 1 << 20


@pytest.mark.parametrize("text", ["", "\n", "\r\n"])
def test_empty_standard_input_says_where_a_prompt_may_stand(
    refuses: Callable[..., str], pipe: Callable[[str], None], text: str
) -> None:
    pipe(text)
    said = refuses("generate")
    assert "standard input is empty" in said and "--prompt TEXT or --prompt-file FILE" in said
    pipe(text)
    assert refuses("generate", *CAT, "-p", "-") == said


def test_bad_lines_on_standard_input_are_named(
    refuses: Callable[..., str], pipe: Callable[[str], None]
) -> None:
    pipe('{"prompt": "fine"}\n{"prompt": "a", "temprature": 1}\n')
    assert "standard input line 2: 'temprature'" in refuses("generate")


def test_bytes_that_are_no_text_on_standard_input(
    refuses: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    assert "standard input is not UTF-8" in refuses("generate")


def test_prompts_that_cannot_be_served(refuses: Callable[..., str], tiny: Path) -> None:
    assert "empty" in refuses("generate", "-m", tiny, "-p", "")
    assert "context" in refuses("generate", "-m", tiny, "-p", "cat " * 200)


def test_token_ids_beyond_the_vocabulary(refuses: Callable[..., str], tiny: Path) -> None:
    for flag in (["--ban", 9999], ["--logit-bias", "300=2"], ["--stop-token-id", 288]):
        assert "end at 287" in refuses("generate", "-m", tiny, *CAT, *flag)


def test_draft_with_another_vocabulary(
    refuses: Callable[..., str], tiny: Path, other: Path
) -> None:
    spec = f"draft_model:model={other}"
    assert "vocabularies" in refuses("generate", "-m", tiny, *CAT, "-d", spec)


def test_broken_model_folders(refuses: Callable[..., str], tiny: Path, tmp_path: Path) -> None:
    def broken(name: str) -> Path:
        return Path(shutil.copytree(tiny, tmp_path / name))

    corrupt = broken("corrupt")
    weights = corrupt / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "model.safetensors" in refuses("generate", "-m", corrupt, *CAT)
    silent = broken("silent")
    for file in silent.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer" in refuses("generate", "-m", silent, *CAT)
    strange = broken("strange")
    config = json.loads((strange / "config.json").read_text())
    config |= {"model_type": "warbler", "architectures": ["WarblerForCausalLM"]}
    (strange / "config.json").write_text(json.dumps(config))
    assert "warbler" in refuses("generate", "-m", strange, *CAT)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert str(empty) in refuses("generate", "-m", empty, *CAT)


def test_damaged_weights_are_named(refuses: Callable[..., str], tiny: Path, tmp_path: Path) -> None:
    """Cut short, with a header cut short, with a NaN, and too large for a number type."""
    folder = Path(shutil.copytree(tiny, tmp_path / "damaged"))
    file, words = folder / "model.safetensors", ("generate", "-m", folder, *CAT)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1000])
    expected = f"{file} has {len(whole) - 1000:,} bytes, but its header declares {len(whole):,};"
    assert expected in refuses(*words)
    file.write_bytes(whole[:1000])
    assert f"{file} has 1,000 bytes, but its header declares " in refuses(*words)
    held = load_file(tiny / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    for value, dtype, said in (
        (float("nan"), "auto", f"tensor {name} in {file} holds 1 values"),
        (float("inf"), "fp32", "NaN or infinite: these weights are damaged"),
        (1e5, "fp16", f"tensor {name} in {file} reaches 1e+05, and torch.float16 ends at"),
    ):
        held[name][3, 2] = value
        save_file(held, file)
        assert said in refuses(*words, "--dtype", dtype)


def test_results_are_never_overwritten(
    refuses: Callable[..., str], tiny: Path, tmp_path: Path
) -> None:
    out = tmp_path / "samples.jsonl"
    out.write_text("precious\n")
    assert "exists" in refuses("generate", "-m", tiny, *CAT, "--out", out)
    assert out.read_text() == "precious\n"
    said = refuses("generate", "-m", tiny, *CAT, "--out", tmp_path / "a" / "b")
    assert said.endswith("b: No such file or directory; give --out another place")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_named_and_the_sample_is_shown(generate: Call) -> None:
    status, out, err = generate(*CAT, "--json", "--out", "/dev/full")
    assert status == 2 and len(records(out)) == 1
    assert err.splitlines()[-1].startswith("error: cannot write /dev/full: No space left")


def test_a_line_that_does_not_fit_leaves_the_lines_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = Results(tmp_path / "samples.jsonl")
    results.write({"a": 1})
    whole = os.write
    rooms = iter([3])

    def short(file: int, data: bytes) -> int:
        room = next(rooms, None)
        if room is None:
            raise OSError(28, "No space left on device")
        return whole(file, data[:room])

    monkeypatch.setattr(os, "write", short)
    with pytest.raises(CapacityError, match="the 1 result written before is kept"):
        results.write({"b": 2})
    monkeypatch.undo()
    results.close()
    assert (tmp_path / "samples.jsonl").read_text() == '{"a": 1}\n'


@pytest.mark.parametrize("value", ["", " , "])
def test_a_variable_without_a_key_is_refused(
    refuses: Callable[..., str], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("FORERUN_API_KEYS", value)
    assert "has no key" in refuses("serve", "--port", "0")


def test_a_key_of_two_tenants_is_refused(refuses: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a:k1\nb:k1\n")
    said = refuses("serve", "--port", "0", "--api-keys", tmp_path / "keys")
    assert "line 2 of the API keys repeats a key" in said and "k1" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--method", "rest:index=no.idx"], "there is no file or folder no.idx"),
        (["--drafter", "stand:contxt=4"], "did you mean 'context'"),
        (["--constraint", "book=corpus:index=no.idx"], "no.idx"),
        (
            ["--target", "entropy_switch:small=./nowhere,threshold=1"],
            "there is no model folder ./nowhere",
        ),
        (
            ["--learn", "0.1", "--drafter", "stand"],
            "--learn needs a draft, and stand does not learn",
        ),
        (["./nowhere"], "there is no model folder ./nowhere"),
    ],
)
def test_a_server_is_checked_before_weights_are_loaded(
    refuses: Callable[..., str], monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.setattr("forerun.load", lambda *_, **__: pytest.fail("loaded"))
    assert said in refuses("serve", "--port", "0", *words)


def test_a_folder_without_weights_is_named_once(
    tiny_folder: Path, tmp_path: Path, refuses: Callable[..., str]
) -> None:
    folder = tmp_path / "empty"
    forms = ("*.safetensors", "*.index.json")
    shutil.copytree(tiny_folder, folder, ignore=shutil.ignore_patterns(*forms))
    said = refuses("generate", "-m", folder, *CAT)
    assert f"there are no weights in {folder} (model.safetensors" in said
    assert said.count("no weights") == 1 and "transformers" not in said
