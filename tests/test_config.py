"""Whatever stands in a preset or on the command line is read, or refused in a line of words: never a stack, never a screen full."""

import random
from pathlib import Path

import pytest
import yaml

from common import config_reader
from common.config_help import describe_keys
from common.config_reader import from_dict, load, to_dict, to_yaml
from common.errors import UserError

MOST_CHARACTERS = 1500
"""Of an error; the list of all keys of a section takes most of it."""

HOSTILE = {
    "a date that is none": "2020-13-45",
    "a tag that lies": "!!int abc",
    "a tag of nothing": "!!int ''",
    "a truth value that is none": "!!bool x",
    "a time that is none": "!!timestamp x",
    "a tag of Python": "!!python/object/apply:os.getcwd []",
    "a number of 5,000 digits": "9" * 5000,
    "another of 6,000": "0x" + "f" * 6000,
    "nested lists": "[" * 2000,
    "nested sections": "{a: " * 2000,
    "a list in itself": "&a [*a]",
    "a section in itself": "&a {b: *a}",
    "a merge of itself": "&a {<<: *a}",
    "an alias of nothing": "*a",
    "a key that is a list": "{[a]: b}",
    "half a character": '"\\ud800"',
    "a null character": '"a\\0b"',
    "a long text": "x" * 5000,
    "a long path": "x/" * 3000,
    "minutes of minutes": "1" + ":1" * 2000,
    "infinity": ".inf",
    "a set": "!!set {a}",
}
KEYS = ("target.path", "drafter.family", "drafter.layers", "drafter.taps", "optim.lr", "optim.betas", "log.tensorboard", "seed", "optim")


def error_of(*overrides: str, path: Path | None = None) -> str:
    """The error in words of a config, empty if there is none."""
    try:
        to_yaml(load(path, overrides))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_values_are_refused_in_a_line(tmp_path, value):
    """A stack of the YAML library's tells nobody which key to mend."""
    for key in KEYS:
        error = error_of(f"{key}={HOSTILE[value]}")
        assert len(error) < MOST_CHARACTERS and error.count("\n") == 0
        assert error or (key, value) == ("optim", "a merge of itself"), key  # that is an empty section
    preset = tmp_path / "preset.yaml"
    preset.write_text(f"optim:\n  steps: {HOSTILE[value]}\n")
    error = error_of(path=preset)
    assert error and len(error) < MOST_CHARACTERS


def test_a_document_of_references_costs_nothing(tmp_path):
    """A kilobyte that stands for a billion elements: whoever shows it in full, or merges it, takes all memory."""
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x]", *(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10))]
    merges = ["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: [{','.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 10))]
    for document in (lines, merges, ["optim:", *(f"  {line}" for line in lines)]):
        (tmp_path / "preset.yaml").write_text("\n".join(document))
        assert "references such as *name are not read here, write the value out" in error_of(path=tmp_path / "preset.yaml")


def test_a_preset_without_end_is_not_read(tmp_path):
    """`--config` of the wrong file: a data set, or a device that never ends."""
    (tmp_path / "preset.yaml").write_text("optim: {steps: 3}\n" + "#" * (1 << 20))
    assert "it has more than 256 KiB" in error_of(path=tmp_path / "preset.yaml")
    assert "it has more than 256 KiB" in error_of(path=Path("/dev/zero"))


def test_a_preset_that_cannot_be_read_is_named(tmp_path):
    """Else the user looks for a mistake in the file's text."""
    assert "Is a directory" in error_of(path=tmp_path)
    assert "File name too long" in error_of(path=tmp_path / ("x" * 300))
    (tmp_path / "latin1.yaml").write_bytes("target: {path: Stra\xdfe}".encode("latin-1"))
    assert "latin1.yaml is not valid YAML" in error_of(path=tmp_path / "latin1.yaml")


PIECES = (
    "1", "0", "-1", "1e3", "1e30", "1e999", "0.5", "nan", ".nan",
    "true", "null", "~", "auto", "never", "ce", "[", "]", "{", "}", ",", ":", ": ",

    "- ", "&a ", "*a", "!!int ", "!!float ", "!!str ", "<<", "? ", "| ", "> ", "'", '"', "\\", "\n", " ", "#", "%", "@", "\t", "\0", "\x1b",
    "é", "🙂",
    "2020-01-32", "0x", "0o", "1_0", "12:30", "target", "optim", "path", "steps", "=",
)  # fmt: skip


def test_random_overrides_and_presets_are_read_or_refused(tmp_path):
    """Two hundred seeded texts, half as values of real keys, half as files: what one of them raises a user's typing error raises."""
    draw = random.Random(0)
    keys = [line.split("=")[0].strip() for line in describe_keys().splitlines() if line.startswith("  ") and "=" in line.split("(")[0]]
    for number in range(200):
        text = "".join(draw.choice(PIECES) for _ in range(draw.randint(1, 8)))
        if number % 2:
            error = error_of(f"{draw.choice(keys)}={text}")
        else:
            (tmp_path / "preset.yaml").write_text(draw.choice(["", "optim:\n  ", "optim: ", "target: {path: "]) + text)
            error = error_of(path=tmp_path / "preset.yaml")
        assert len(error) < MOST_CHARACTERS, (number, text)


def test_numbers_beyond_their_bounds_are_refused():
    """An overflow in the middle of a run, or a list of a billion layers, instead of a word before it."""
    for key in ("drafter.layers", "drafter.heads", "drafter.head_dim", "drafter.window", "topology.targets", "optim.epochs", "optim.lr"):
        assert f"{key}={10**12} must be" in error_of(f"{key}={10**12}")


@pytest.mark.parametrize("key", config_reader.PATHS)
def test_what_cannot_be_a_path_is_refused_before_it_is_looked_for(key):
    """Else the first file operation raises a stack, on whichever rank comes to it."""
    for value in ("x" * 256, "y/" * 2500, '"\\0"', '"\\ud800"', '""'):
        error = error_of(f"{key}={value}")
        assert error.startswith((f"{key}=", f"{key} is empty")) and len(error) < 500


def test_a_config_comes_back_from_its_yaml():
    """config.yaml and the checkpoint's config are what a resume is compared with."""
    config = load(None, ["optim.lr=1e-3", "drafter.layer_types=[full_attention,sliding_attention]", "drafter.window=64"])
    assert to_dict(from_dict(yaml.safe_load(to_yaml(config)))) == to_dict(config)


def test_held_out_conversations_follow_the_data():
    """Another target's data on the quickstart's preset was refused for a held-out store that the user had never heard of."""
    mine = ("target.path=a", "data.path=b")
    assert load(None).validation.path == load(None, ["data.path=launch/quickstart/train"]).validation.path == "launch/quickstart/heldout"
    assert load(None, mine).validation.path == "auto"
    for named in ("mine", "null"):
        assert load(None, [*mine, f"validation.path={named}"]).validation.path == (None if named == "null" else named)
        assert load(None, [f"validation.path={named}", *mine]).validation.path != "auto"
