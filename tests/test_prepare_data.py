"""`prepare_data.py pack` and `inspect` on the files that people really have: several, compressed, piped in, and with bad lines."""

import gzip
import io
import json
import os
import threading
import tracemalloc

import numpy as np
import pytest
from conftest import build_tokenizer, conversations

import prepare_data
from common.cli import check_input
from common.data import preparing
from common.data.store import TokenStore
from common.data.tokenizing import has_anchor
from common.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder)
    return str(folder)


@pytest.fixture
def pack(tokenizer, tmp_path, capsys):
    """pack(files, *flags) -> (summary, store)"""

    def pack(*arguments, output="store"):
        prepare_data.main(["pack", *map(str, arguments), "--target", tokenizer, "--output", str(tmp_path / output), "--json"])
        return json.loads(capsys.readouterr().out), TokenStore.open(tmp_path / output)

    return pack


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def rows_of(count, seed=0):
    return [{"messages": messages} for messages in conversations(count, seed)]


def answer(text):
    return {"prompt": "q", "completion": text}


def documents(store):
    return sorted(store.document(i)[0].tolist() for i in range(len(store)))


def test_plain_gzipped_piped_and_several_files_are_one_data_set(pack, tmp_path, monkeypatch):
    """The way data arrive must not change what is learnt; each document remembers its file for validation per source."""
    rows = rows_of(20)
    (tmp_path / "a.jsonl").write_bytes(jsonl(rows[:8]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(rows[8:])))
    (tmp_path / "all.jsonl").write_bytes(jsonl(rows))
    summary, several = pack(tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz")
    assert summary["documents"] == summary["accepted"] == summary["lines"] == 20 and summary["rejected"] == 0
    assert np.bincount(several.source_of).tolist() == [8, 12] and several.source_names == ["a", "b"]
    whole = pack(tmp_path / "all.jsonl", output="whole")[1]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(jsonl(rows))))
    piped = pack("-", output="piped")[1]
    assert documents(several) == documents(whole) == documents(piped)
    assert piped.source_names == ["stdin"]


def test_bad_lines_are_counted_with_their_locations_and_never_fatal(pack, tmp_path):
    """One broken line in a million must cost one line, and the user must be able to find it."""
    good, file = jsonl(rows_of(1)), tmp_path / "a.jsonl"
    bad = [
        b"not json\n",
        b"\n",
        b'{"messages": 3}\n',
        b"\xff\xfe\n",
        b"[" * 100000 + b"\n",
        b'"text"\n',
        b'{"text": "\\ud800"}\n',
        b'{"text": ""}\n',
    ]
    file.write_bytes(good + b"".join(line + good for line in bad) + good.strip())
    summary, store = pack(file)
    assert summary["lines"] == 18 and summary["rejected"] == len(bad) and summary["accepted"] == len(store) == 10
    assert sum(entry["count"] for entry in summary["rejects"].values()) == len(bad)
    found = sorted((line for entry in summary["rejects"].values() for line in entry["lines"]), key=lambda p: int(p.split(":")[-1]))
    assert found == [f"{file}:{2 * i + 2}" for i in range(len(bad))]
    assert summary["rejects"]["not JSON"]["lines"] == [f"{file}:2", f"{file}:10"]
    assert summary["rejects"]["not UTF-8"]["count"] == 1


def test_each_answer_may_be_a_document(pack, tmp_path, capsys):
    """`--split-turns` must reach the store, and its documents must be as many as there are answers."""
    rows = rows_of(6)
    (tmp_path / "a.jsonl").write_bytes(jsonl(rows))
    summary, store = pack(tmp_path / "a.jsonl", "--split-turns")
    assert len(store) == sum(message["role"] == "assistant" for row in rows for message in row["messages"]) > summary["accepted"] == 6
    assert all(np.flatnonzero(np.diff(store.document(i)[1])).size == 1 for i in range(len(store)))


