"""What training knew of a drafter is compared with what is found later: other text, other tokens, another acceptance are named."""

import json
import shutil
from types import SimpleNamespace

import pytest
import yaml
from test_evaluate import drafter_folder, evaluate, prompts_file  # noqa: F401  (fixtures)

from common import config_reader
from common.config_reader import load
from common.data.chat import Chat, load_tokenizer
from common.data.store import StoreWriter, TokenStore
from common.errors import UserError
from common.evaluation.trained import _deviation, _heldout_problems
from common.families.__main__ import main as families
from common.training import opening
from common.training.plan import make_plan


@pytest.fixture
def run(drafter_folder, tmp_path):  # noqa: F811
    """run(store) -> the export of a run directory whose held-out store this is."""

    def run(store):
        export = tmp_path / "run" / "export" / "step_00000012"
        shutil.copytree(drafter_folder, export, dirs_exist_ok=True)
        (tmp_path / "run/config.yaml").write_text(yaml.safe_dump({"data": {"path": "d"}, "validation": {"path": str(store)}}))
        (tmp_path / "run/metrics.jsonl").write_text('{"step": 11}\n{"step": 12, "heldout_tau": 3.25}\n')
        return export

    return run


def write(folder, answers):
    with StoreWriter(folder, {}) as store:
        for prompt, answer in answers:
            store.add([*prompt, *answer], [0] * len(prompt) + [1] * len(answer))
    return folder


def test_held_out_and_decoded_acceptance_are_compared_on_the_same_prompts(evaluate, run, tmp_path):  # noqa: F811
    """A drafter with a held-out tau of 3.11 decoded at 1.55: its conversations were tokens that its target never writes."""
    flags = ("--max-new-tokens", 12, "--tree-budget", "2", "--verify", 0)
    report, _ = evaluate(*flags)
    assert "asked" not in report["training"] and report["training"]["problems"] == []
    answers = [(prompt["prompt_ids"], prompt["output_ids"]) for prompt in report["per_prompt"]]
    report, printed = evaluate("--drafter", run(write(tmp_path / "own", answers)), *flags)
    found = report["training"]
    assert found["asked"] == 3 and found["other_tokens"] == 0 and found["tau_held_out"] == found["tau_written"] == report["tau"]
    assert found["problems"] == [] and "all held-out turns in training: 3.25" in printed
    others = [(prompt, [(token + 1) % 250 for token in answer]) for prompt, answer in answers]
    report, printed = evaluate("--drafter", run(write(tmp_path / "others", others)), *flags)
    assert report["training"]["other_tokens"] == 3 and "3 of them other tokens" in printed


def test_a_difference_beyond_rounding_is_an_error_that_names_its_cause():
    """What a user sees otherwise is a drafter that validates well and serves badly, and no word why."""
    found = {"asked": 96, "other_tokens": 51, "same_texts": 40, "tau_held_out": 3.11, "tau_written": 1.55, "deviation": 0.1}
    (problem,) = _heldout_problems(found)
    assert "tau 3.11, decoding 1.55: 51 of 96 held-out answers are other tokens" in problem
    assert not _heldout_problems(found | {"tau_written": 2.9}) and not _heldout_problems(found | {"deviation": 0.6})
    assert not _heldout_problems(found | {"same_texts": 0}), "answers that were sampled have an acceptance of their own"
    (problem,) = _heldout_problems(found | {"other_tokens": 0})
    assert "the answers are the same tokens" in problem
    ones, threes = ([SimpleNamespace(accepted=[n] * 4) for _ in range(8)] for n in (1, 3))
    assert _deviation(ones, threes) == 0.0
    mixed = [SimpleNamespace(accepted=[n] * 4) for n in (0, 4) * 4]
    assert _deviation(ones, mixed) == pytest.approx(2 / 8**0.5)


def test_data_packed_with_another_template_are_named(evaluate, run, tiny_target, tmp_path, capsys):  # noqa: F811
    """A drafter asked in another template reads what it was never trained on, and only its tau would tell."""
    export, chat = run(tmp_path / "none"), Chat(load_tokenizer(tiny_target))
    config = json.loads((export / "config.json").read_text())

    def packed_with(template):
        known = {"chat template": template, "added tokens": chat.added_tokens_digest}
        (export / "config.json").write_text(json.dumps(config | {"packed_with": known}))

    packed_with(chat.template_digest)
    assert evaluate("--drafter", export, "--max-new-tokens", 8, "--verify", 0)[0]["training"]["problems"] == []
    packed_with("another")
    with pytest.raises(UserError, match="packed with another chat template"):
        evaluate("--drafter", export, "--max-new-tokens", 8, "--verify", 0)
    capsys.readouterr()
    families(["check", str(export), "--target", str(tiny_target)])
    assert "target: its chat template is not what" in capsys.readouterr().out


def test_a_resume_and_all_ranks_compare_template_and_added_tokens(tiny_preset, tiny_store, tmp_path):
    """The same token ids may have been made with another template: what is trained on from here is another task."""
    plan = make_plan(load(tiny_preset, [f"log.dir={tmp_path}"]), SimpleNamespace(first_per_host=lambda find: find(), drafters=1))
    known = TokenStore.open(tiny_store).packed_with
    assert set(known) == {"chat template", "added tokens"} and known.items() <= plan.agreement()["data fingerprint"].items()
    inputs = opening.fingerprints(plan)
    for key in (f"data.path ({what})" for what in known):
        state = {"inputs": inputs | {key: "another"}, "drafters": 1}
        checkpoint = SimpleNamespace(config=config_reader.to_dict(plan.config), state=state, path="step_4")
        with pytest.raises(UserError, match=rf"{key.split()[0]} \(.*\): its content changed .*allow_changes=\[data\.path\]"):
            opening._compare(plan, 1, checkpoint)


def test_a_store_of_other_added_tokens_is_refused(tiny_target, tiny_store, tmp_path):
    """A conversion that loses the user-defined tokens cuts every text that holds one into others, with the same vocabulary."""
    shutil.copytree(tiny_target, tmp_path / "target")
    path = tmp_path / "target/tokenizer.json"
    tree = json.loads(path.read_text())
    path.write_text(json.dumps(tree | {"added_tokens": tree["added_tokens"][:-1]}))
    with pytest.raises(UserError, match=r"packed with other added tokens than those of"):
        TokenStore.open(tiny_store).check_target(tmp_path / "target", 272)
