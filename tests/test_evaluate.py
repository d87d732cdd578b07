"""evaluate_drafter.py end to end: its numbers are what a user decides by, so they must add up and its refusals must be clear."""

import dataclasses
import json
import sys

import pytest
import torch
from conftest import build_target
from test_server import ModelServer

import evaluate_drafter
from common.config import DrafterConfig
from common.data.chat import Chat, load_tokenizer
from common.data.prompts import OPEN, messages_of, read_questions
from common.decoding.fast import FastDecoder
from common.decoding.replay import Replayer
from common.decoding.speculate import Answer, Chooser, Way, decode, speculate
from common.decoding.static import records
from common.errors import UserError
from common.evaluation import advice
from common.evaluation.arguments import parse_arguments
from common.evaluation.report import by_position, mean_tau, prompt_lookup, summarize
from common.evaluation.subject import Questioned, Subject
from common.families.dflash import DFlash
from common.families.registry import resolve_spec
from common.families.start import make_drafter
from common.target.files import read_spec

BLOCK, STOP = 4, 258


@pytest.fixture(scope="module")
def drafter_folder(tiny_target, tmp_path_factory):
    return export_drafter(tiny_target, tmp_path_factory.mktemp("export") / "latest")


def export_drafter(target, folder):
    """An untrained drafter, exported as training exports it."""
    spec, config = read_spec(target), DrafterConfig(layers=2, block_size=BLOCK, taps=[0, 2], dtype="float32", init="target_layers")
    drafter_spec = resolve_spec(config, spec, target)
    drafter = make_drafter(config, drafter_spec, target, torch.device("cpu"), seed=0)
    return DFlash().export(folder, drafter.state_dict(), drafter_spec, spec, "bfloat16", "float32")


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": "count 7"}, {"role": "assistant", "content": "7 8 9"}]},
        {"prompt": "count 3"},
        {"question": "count 12"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def evaluate(tiny_target, drafter_folder, prompts_file, tmp_path, capsys):
    """Run the script in this process; returns (report, what it printed). Later flags win."""

    def run(*flags):
        file = tmp_path / "out" / "report.json"
        given = ["--drafter", drafter_folder, "--target", tiny_target, "--prompts", prompts_file, "--device", "cpu", "--json", file, *flags]
        evaluate_drafter.main([str(flag) for flag in given])
        return json.loads(file.read_text()), capsys.readouterr().out

    return run


def test_a_target_spread_over_devices_decodes_the_same(evaluate):
    """Else the tau of a 70B target, which no one device holds, is another model's."""
    (one, _), (spread, _) = (evaluate("--max-new-tokens", 24, "--tree-budget", "8", "--stages", stages) for stages in (1, 3))
    assert spread["stages"] == 3 and spread["sample"]["equal_to_replay"] == one["sample"]["equal_to_replay"] == spread["prompts"]
    for key in ("per_prompt", "tau", "tau_by_tree_budget", "accepted_histogram"):
        assert spread[key] == one[key]


HOW = {
    "chain": ["--decode"],
    "tree": ["--decode", "--mode", "tree", "--tree-budget", "3,8"],
    "sampled": ["--temperature", "1", "--block-size", "3"],
}


@pytest.mark.parametrize("how", HOW)
def test_report_adds_up(tiny_target, evaluate, how):
    """Lost otherwise: trust in tau. Every count must follow from the per-prompt record, and every answer must be the target's own."""
    report, printed = evaluate("--max-new-tokens", 24, *HOW[how])
    assert report["lossless"] == report["prompts"] == len(report["per_prompt"]) == 3
    assert report["stop_token_ids"] == [STOP] and report["dtype"] == "float32"
    accepted = [n for prompt in report["per_prompt"] for n in prompt["accepted"]]
    assert report["tau"] == pytest.approx(sum(n + 1 for n in accepted) / len(accepted))
    assert report["tokens"] == sum(len(prompt["output_ids"]) for prompt in report["per_prompt"]) == sum(n + 1 for n in accepted) + 3
    assert report["accepted_histogram"] == [accepted.count(n) for n in range(report["block_size"])]
    assert report["speedup"] == pytest.approx(report["seconds_plain"] / report["seconds_speculative"])
    assert len(report["cumulative_acceptance"]) == report["block_size"] - 1 == (2 if how == "sampled" else 3)
    if how == "tree":
        assert report["tau_by_tree_budget"]["8"] == report["tau"] >= report["tau_by_tree_budget"]["3"]
        assert "tree of 8 nodes" in printed
    for prompt in report["per_prompt"]:
        assert STOP not in prompt["output_ids"][:-1] and len(prompt["output_ids"]) <= 24
    chat = Chat(load_tokenizer(tiny_target))
    assert report["per_prompt"][0]["prompt_ids"] == chat.prompt([{"role": "user", "content": "count 7"}]).tolist()


def test_equal_prompts_are_sampled_apart_and_loops_are_the_answers(evaluate, tmp_path):
    """Lost otherwise: a sample of one under the name of many, and answers blamed for what the prompt repeats."""
    (tmp_path / "twice.jsonl").write_text('{"question": "%s"}\n' % ("x" * 60) * 2)
    report, _ = evaluate("--prompts", tmp_path / "twice.jsonl", "--temperature", 1, "--max-new-tokens", 24)
    one, other = (prompt["output_ids"] for prompt in report["per_prompt"])
    assert one != other and report["loops"] == 0


def test_the_baseline_copies_blocks_of_the_size_that_is_measured(evaluate):
    """Lost otherwise: a fair race. With blocks of 2 copying, too, proposes one token at a time."""
    report, _ = evaluate("--block-size", 2, "--max-new-tokens", 200, "--verify", 0)
    copied = [
        [prompt_lookup(prompt["prompt_ids"], prompt["output_ids"], size) for prompt in report["per_prompt"]] for size in (1, BLOCK - 1)
    ]
    assert report["prompt_lookup_tau"] == mean_tau(copied[0]) < mean_tau(copied[1])


def test_no_compare_and_limit(evaluate):
    """Lost otherwise: the quick look, which skips plain decoding and must not claim to have compared."""
    report, printed = evaluate("--decode", "--limit", 1, "--no-compare", "--max-new-tokens", 8)
    assert (report["prompts"], report["lossless"], report["speedup"]) == (1, None, None)
    assert "not compared" in printed


@pytest.mark.parametrize(
    "flags",
    [
        ["--baseline", "http://x/v1"],
        ["--tree-budget", "16", "--decode"],
        ["--temperature", "-1"],
        ["--verify", "-1"],
        ["--replay", "--temperature", "1"],
    ],
)
def test_flags_that_would_mean_something_else_are_refused(flags, capsys):
    """Lost otherwise: a chain's figures under a tree's name, or a target that prefers what it likes least."""
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(["--drafter", "d", "--target", "t", "--prompts", "p", *flags], None)
    assert flags[0] in capsys.readouterr().err


def test_what_cannot_be_evaluated_is_refused(evaluate, tmp_path):
    """Lost otherwise: a traceback, or numbers of a drafter that was never trained for this."""
    build_target(tmp_path / "other", hidden_size=48, num_hidden_layers=3)
    cases = {
        "trained on blocks of 4": ["--block-size", 9],
        "made for another target": ["--target", tmp_path / "other"],
        "use cpu, or a device that is there": ["--device", "abacus"],
        "no such file": ["--prompts", tmp_path / "none.jsonl"],
        "leave no room to answer": ["--max-new-tokens", 500],
    }
    for words, flags in cases.items():
        with pytest.raises(UserError, match=words):
            evaluate(*flags)


def test_a_report_that_cannot_be_written_is_known_before_the_work(tmp_path):
    with pytest.raises(UserError, match=r"--json .* cannot be written"):
        parse_arguments(["--drafter", "d", "--target", "t", "--prompts", "p", "--json", str(tmp_path)], None)


def test_rows_that_ask_nothing_are_named(tiny_target, tmp_path):
    """Lost otherwise: a row skipped without a word, and a tau over other prompts than the user thinks."""
    chat = Chat(load_tokenizer(tiny_target))
    for line in ('{"answer": 3}', "no json", "[1]", '{"prompt": 3}', '{"messages": "hello"}'):
        path = tmp_path / "prompts.jsonl"
        path.write_text('{"prompt": "fine"}\n' + line + "\n")
        with pytest.raises(UserError, match=r"prompts.jsonl:2"):
            read_questions([str(path)], chat, None, 400)
        assert len(read_questions([str(path)], chat, 1, 400)) == 1


def test_slots_count_only_where_the_answer_tested_them():
    """Lost otherwise: acceptance per slot dragged down by answers that end in mid-block. Worked by hand, blocks of 4."""
    answers = [
        Answer([1], [5, 6, 7, 8, 9], accepted=[1, 1], matched=[1, 2], tried=[2, 2]),
        Answer([1], [5, 6], accepted=[0], matched=[0], tried=[1]),
    ]
    report = summarize(answers, [], BLOCK - 1)
    assert report["tau"] == pytest.approx(5 / 3)
    assert report["accepted_histogram"] == [1, 2, 0, 0]
    assert report["cumulative_acceptance"] == pytest.approx([2 / 3, 1 / 3, 0])
    assert report["conditional_acceptance"] == [pytest.approx(2 / 3), 0.5, None]
    whole = Answer([1], [5, 6, 7, 8, 9, 3], accepted=[3, 0], matched=[3, 0], tried=[3, 1])
    assert summarize([whole], [], BLOCK - 1)["full_accept_rate"] == 0.5, "of all verifications, not of those that came so far"


def test_lossless_is_equal_to_the_end():
    """Lost otherwise: the promise itself. An answer that goes on where plain decoding ended, or ends before it, is another answer."""
    plain = [Answer([1], tokens) for tokens in ([5, 6], [5, 6], [5, 6, 7], [5, 6, 7])]
    answers = [Answer([1], tokens) for tokens in ([5, 6], [5, 6, 7], [5, 6], [5, 9, 7])]
    assert summarize(answers, plain, BLOCK - 1)["lossless"] == 1


def test_prompt_lookup_copies_from_prompt_and_answer():
    """Lost otherwise: the baseline that a drafter has to beat. Worked by hand, blocks of 4 tokens."""
    prompt, tokens = [1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6, 9, 9, 9, 9, 9]
    # prefill gave 3; [1 2 3] was followed by 4 5 6: all three drafts right, then 9 is the target's own;
    # 9 is new: nothing to copy, 9 emitted; then 9 9 copies itself to the end
    assert prompt_lookup(prompt, tokens, drafts=3) == [3, 0, 2]
    assert prompt_lookup([1], [2, 3, 4], drafts=3) == [0, 0]
    assert prompt_lookup([1], [2], drafts=3) == []
    assert prompt_lookup([1, 2, 9, 1, 2, 3, 1], [2, 3, 4], drafts=3) == [1], "1 2 was last followed by 3"


@pytest.mark.parametrize("how", ["--replay", "--decode"])
def test_table_survives_a_run_without_verifications(evaluate, how):
    """Lost otherwise: an hour's run that crashes while printing, because every answer was one token long."""
    report, printed = evaluate(how, "--max-new-tokens", 1)
    assert report["tau"] is None and report["tau_by_position"] == [] and "chain" in printed


def test_a_replay_reports_what_decoding_reports(evaluate, tmp_path):
    """Lost otherwise: the default report. Sets and later turns included, its every answer and count is real decoding's."""
    (tmp_path / "turns.jsonl").write_text('{"turns": ["count 5", "go on", "and on"]}\n{"turns": ["count 9"]}\n')
    (tmp_path / "math.jsonl").write_text('{"problem": "count 2", "answer": "2"}\n')
    flags = ["--prompts", tmp_path / "turns.jsonl", tmp_path / "math.jsonl", "--max-new-tokens", 12]
    replayed, printed = evaluate(*flags, "--tree-budget", "3,8", "--batch-size", 2, "--verify", 3)
    assert replayed["how"] == "replay" and [p["set"] for p in replayed["per_prompt"]] == ["turns"] * 4 + ["math"]
    assert replayed["sample"]["equal_to_replay"] == replayed["sample"]["lossless"] == replayed["sample"]["prompts"] == 3
    assert "3 with the replay's tokens and verifications" in printed and "math" in printed
    decodings = [["--block-size", size] for size in (2, 3, 4)] + [
        ["--mode", "tree", "--tree-budget", 3],
        ["--mode", "tree", "--tree-budget", 8],
    ]
    for run, decoding in zip(replayed["runs"], decodings, strict=True):
        decoded, _ = evaluate(*flags, "--decode", "--no-compare", *decoding)
        same = ["tau", "tau_by_set", "verifications", "accepted_histogram", "cumulative_acceptance", "conditional_acceptance"]
        assert {key: run[key] for key in same} == {key: decoded[key] for key in same}, decoding
        if run["way"] == replayed["lead"]:
            assert run["block_size"] == BLOCK
            same = ["per_prompt", "tau_by_position", "loops", "prompt_lookup_tau"]
            assert {key: replayed[key] for key in same} == {key: decoded[key] for key in same}
    assert replayed["tau_by_block_size"]["4"] == replayed["tau"] and replayed["tau_by_tree_budget"].keys() == {"3", "8"}


def test_tau_by_position_counts_a_verification_where_its_block_is_drafted():
    """Lost otherwise: the figure that tells a drafter which fails in long contexts. Known at first are 126 + 1 tokens, then 130."""
    answer = Answer([0] * 126, [0] * 9, accepted=[2, 1, 2])
    assert by_position([answer]) == [
        {"below": 128, "tau": 3.0, "verifications": 1},
        {"below": 256, "tau": 2.5, "verifications": 2},
    ]


def test_sets_are_read_as_they_are_published():
    """Lost otherwise: one command for the sets that people quote. GSM8K, MATH500, HumanEval, MT-Bench differ in names."""
    asks = {"role": "user", "content": "why?"}
    for row in (
        {"question": "why?", "answer": "#### 4"},
        {"problem": "why?", "solution": "so"},
        {"task_id": "HumanEval/0", "prompt": "why?"},
    ):
        assert messages_of(row) == [asks, OPEN]
    assert messages_of({"question_id": 81, "turns": ["why?", "why?"], "reference": []}) == [asks, OPEN, asks, OPEN]


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_an_engines_counters_are_those_of_the_replay_after_the_same_cut(tiny_target, drafter_folder, prompts_file, evaluate, engine):
    """Lost otherwise: the proof that an engine serves what was trained. Engines count drafts behind an answer's end."""
    asked = Questioned.open(str(tiny_target), {})
    subject = Subject.load(asked, str(drafter_folder), "float32", "cpu", 1)
    behind = 2  # drafts that the engine accepts behind the end of an answer
    with ModelServer(tiny_target, "llama.cpp" if engine == "llamacpp" else "ids") as server, ModelServer(tiny_target) as plain:

        def metrics():
            (answers,) = (
                Replayer(subject.target, subject.drafter, subject.vocabulary).run(server.written, [Way(BLOCK)]) if server.written else ([],)
            )
            accepted = [n for answer in answers for n in answer.accepted]
            lines = [
                f'{engine}:spec_decode_num_drafts_total{{engine="0"}} {len(accepted)}',
                f'{engine}:spec_decode_num_draft_tokens_total{{engine="0"}} {3 * len(accepted)}',
                f'{engine}:spec_decode_num_accepted_tokens_total{{engine="0"}} {sum(accepted) + behind * len(answers)}.0',
            ]
            if engine == "vllm":
                for slot in range(3):
                    count = sum(n > slot for n in accepted)
                    lines.append(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{slot}"}} {count}')
            return "# HELP something\n" + "\n".join(lines) + "\n"

        server.metrics = metrics
        flags = ["--server", server.url, "--baseline", plain.url, "--max-new-tokens", 16, "--verify", 0]
        report, printed = evaluate(*flags)
    served = report["served"]
    assert served["tau"] == pytest.approx(report["tau"]) and served["accepted"] == sum(
        n for p in report["per_prompt"] for n in p["accepted"]
    )
    assert served["tau_as_counted"] == pytest.approx(report["tau"] + behind * 3 / report["verifications"])
    assert served["acceptance_by_slot"] == (pytest.approx(report["cumulative_acceptance"]) if engine == "vllm" else [])
    assert served["baseline"]["equal"] == served["answers"] == 3 and "3 answers equal" in printed
    assert served["tokens"] == report["tokens"]


def test_an_engine_is_measured_without_a_drafter_here(evaluate, tiny_target, prompts_file, tmp_path, capsys):
    """Lost otherwise: speed and answers of an engine whose drafter lies elsewhere, or that tells no counters."""
    with ModelServer(tiny_target) as server:
        flags = [
            "--target",
            tiny_target,
            "--prompts",
            prompts_file,
            "--server",
            server.url,
            "--max-new-tokens",
            8,
            "--json",
            tmp_path / "r.json",
        ]
        evaluate_drafter.main([str(flag) for flag in flags])
    served = json.loads((tmp_path / "r.json").read_text())["served"]
    assert served["tau"] is None and served["tokens_per_s"] > 0 and "no speculative counters" in capsys.readouterr().out


def test_advice_is_what_times_and_tau_say(evaluate, monkeypatch):
    """Lost otherwise: the number of draft tokens a user sets. Every way is there in every batch."""
    monkeypatch.setattr(advice, "REPEATS", 1)
    monkeypatch.setattr(advice, "BATCHES", (1, 3))
    report, printed = evaluate("--advise", "--max-new-tokens", 12, "--tree-budget", 5, "--verify", 0)
    tau = {(run["block_size"], run["tree_budget"]): run["tau"] for run in report["runs"]}
    ways = [(case["batch"], case["block_size"], case["tree_budget"]) for case in report["advice"]]
    assert ways == [(batch, *way) for batch in (1, 3) for way in tau]
    for case in report["advice"]:
        assert case["tau"] == tau[case["block_size"], case["tree_budget"]] and min(case["draft_ms"], case["verify_ms"]) > 0
        assert case["break_even_tau"] == pytest.approx((case["draft_ms"] + case["verify_ms"]) / case["plain_ms"])
        assert case["speedup"] == pytest.approx(case["tau"] / case["break_even_tau"])
    case = advice.Case(1, Way(4), 3, tau=3.0, draft_ms=1.0, verify_ms=9.0, plain_ms=8.0)
    assert "num_speculative_tokens=3, SGLang --speculative-num-draft-tokens 4" in advice.lines([case])[-1]
    assert "no chain pays" in advice.lines([dataclasses.replace(case, tau=1.1)])[-1] and "3 at a time" in printed


def test_a_report_is_plotted(evaluate, tmp_path):
    """Lost otherwise: the curves by slot and block size; and a user without matplotlib learns of it after the work."""
    pytest.importorskip("matplotlib")
    evaluate("--plot", tmp_path / "plots", "--max-new-tokens", 8, "--verify", 0)
    assert (tmp_path / "plots" / "evaluation.png").stat().st_size > 4000 and list((tmp_path / "plots").glob("events*"))


def test_a_plot_without_matplotlib_is_refused_before_the_work(monkeypatch):
    """Lost otherwise: minutes of work, and a traceback at their end."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        parse_arguments(["--drafter", "d", "--target", "t", "--prompts", "p", "--plot", "f"], None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_recorded_steps_and_replay_are_eager_decoding(tiny_target, drafter_folder):
    """Lost otherwise: every figure that is measured on a GPU. What is recorded must read and write where the eager twin does."""
    subject = Subject.load(Questioned.open(str(tiny_target), {}), str(drafter_folder), "float32", "cuda", 1)
    assert records(subject.target)
    prompts, stop = [[257, 65, 66, 67], list(range(40, 190))], {STOP}  # the second is longer than a chunk
    plain = [decode(subject.target, prompt, stop, 40, Chooser()) for prompt in prompts]
    fast = FastDecoder(subject.target, None)
    assert [fast.answer(prompt, stop, 40).tokens for prompt in prompts] == [answer.tokens for answer in plain]
    ways = [Way(2), Way(BLOCK), Way(BLOCK, 3), Way(BLOCK, 16)]
    replayed = Replayer(subject.target, subject.drafter, subject.vocabulary).run([(a.prompt, a.tokens) for a in plain], ways)
    for way, expected in zip(ways, replayed, strict=True):
        drafter = subject.block_drafter(way)
        fast = FastDecoder(subject.target, drafter)
        for prompt, answer in zip(prompts, expected, strict=True):
            twin, recorded = speculate(subject.target, drafter, prompt, stop, 40, Chooser()), fast.answer(prompt, stop, 40)
            for found in (twin, recorded):
                assert (found.tokens, found.accepted, found.matched) == (answer.tokens, answer.accepted, answer.matched), way
    case = advice.advise(subject, {Way(BLOCK): 2.0}, context_tokens=64)[0]
    assert min(case.plain_ms, case.draft_ms, case.verify_ms) > 0
