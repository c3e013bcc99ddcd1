"""Building an index on disk: sources, parts, interruptions, damage, bad input."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from forerun.errors import CapacityError, ConfigError, DataError
from forerun.ngrams import building, encoders, store
from forerun.ngrams.building import Options, build
from forerun.ngrams.checking import check
from forerun.ngrams.documents import Bad, Document, Reading, list_sources, read
from forerun.ngrams.infini import Index

TEXTS = ["to be or not to be", "not to be", "", "that is the question", "to be", "be"]
IDS = Options(tokenizer="ids", reading=Reading("tokens", is_ids=True), workers=1)
BYTES = Options(tokenizer="bytes", workers=1)


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "c.jsonl", [{"text": t, "n": i} for i, t in enumerate(TEXTS)])


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    rows = [{"tokens": rng.integers(0, 5, 40).tolist()} for _ in range(30)]
    return write_lines(tmp_path / "n.jsonl", rows)


def data(path: Path) -> dict[str, bytes]:
    """Every file of an index by name."""
    folder = path / store.read_manifest(path).folder
    return {f.name: f.read_bytes() for f in sorted(folder.iterdir()) if f.is_file()}


# sources


def test_counts_metadata_and_documents_of_a_built_index(corpus: Path, tmp_path: Path) -> None:
    manifest = build(tmp_path / "ix", [corpus], BYTES)
    index = Index.open(tmp_path / "ix")
    count = index.count_many([index.encoder.encode(t) for t in ("to be", "not", "xyz")])
    assert count.tolist() == [4, 2, 0]
    assert manifest.documents == len(TEXTS) and manifest.width == 2
    assert manifest.tokens == sum(map(len, TEXTS)) + len(TEXTS)
    for i, text in enumerate(TEXTS):
        passage = index.document(i)
        assert index.encoder.decode(passage.ids) == text and passage.length == len(text)
        assert passage.metadata == {"path": str(corpus), "line": i + 1, "fields": {"n": i}}
    assert check(tmp_path / "ix", deep=True) == []
    loaded = Index.open(tmp_path / "ix", load=True)
    assert loaded.count(list(b"to be")) == 4 and loaded.held_bytes > 0 == index.held_bytes


def test_all_forms_of_a_corpus_give_the_same_counts(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    zstandard = pytest.importorskip("zstandard")
    from pyarrow import ipc, parquet

    rows = [{"text": t} for t in TEXTS if t]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    forms = tmp_path / "forms"
    forms.mkdir()
    (forms / "a.jsonl").write_bytes(lines)
    with gzip.open(forms / "b.jsonl.gz", "wb") as file:
        file.write(lines)
    (forms / "c.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines))
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, forms / "d.parquet")
    dataset = forms / "e"  # as Dataset.save_to_disk of Hugging Face datasets leaves it
    dataset.mkdir()
    (dataset / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    with ipc.new_stream(str(dataset / "data.arrow"), table.schema) as writer:
        writer.write_table(table)
    (forms / "f.txt").write_text("\n".join(t for t in TEXTS if t) + "\n")
    (forms / ".hidden").write_text("to be")
    counts = []
    for form in sorted(forms.glob("[a-f]*")):
        build(
            tmp_path / "ix",
            [form],
            Options(tokenizer="bytes", reading=Reading(split="line"), workers=1),
            overwrite=True,
        )
        index = Index.open(tmp_path / "ix")
        counts.append((index.library.documents, *index.count_many([list(b"to be"), [98]])))
    assert counts == [(5, 4, 5)] * 6
    build(
        tmp_path / "all",
        [forms],
        Options(tokenizer="bytes", reading=Reading(split="line"), workers=1),
    )
    assert Index.open(tmp_path / "all").count(list(b"to be")) == 24


def test_text_files_are_cut_into_documents(tmp_path: Path) -> None:
    file = tmp_path / "t.txt"
    file.write_text("one\ntwo\n\n\nthree\n")

    def texts(split: str) -> list[tuple[int, str]]:
        return [
            (r.line, r.text) for r in read([file], Reading(split=split)) if isinstance(r, Document)
        ]

    assert texts("line") == [(1, "one"), (2, "two"), (5, "three")]
    assert texts("paragraph") == [(1, "one\ntwo"), (5, "three")]
    assert texts("file") == [(1, "one\ntwo\n\n\nthree\n")]
    with pytest.raises(ConfigError, match="split"):
        Reading(split="word")


def test_unreadable_records_are_named(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_bytes(
        b'{"text": "a"}\nno json\n{"other": 1}\n\xff\xfe\n[1]\n{"text": 5}\n{"text": "b"}\n'
    )
    found = list(read([file], Reading()))
    bad = [r for r in found if isinstance(r, Bad)]
    assert [b.where.rsplit(":", 1)[1] for b in bad] == ["2", "3", "4", "5", "6"]
    assert "no field 'text'" in bad[1].reason and "UTF-8" in bad[2].reason
    with pytest.raises(DataError, match=r"c.jsonl:2: no JSON .*--on-error skip"):
        build(tmp_path / "ix", [file], BYTES)
    skipping = Options(tokenizer="bytes", on_error="skip", workers=1)
    manifest = build(tmp_path / "ix", [file], skipping, restart=True)
    assert manifest.documents == 2 and manifest.skipped["count"] == 5
    assert "c.jsonl:2" in manifest.skipped["examples"][0]


def test_a_damaged_archive_is_one_unreadable_record(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"text": "a"}\n' * 1000)
    file = tmp_path / "c.jsonl.gz"
    file.write_bytes(whole[: len(whole) // 2])
    assert isinstance(list(read([file], Reading()))[-1], Bad)
    file.write_bytes(b"no archive")
    assert [type(r) for r in read([file], Reading())] == [Bad]


def test_a_pool_gives_what_one_process_gives(corpus: Path, tmp_path: Path) -> None:
    build(tmp_path / "one", [corpus], Options(workers=1, shards=3))
    build(tmp_path / "two", [corpus], Options(workers=2, shards=3))
    assert data(tmp_path / "one") == data(tmp_path / "two")


# parts


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("shards", [1, 3])
def test_parts_give_the_same_files_as_a_whole(
    numbers: Path, tmp_path: Path, width: int, shards: int
) -> None:
    def options(part: int) -> Options:
        return Options(
            tokenizer="ids",
            reading=Reading("tokens", is_ids=True),
            width=width,
            shards=shards,
            part=part,
            overlap=500,
        )

    build(tmp_path / "whole", [numbers], options(0))
    manifest = build(tmp_path / "parts", [numbers], options(90))
    assert data(tmp_path / "whole") == data(tmp_path / "parts")
    assert min(manifest.build["parts"]) > 3
    assert check(tmp_path / "parts", deep=True) == []


def test_parts_follow_from_memory() -> None:
    from forerun.ngrams.sorting import plan_parts
    from forerun.ngrams.suffix_array import part_bytes

    state = plan_parts([100_000_000, 1000], 2, 256 << 20, 2)
    longest = max(np.diff(state.borders[0]))
    assert (longest + state.overlap) * part_bytes(2) * 2 <= 256 << 20
    assert state.borders[0][-1] == 100_000_000 and state.borders[1] == [0, 1000]


# interruptions


class Cut(Exception):
    """The build ends here."""


def cut_at(stage: str, after: int) -> Callable[[str, int, int], None]:
    calls = []

    def report(name: str, done: int, total: int) -> None:
        if name == stage:
            calls.append(name)
            if len(calls) > after:
                raise Cut

    return report


@pytest.mark.parametrize(("stage", "after"), [("tokenise", 1), ("sort", 2), ("merge", 1)])
def test_a_build_that_was_cut_short_is_no_index_and_goes_on(
    numbers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, after: int
) -> None:
    from forerun.ngrams import tokenising

    monkeypatch.setattr(tokenising, "BATCH_DOCUMENTS", 4)
    monkeypatch.setattr(tokenising, "EVERY", 0.0)
    options = Options(
        tokenizer="ids",
        reading=Reading("tokens", is_ids=True),
        shards=2,
        part=100,
        overlap=500,
        threads=1,
    )
    build(tmp_path / "whole", [numbers], options)
    with pytest.raises(Cut):
        build(tmp_path / "ix", [numbers], options, report=cut_at(stage, after))
    with pytest.raises(DataError, match="cut short.*forerun index build"):
        Index.open(tmp_path / "ix")
    state = json.loads((tmp_path / "ix/building/state.json").read_text())
    assert state["tokenise"]["records"] == (4 if stage == "tokenise" else 30)
    seen = []
    manifest = build(tmp_path / "ix", [numbers], options, report=lambda *row: seen.append(row[0]))
    assert data(tmp_path / "ix") == data(tmp_path / "whole")
    assert manifest.build["resumed"] == 1 and not (tmp_path / "ix/building").exists()
    if stage != "tokenise":
        assert "tokenise" not in seen


def test_a_killed_process_leaves_a_build_that_goes_on(numbers: Path, tmp_path: Path) -> None:
    code = f"""
