"""What is written has one writer, a disk that is full costs nothing that was there, and nobody gets a success that is none."""

import contextlib
import json
import multiprocessing
import resource
from types import SimpleNamespace

import pytest
from conftest import conversations
from test_store import META, write_store
from writing import open_job, write_questions

import prepare_data
from common.config_reader import load
from common.data.store import StoreWriter, TokenStore
from common.errors import UserError
from common.locks import OutputLock
from common.training.plan import make_plan


@contextlib.contextmanager
def full_disk(after_bytes):
    """No file of this process grows beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_two_commands_do_not_write_one_file(tiny_target, tmp_path):
    """Two that append to one file each add every row: twice the conversations, half of them copies, and both say that all is well."""
    first = open_job(tiny_target, tmp_path / "out.jsonl", max_user_tokens=4)
    with pytest.raises(UserError, match=r"--output .*out.jsonl is being written by another command \(pid \d+ on .* since"):
        open_job(tiny_target, tmp_path / "out.jsonl", max_user_tokens=4)
    assert first.synthesize(2)["kept"] == 2
    assert names(tmp_path) == ["out.jsonl", "out.jsonl.settings.json"]
    assert open_job(tiny_target, tmp_path / "out.jsonl", max_user_tokens=4).synthesize(3)["kept"] == 3


def test_two_commands_do_not_pack_one_store(tmp_path):
    """Each would take the other's half-written folder away."""
    with StoreWriter(tmp_path / "store", dict(META)) as writer:
        with pytest.raises(UserError, match="is being written by another command"):
            StoreWriter(tmp_path / "store", dict(META))
        writer.add([1, 2], [1, 1])
    assert len(TokenStore.open(tmp_path / "store")) == 1 and names(tmp_path) == ["store"]


def _hold(path, held, end):
    lock = OutputLock("--output", path)
    held.set()
    end.wait(30)
    lock.drop()


def test_a_killed_command_blocks_nobody_and_leaves_nothing(tmp_path):
    """Else the next start asks the user to find out whether something still runs."""
    spawn = multiprocessing.get_context("fork")
    held, end = spawn.Event(), spawn.Event()
    holder = spawn.Process(target=_hold, args=(tmp_path / "store", held, end), daemon=True)
    holder.start()
    assert held.wait(30)
    (tmp_path / ".store.partial").mkdir()
    (tmp_path / ".store.partial" / "tokens.bin").write_bytes(b"half")
    with pytest.raises(UserError, match=f"pid {holder.pid} on"):
        StoreWriter(tmp_path / "store", {})
    holder.kill()
    holder.join()
    write_store(tmp_path / "store")
    assert names(tmp_path) == ["store"]


def test_a_full_disk_costs_no_store(tmp_path):
    """Packing again into a full disk must leave the store that was there, and say what is missing."""
    before = TokenStore.open(write_store(tmp_path / "store")).fingerprint
    with full_disk(40_000), pytest.raises(UserError, match=r"store cannot be written \(File too large\); make room"):
        write_store(tmp_path / "store", lengths=[5000] * 4, seed=1)
    assert TokenStore.open(tmp_path / "store").fingerprint == before and names(tmp_path) == ["store"]
    with full_disk(0), pytest.raises(UserError, match="make room"):
        write_store(tmp_path / "other")
    assert names(tmp_path) == ["store"]


def test_a_full_disk_costs_no_conversation(tiny_target, tmp_path):
    """What was written stays, a half-written row is none, and the same command goes on once there is room."""
    output = tmp_path / "out.jsonl"
    with full_disk(0), pytest.raises(UserError, match=r"--output .* cannot be written \(File too large\)"):
        open_job(tiny_target, output, max_user_tokens=4)
    assert names(tmp_path) == []
    with full_disk(2_500), pytest.raises(UserError, match=r"cannot be written \(File too large\); make room there, and start the same"):
        open_job(tiny_target, output, max_user_tokens=4).synthesize(12)
    whole = output.read_bytes().rpartition(b"\n")[0]
    assert whole and open_job(tiny_target, output, max_user_tokens=4).synthesize(12)["kept"] == 12
    assert output.read_bytes().startswith(whole)
    assert len({json.loads(line)["id"] for line in output.read_bytes().splitlines()}) == 12


NO_ROWS = (
    "null",
    "[]",
    "{}",
    '{"id": 3, "messages": []}',
    '{"id": "a", "messages": [null]}',
    '{"id": "\\ud800", "messages": []}',
    "{bad",
    "[" * 9999,
)


def test_a_row_that_is_none_is_named(tiny_target, tmp_path):
    """A run that goes on must know what it has; whoever edited the file is told the line."""
    output = tmp_path / "out.jsonl"
    open_job(tiny_target, output, max_user_tokens=4).synthesize(2)
    rows = output.read_bytes()
    for line in NO_ROWS:
        output.write_bytes(rows + line.encode() + b"\n")
        with pytest.raises(UserError, match=r"out.jsonl, line 3: no row that this command wrote .* take that line out"):
            open_job(tiny_target, output, max_user_tokens=4)
        assert output.read_bytes() == rows + line.encode() + b"\n"


def test_a_job_that_cannot_begin_leaves_nothing(tiny_target, tmp_path):
    """A file that nothing was written to looks like a run that failed, and keeps its settings for ever."""
    questions = write_questions(tmp_path / "given.jsonl")
    with pytest.raises(UserError, match="does not list a model"):
        open_job(tiny_target, tmp_path / "out.jsonl", server="http://127.0.0.1:1/v1", input=questions)
    with pytest.raises(UserError, match="device"):
        open_job(tiny_target, tmp_path / "out.jsonl", device="cuda:77", input=questions)
    assert names(tmp_path) == ["given.jsonl"]


def held_out(preset, store):
    """The held-out rows of a run on this store, whose validation.path is auto."""
    job = SimpleNamespace(first_per_host=lambda find: find(), drafters=1)
    return make_plan(load(preset, [f"data.path={store}"]), job).heldout


def test_what_was_not_held_out_of_the_data_is_no_validation(tiny_preset, tiny_target, tmp_path):
    """Packed again without --heldout the old held-out store stays, and all of its conversations are trained on."""
    data, store = tmp_path / "data.jsonl", tmp_path / "store"
    data.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations(48, seed=0)))
    pack = ["pack", str(data), "--target", str(tiny_target), "--output", str(store)]
    prepare_data.main([*pack, "--heldout", "6"])
    assert len(held_out(tiny_preset, store).store) == 6
    for heldout in ([], ["--heldout", "6", "--seed", "1", "--heldout-output", str(tmp_path / "elsewhere")]):
        prepare_data.main([*pack, *heldout])
        with pytest.raises(UserError, match=r"validation.path=auto: .*store-heldout is not what was held out of .*store.*pack again"):
            held_out(tiny_preset, store)
    prepare_data.main([*pack, "--heldout", "6"])
    assert len(held_out(tiny_preset, store).store) == 6