def test_what_the_template_leaves_out_is_said(pack, tmp_path, capsys):
    """Thoughts that a template drops are half of what such a model writes; their loss must show where data is made and looked at."""
    (tmp_path / "a.jsonl").write_bytes(
        jsonl([{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ok", "reasoning": "why"}]}])
    )
    summary, _ = pack(tmp_path / "a.jsonl")
    assert summary["lost"] == {"thoughts": 3}
    prepare_data.main(["inspect", str(tmp_path / "store")])
    assert "the chat template leaves out 3 tokens: 3 of thoughts\n--split-turns makes" in capsys.readouterr().out


def test_a_line_without_end_costs_no_memory(pack, tmp_path, monkeypatch):
    """Six megabytes of an archive can be one line of six gigabytes: it costs that line, and the next ones are read."""
    monkeypatch.setattr("common.data.conversations.LINE_BYTES", 1 << 16)
    monkeypatch.setattr(preparing, "BATCH_BYTES", 1 << 14)
    long, longest = ({"messages": [{"role": "user", "content": "a" * size}]} for size in ((1 << 16) - 60, 1 << 24))
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        for row in (long, longest, *rows_of(3), longest):
            file.write(jsonl([row]))
    tracemalloc.start()
    summary, store = pack(tmp_path / "a.jsonl.gz")
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (summary["lines"], len(store), most_bytes < 8 << 20) == (6, 3, True)
    assert summary["rejects"]["a line of more than 0 MiB"]["lines"] == [f"{tmp_path}/a.jsonl.gz:{n}" for n in (2, 6)]
    assert summary["rejects"]["no assistant turn"]["count"] == 1


def test_a_pipe_is_read_and_a_folder_named(pack, tmp_path):
    """`pack <(zcat all.gz)` is a file that is there; and where nothing can be read the reason is the true one."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe.jsonl").write_bytes(jsonl(rows_of(3))))
    writer.start()
    assert pack(tmp_path / "pipe.jsonl")[0]["accepted"] == 3
    writer.join()
    with pytest.raises(UserError, match="it is a folder"):
        pack(tmp_path)
    with pytest.raises(UserError, match="Not a directory"):
        pack(__file__ + "/a.jsonl")
    with pytest.raises(UserError, match="it is no regular file, and has to be read twice"):
        check_input("--input", tmp_path / "pipe.jsonl", again=True)


def test_messages_that_are_text_are_read_or_called_so(pack, tmp_path):
    """Rows whose messages are a JSON text inside JSON are common: `no messages` sends the user to look for a missing key."""
    (row,) = rows_of(1)
    bad = [{"messages": "[half"}, {"messages": 3}]
    (tmp_path / "a.jsonl").write_bytes(jsonl([row, {"messages": json.dumps(row["messages"])}, *bad]))
    summary, _ = pack(tmp_path / "a.jsonl")
    assert summary["accepted"] == 2
    assert summary["rejects"]["its messages are text instead of a list of objects"]["lines"] == [f"{tmp_path}/a.jsonl:3"]
    assert summary["rejects"]["its messages are something else instead of a list of objects"]["lines"] == [f"{tmp_path}/a.jsonl:4"]


def test_a_cut_archive_gives_what_it_holds(pack, tmp_path):
    """A download that broke off is worth its whole lines, and says so."""
    compressed = gzip.compress(jsonl(rows_of(2000)))
    (tmp_path / "a.jsonl.gz").write_bytes(compressed[: len(compressed) // 2])
    summary, _ = pack(tmp_path / "a.jsonl.gz")
    assert summary["accepted"] > 100
    (reason,) = [reason for reason in summary["rejects"] if "cannot be read further" in reason]
    assert summary["rejects"][reason]["count"] == 1
    assert summary["accepted"] + summary["rejected"] == summary["lines"]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"{}\n", jsonl([{"prompt": "q", "completion": ""}])])
def test_nothing_usable_fails_and_leaves_nothing(tokenizer, tmp_path, content):
    """An empty store would fail hours later, on a cluster."""
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=r"none of . lines is usable"):
        prepare_data.main(["pack", str(tmp_path / "a.jsonl"), "--target", tokenizer, "--output", str(tmp_path / "store")])
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_mistyped_file_is_named_before_work_begins(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"nowhere.jsonl: no such file"):
        prepare_data.main(["pack", "nowhere.jsonl", "--target", tokenizer, "--output", str(tmp_path / "store")])
    with pytest.raises(UserError, match="no tokenizer could be loaded"):
        prepare_data.main(["pack", __file__, "--target", str(tmp_path), "--output", str(tmp_path / "store")])


def test_max_tokens_cuts_answers_and_keeps_their_mask(pack, tmp_path):
    """A long answer is worth its beginning; a document cut before its answer teaches nothing and is no document."""
    (tmp_path / "a.jsonl").write_bytes(jsonl([answer("a" * 100), answer("b"), {"prompt": "c" * 100, "completion": "d"}]))
    whole = pack(tmp_path / "a.jsonl")[1]
    limit = int(np.flatnonzero(whole.document(0)[1])[0]) + 10
    summary, cut = pack(tmp_path / "a.jsonl", "--max-tokens", limit, output="cut")
    assert (summary["accepted"], summary["truncated"], summary["rejected"]) == (2, 1, 1)
    assert summary["rejects"][f"no answer within --max-tokens {limit}"]["count"] == 1
    for (ids, mask), (longer_ids, longer_mask) in zip(
        (cut.document(0), cut.document(1)), (whole.document(0), whole.document(1)), strict=True
    ):
        assert ids.tolist() == longer_ids[:limit].tolist() and mask.tolist() == longer_mask[:limit].tolist()
    assert cut.document(0)[1].sum() == 10


def test_held_out_documents_are_apart_and_stay_apart(pack, tmp_path):
    """A document on both sides makes validation a memory test; a new choice on every run makes runs incomparable."""
    rows = rows_of(60)
    (tmp_path / "a.jsonl").write_bytes(jsonl(rows))
    (tmp_path / "b.jsonl").write_bytes(jsonl(rows[::-1] + rows[:30]))
    summary, train = pack(tmp_path / "a.jsonl", "--heldout", 7)
    heldout = TokenStore.open(tmp_path / "store-heldout")
    assert (len(train), len(heldout), summary["documents"], summary["heldout"]["documents"]) == (53, 7, 53, 7)
    assert not {tuple(ids) for ids in documents(train)} & {tuple(ids) for ids in documents(heldout)}
    assert all(has_anchor(heldout.document(i)[1]) for i in range(7))
    again = pack(tmp_path / "a.jsonl", "--heldout", 7, output="again")[1]
    assert again.fingerprint == train.fingerprint
    pack(tmp_path / "b.jsonl", "--heldout", 4, "--heldout-output", tmp_path / "apart", output="doubled")
    assert {tuple(ids) for ids in documents(TokenStore.open(tmp_path / "apart"))} <= {tuple(ids) for ids in documents(heldout)}
    pack(tmp_path / "a.jsonl", "--heldout", 7, "--seed", 1, output="other")
    assert documents(TokenStore.open(tmp_path / "other-heldout")) != documents(heldout)
    with pytest.raises(UserError, match="hold out fewer"):
        pack(tmp_path / "a.jsonl", "--heldout", 60, output="nothing")


def test_copies_stay_on_one_side_at_the_border_too(pack, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(rows_of(8) * 2))
    _, train = pack(tmp_path / "a.jsonl", "--heldout", 3)
    heldout = TokenStore.open(tmp_path / "store-heldout")
    assert (len(train), len(heldout)) == (10, 6), "three documents, written twice"
    assert not {tuple(ids) for ids in documents(train)} & {tuple(ids) for ids in documents(heldout)}


def test_a_store_replaces_a_store_and_nothing_else(pack, tmp_path):
    """Packing into a folder must not cost what else lies there, least of all the input or the other store."""
    (tmp_path / "a.jsonl").write_bytes(jsonl(rows_of(6)))
    for _ in range(2):
        pack(tmp_path / "a.jsonl", output="store")
    (tmp_path / "store/a.jsonl").write_bytes(jsonl(rows_of(6)))
    with pytest.raises(UserError, match=r"not \(only\) a token store"):
        pack(tmp_path / "store/a.jsonl", output="store")
    assert (tmp_path / "store/a.jsonl").exists() and (tmp_path / "store/meta.json").exists()
    for apart in ("new", "new/heldout"):
        with pytest.raises(UserError, match="lie in each other"):
            pack(tmp_path / "a.jsonl", "--heldout", 1, "--heldout-output", tmp_path / apart, output="new")
    assert not (tmp_path / "new").exists()


def test_template_kwargs_reach_the_template_and_the_record(pack, tmp_path):
    """Thinking mode is decided here; a store must be able to say how it was made."""
    (tmp_path / "a.jsonl").write_bytes(jsonl([answer("ok")]))
    plain, changed = pack(tmp_path / "a.jsonl")[1], "{{ mark }}{% for message in messages %}{{ message.content }}{% endfor %}"
    store = pack(tmp_path / "a.jsonl", "--chat-template-kwargs", json.dumps({"chat_template": changed, "mark": "!"}), output="other")[1]
    assert len(store.document(0)[0]) == len("!qok")
    assert store.meta["chat_template_kwargs"]["mark"] == "!"
    assert store.meta["template_digest"] != plain.meta["template_digest"] and plain.meta["chat_template_kwargs"] == {}


def test_the_summary_goes_where_it_is_asked_for(tokenizer, tmp_path, capsys):
    """Scripts read JSON, people read lines; an input behind `--json` must not be overwritten."""
    data = tmp_path / "a.jsonl"
    data.write_bytes(jsonl(rows_of(3)) + b"oops\n")
    command = ["pack", str(data), "--target", tokenizer, "--output", str(tmp_path / "store")]
    prepare_data.main([*command, "--json", str(tmp_path / "summary.json")])
    printed = capsys.readouterr().out
    assert json.loads((tmp_path / "summary.json").read_text())["accepted"] == 3
    assert "3 accepted" in printed and f"1 x not JSON ({data}:4)" in printed
    with pytest.raises(SystemExit):
        prepare_data.main([*command, "--json", str(data)])
    with pytest.raises(UserError, match=r"--json .* cannot be written"):
        prepare_data.main([*command, "--json", str(tmp_path)])
    assert b"oops" in data.read_bytes()


def test_inspect_shows_what_was_packed(pack, tmp_path, capsys):
    """The only way to see that the mask lies where it should, and no way for a document to write to the terminal."""
    (tmp_path / "a.jsonl").write_bytes(jsonl([answer("hi<|im_end|>\x1b[2J"), answer("second")]) + b"oops\n")
    pack(tmp_path / "a.jsonl")
    prepare_data.main(["inspect", str(tmp_path / "store")])
    overview = capsys.readouterr().out
    assert "2 documents" in overview and "1 x not JSON" in overview and "from a: 2" in overview and "#" in overview
    prepare_data.main(["inspect", str(tmp_path / "store"), "--document", "0"])
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "⟦<|im_start|>⟧assistant\n«hi<|im_end|>\\x1b[2J»«⟦<|im_end|>⟧»" in shown
    _, mask = TokenStore.open(tmp_path / "store").document(0)
    begin, end = np.flatnonzero(mask)[[0, -1]]
    assert f"{mask.sum() - 1} anchors may lie at {begin}-{end - 1}" in shown
    with pytest.raises(UserError, match="documents 0 to 1"):
        prepare_data.main(["inspect", str(tmp_path / "store"), "--document", "2"])


def test_inspect_in_colour(pack, tmp_path, capsys, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(jsonl([answer("hi")]))
    pack(tmp_path / "a.jsonl")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    prepare_data.main(["inspect", str(tmp_path / "store"), "--document", "0"])
    assert "\x1b[32mhi\x1b[0m\x1b[32;7m<|im_end|>\x1b[0m" in capsys.readouterr().out