import os, sys
from forerun.ngrams.building import Options, build
from forerun.ngrams.documents import Reading
options = Options(tokenizer="ids", reading=Reading("tokens", is_ids=True), part=100, overlap=500)
build({str(tmp_path / "ix")!r}, [{str(numbers)!r}], options,
      report=lambda stage, done, total: os._exit(9) if stage == "merge" else None)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True)
    assert done.returncode == 9, done.stderr
    with pytest.raises(DataError, match="cut short"):
        Index.open(tmp_path / "ix")
    options = Options(
        tokenizer="ids", reading=Reading("tokens", is_ids=True), part=100, overlap=500
    )
    build(tmp_path / "ix", [numbers], options)
    build(tmp_path / "whole", [numbers], IDS)
    assert data(tmp_path / "ix") == data(tmp_path / "whole")


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def test_a_build_without_its_manifest_is_finished_later(
    numbers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = store.write_whole

    def refuse(file: Path, text: str) -> None:
        if file.name == "manifest.json":
            raise CapacityError("disk full")
        whole(file, text)

    monkeypatch.setattr(building, "write_whole", refuse)
    with pytest.raises(CapacityError):
        build(tmp_path / "ix", [numbers], IDS)
    monkeypatch.undo()
    seen = []
    build(tmp_path / "ix", [numbers], IDS, report=lambda *row: seen.append(row))
    assert not seen and Index.open(tmp_path / "ix").tokens == 30 * 41


def test_another_build_in_the_same_folder_is_refused(numbers: Path, tmp_path: Path) -> None:
    with pytest.raises(Cut):
        build(tmp_path / "ix", [numbers], IDS, report=cut_at("sort", 0))
    other = Options(tokenizer="ids", reading=IDS.reading, shards=2, workers=1)
    with pytest.raises(ConfigError, match=r"other shards; .*--restart"):
        build(tmp_path / "ix", [numbers], other)
    numbers.write_text(numbers.read_text() + '{"tokens": [1]}\n')
    with pytest.raises(ConfigError, match="other sources"):
        build(tmp_path / "ix", [numbers], IDS)
    assert build(tmp_path / "ix", [numbers], other, restart=True).documents == 31


def test_the_earlier_index_stays_until_the_new_one_is_whole(
    numbers: Path, corpus: Path, tmp_path: Path
) -> None:
    build(tmp_path / "ix", [corpus], BYTES)
    before = data(tmp_path / "ix")
    with pytest.raises(ConfigError, match="--overwrite"):
        build(tmp_path / "ix", [numbers], IDS)
    with pytest.raises(Cut):
        build(tmp_path / "ix", [numbers], IDS, overwrite=True, report=cut_at("sort", 0))
    with pytest.raises(DataError):
        build(tmp_path / "ix", [tmp_path / "no such"], IDS, overwrite=True)
    assert data(tmp_path / "ix") == before and check(tmp_path / "ix") == []
    open_before = Index.open(tmp_path / "ix")
    build(tmp_path / "ix", [numbers], IDS, overwrite=True)
    assert Index.open(tmp_path / "ix").tokens == 30 * 41
    assert open_before.count(list(b"to be")) == 4  # what is open stays readable
    assert len(list((tmp_path / "ix").glob("data-*"))) == 1


def test_two_builders_in_one_folder(numbers: Path, corpus: Path, tmp_path: Path) -> None:
    build(tmp_path / "ix", [corpus], BYTES)
    refused = pytest.raises(ConfigError, match=r"another build is at work .*process \d+")
    with store.Lock(tmp_path / "ix"), refused:
        build(tmp_path / "ix", [numbers], IDS, overwrite=True)
    assert Index.open(tmp_path / "ix").count(list(b"to be")) == 4
    build(tmp_path / "ix", [numbers], IDS, overwrite=True)


@pytest.mark.parametrize("most", [600, 4000])
def test_a_full_disk_is_an_error_that_can_be_mended(
    numbers: Path, corpus: Path, tmp_path: Path, most: int
) -> None:
    """A limit of the size of files stands for a full disk: in the tokens, and in the result."""
    build(tmp_path / "ix", [corpus], BYTES)
    code = f"""
import resource, sys
from forerun.errors import CapacityError
from forerun.ngrams import sorting
from forerun.ngrams.building import Options, build
from forerun.ngrams.documents import Reading
sorting.warm_up(4)  # compiled files must still be written
resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most}))
options = Options(tokenizer="ids", reading=Reading("tokens", is_ids=True), width=4, workers=1)
try:
    build({str(tmp_path / "ix")!r}, [{str(numbers)!r}], options, overwrite=True)
except CapacityError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True
    )
    assert "cannot write" in done.stdout and "earlier index" in done.stdout, done.stderr
    assert Index.open(tmp_path / "ix").count(list(b"to be")) == 4
    options = Options(tokenizer="ids", reading=IDS.reading, width=4, workers=1)
    build(tmp_path / "ix", [numbers], options, overwrite=True)
    assert Index.open(tmp_path / "ix").tokens == 30 * 41


# damage


@pytest.fixture
def sharded(numbers: Path, tmp_path: Path) -> Path:
    build(tmp_path / "ix", [numbers], Options(tokenizer="ids", reading=IDS.reading, shards=2))
    return tmp_path / "ix"


def file_of(path: Path, kind: str, shard: int) -> Path:
    return path / store.read_manifest(path).folder / store.file_name(kind, shard)


@pytest.mark.parametrize("kind", store.KINDS)
def test_a_flipped_bit_is_found(sharded: Path, kind: str) -> None:
    file = file_of(sharded, kind, 1)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)
    (found,) = check(sharded)
    assert found.file.endswith(f"{kind}.00001.{store.KINDS[kind]}") and "checksum" in found.problem


@pytest.mark.parametrize("kind", store.KINDS)
def test_a_truncated_file_is_found(sharded: Path, kind: str) -> None:
    file = file_of(sharded, kind, 0)
    size = file.stat().st_size
    os.truncate(file, size - 1)
    (found,) = check(sharded)
    assert (
        found.file.endswith(file.name) and found.problem == f"truncated: {size - 1} of {size} bytes"
    )
    with pytest.raises(DataError, match=f"{kind}.*truncated"):
        Index.open(sharded)


def test_a_missing_shard_or_file_is_found(sharded: Path) -> None:
    file_of(sharded, "suffixes", 0).unlink()
    (found,) = check(sharded)
    assert found.file.endswith("suffixes.00000.bin") and found.problem == "missing"
    for kind in store.KINDS:
        file_of(sharded, kind, 1).unlink()
    found = check(sharded)
    assert [f.file for f in found][-1] == "shard 1" and "missing" in found[-1].problem
    with pytest.raises(DataError, match="missing"):
        Index.open(sharded)


def test_a_damaged_manifest_is_found(sharded: Path) -> None:
    file = sharded / "manifest.json"
    text = file.read_text()
    for damaged in (text.replace('"width": 2', '"width": 4'), text[:-40], "[]"):
        file.write_text(damaged)
        (found,) = check(sharded)
        assert found.file == "manifest.json" and "damaged" in found.problem
        with pytest.raises(DataError, match="damaged"):
            Index.open(sharded)
    file.write_text(text.replace('"version": 1', '"version": 9'))
    with pytest.raises(DataError, match="version 9"):
        Index.open(sharded)
    with pytest.raises(DataError, match="no such folder"):
        check(sharded / "elsewhere")


def test_a_wrong_order_with_right_checksums_is_found_deep(sharded: Path) -> None:
    """Such as a sorter of another version would leave."""
    file = file_of(sharded, "suffixes", 0)
    table = np.fromfile(file, np.uint8).reshape(-1, 2)
    for damaged in (table[::-1], np.repeat(table[:1], len(table), axis=0)):
        np.ascontiguousarray(damaged).tofile(file)
        manifest = store.read_manifest(sharded)
        info = manifest.shards[0]
        files = dict(info.files) | {
            "suffixes": store.FileInfo(file.stat().st_size, store.sha256_of(file))
        }
        from dataclasses import replace

        shards = (replace(info, files=files), manifest.shards[1])
        (sharded / "manifest.json").write_text(replace(manifest, shards=shards).to_json())
        assert check(sharded) == []
        (found,) = check(sharded, deep=True)
        assert found.file == "suffixes.00000.bin"


# bad input


def test_ids_that_do_not_fit_are_named(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "n.jsonl", [{"tokens": [1]}, {"tokens": [2, 65535]}])
    with pytest.raises(DataError, match=r"n.jsonl:2: token id 65535 .* 2 bytes .*--width 4"):
        build(tmp_path / "ix", [file], IDS)
    wide = Options(tokenizer="ids", reading=IDS.reading, width=4, workers=1)
    assert build(tmp_path / "ix", [file], wide, restart=True).shards[0].top == 65535
    write_lines(file, [{"tokens": [-1]}])
    with pytest.raises(DataError, match="token id -1"):
        build(tmp_path / "other", [file], IDS)


def big_tokenizer(folder: Path, size: int) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_large_vocabulary_gets_four_bytes_and_a_remark(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "c.jsonl", [{"text": "w1 w69999 w2"}])
    large = str(big_tokenizer(tmp_path / "large", 70_000))
    manifest = build(tmp_path / "ix", [file], Options(tokenizer=large, width=2, workers=1))
    assert manifest.width == 4 and "4 bytes per token instead of 2" in manifest.notes[0]
    assert Index.open(tmp_path / "ix").count([69_999]) == 1
    manifest = build(tmp_path / "auto", [file], Options(tokenizer=large, workers=1))
    assert manifest.width == 4 and not manifest.notes
    most = str(big_tokenizer(tmp_path / "most", 65_535))
    assert building.choose_width(0, encoders.load(most))[0] == 2


def test_an_index_of_another_tokenizer_is_refused(corpus: Path, tmp_path: Path) -> None:
    build(tmp_path / "ix", [corpus], Options(workers=1))
    assert Index.open(tmp_path / "ix", tokenizer="reasoner").count([1]) >= 0
    with pytest.raises(ConfigError, match="built with tokenizer 'reasoner'.*not 'bytes'"):
        Index.open(tmp_path / "ix", tokenizer="bytes")


def test_empty_corpora_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    empty = tmp_path / "e.jsonl"
    empty.write_text("\n")
    with pytest.raises(DataError, match="found none in 1 files"):
        build(tmp_path / "ix", [empty], BYTES)
    write_lines(empty, [{"text": ""}])
    with pytest.raises(DataError, match="1 empty documents"):
        build(tmp_path / "ix", [empty], BYTES)
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="found none"):
        list_sources([tmp_path / "folder"])
    assert not (tmp_path / "ix/building").exists()


def test_options_that_cannot_work_are_refused() -> None:
    for wrong in ({"width": 3}, {"shards": 0}, {"on_error": "ignore"}, {"memory": 1 << 20}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Options(**wrong)


def test_end_ids_in_a_text_become_separators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        encoders.Ids, "eos", property(lambda self: 9, lambda self, _: None), raising=False
    )
    file = write_lines(tmp_path / "n.jsonl", [{"tokens": [9, 1, 9, 2, 9]}, {"tokens": [9]}])
    build(tmp_path / "ix", [file], IDS)
    index = Index.open(tmp_path / "ix")
    end = index.separator
    assert index.shards[0].text.tolist() == [end, 1, end, 2, end]
    assert index.eos == 9 and index.count([1, 9, 2]) == 1 and index.prob([2], 9).prob == 1.0
    assert index.document(0).ids == [1, 9, 2] and index.document(1).ids == []


def test_a_function_may_tokenise(corpus: Path, tmp_path: Path) -> None:
    build(
        tmp_path / "ix", [corpus], Options(tokenizer=lambda text: [ord(c) for c in text], workers=1)
    )
    index = Index.open(tmp_path / "ix")
    assert index.count([ord(c) for c in "to be"]) == 4
    with pytest.raises(DataError, match="knows no tokenizer"):
        index.encoder.encode("to be")
