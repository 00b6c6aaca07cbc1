"""Tasks and samples while a model trains: the harness's scores of its export, in every layout, each logged once.

Documents of the data begin with BOS, as those of a continued Llama do.
"""

import json
import shutil

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data_prep.encoding import Tokenizer
from moh_lm.config import Config, ConfigError
from moh_lm.flags import parse_config
from moh_lm.monitor.log import RunLog
from moh_lm.monitor.samples import Samples
from moh_lm.monitor.tasks import Question, Tasks
from moh_lm.run.text import open_data
from tests.distributed import run_ranks
from tests.tokenizing import give_tokenizer
from tests.tools.evaluating import LLM6, exit_code
from tests.training.runs import arguments, rows, run
from tools import evaluate, evaluate_prepare, export_hf, generate, run_report
from tools.hf.convert import export_check

LAYOUTS = {"data": [], "tensor": ["--tensor-parallel-size", "2"], "pipeline": ["--pipeline-parallel-size", "2"]}
BOS = 1  # of the tokenizer
LIMIT = 4  # questions of each task
PROMPTS = ("the model of", "care", "head token " * 200)  # the last is longer than a sequence


@pytest.fixture(scope="module")
def prepared(data, tokenizer, tmp_path_factory):
    """The six tasks in the form of moh_lm/monitor/tasks.py."""
    path = tmp_path_factory.mktemp("prepared") / "tasks.jsonl"
    given = ["--bos", "--limit", LIMIT]
    given += ["--tokenizer", tokenizer, "--data", data, "--output", path]
    assert exit_code(evaluate_prepare, "--suite", "llm6", *given) == 0
    return path


@pytest.fixture(scope="module")
def flags(data_dir, tokenizer, prepared, tmp_path_factory):
    """Flags of a run whose data has the tokenizer of the tasks."""
    directory = tmp_path_factory.mktemp("data") / "data"
    shutil.copytree(data_dir, directory)
    give_tokenizer(directory, tokenizer, bos_id=BOS)
    changes = "--vocab-size 320 --seq-length 256 --batch-tokens 2K --train-iters 2 --eval-interval 1 --save-interval 1"
    more = ["--validation-fraction", "0.2", "--eval-tasks", str(prepared), "--sample-tokens", "5"]
    return [*arguments(directory, "", *changes.split(), *more, "--sample-prompts", *PROMPTS)]


def task_rows(directory):
    return {row["step"]: row["tasks"] for row in rows(directory) if "tasks" in row}


@pytest.fixture(scope="module")
def trained(flags, tmp_path_factory):
    """A run that was cut off after the checkpoint of step 1, and gone on with."""
    directory = tmp_path_factory.mktemp("trained")
    here = [*flags, "--checkpoint-dir", str(directory)]
    run_ranks(run, 1, here, 1)
    run_ranks(run, 1, here)
    return directory


def test_a_run_logs_the_tasks_at_every_evaluation_once(trained):
    assert [row["step"] for row in rows(trained) if "tasks" in row] == [0, 1, 2]
    events = EventAccumulator(str(trained / "tensorboard"))
    events.Reload()
    logged = {event.step: event.value for event in events.Scalars("tasks/piqa/acc_norm")}
    assert logged == pytest.approx({step: row["piqa"]["acc_norm"] for step, row in task_rows(trained).items()})
    last = next(row for row in reversed(rows(trained)) if "evaluation" in row)
    assert last["perplexity"] == {name: pytest.approx(np.exp(loss)) for name, loss in last["evaluation"].items()}
    assert {event.step for event in events.Scalars("loss_validation_perplexity/even")} == {0, 1, 2}


def test_scores_of_a_run_are_those_of_the_harness_on_its_export(trained, data, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_check, "transformers", None)
        assert exit_code(export_hf, "--checkpoint", trained, "--output", tmp_path / "hf") == 0
    output = tmp_path / "result.json"
    given = ["--suite", "llm6", "--data", data, "--device", "cpu", "--limit", LIMIT, "--output", output]
    assert exit_code(evaluate, "--model", tmp_path / "hf", *given) == 0
    harness, ours = json.loads(output.read_text())["harness"], task_rows(trained)[2]
    assert set(ours) == set(LLM6)
    for name, metrics in ours.items():
        assert set(metrics) == {"acc", "acc_norm"} & {key.removesuffix(",none") for key in harness[name]}
        for metric, value in metrics.items():
            assert value == pytest.approx(harness[name][f"{metric},none"], abs=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_scores(layout, flags, trained, tmp_path):
    run_ranks(run, 2, [*flags, *LAYOUTS[layout], "--checkpoint-dir", str(tmp_path)])
    theirs = task_rows(tmp_path)
    for step, scores in task_rows(trained).items():
        for name, metrics in scores.items():
            assert theirs[step][name] == pytest.approx(metrics, abs=1e-5)
    assert samples(tmp_path) == samples(trained)


def samples(run):
    rows = map(json.loads, (run / "samples.jsonl").read_text().splitlines())
    return [(row["step"], row["prompt"], row["text"]) for row in rows]


def test_probabilities_below_the_smallest_number_have_shares():
    tasks = Tasks(Config(), None, None)
    tasks.questions["a"] = [Question([1, 0], [[[1], [2], None]] * 2)]
    assert tasks.metrics("a", [900.0, 900 + np.log(3)]) == pytest.approx({"acc": 0.75})


def test_samples_are_what_the_checkpoint_generates(trained, capsys):
    found = samples(trained)
    assert [row[:2] for row in found] == [(step, prompt) for step in (0, 1, 2) for prompt in PROMPTS]
    for prompt in PROMPTS[:2]:
        assert exit_code(generate, "--model", trained, "--max-new-tokens", 5, "--json", "--prompt", prompt) == 0
        text = json.loads(capsys.readouterr().out)["text"]
        assert text != "" and (2, prompt, text) in found
    events = EventAccumulator(str(trained / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Tensors("samples/text_summary")] == [0, 1, 2]
    assert run_report.main([str(trained)]) == 0
    assert f"<td>care</td><td>{trained.name}</td><td>2</td>" in (trained / "report.html").read_text()


def test_a_sample_ends_with_its_document_or_before_ids_without_text(tokenizer):
    given = Samples.__new__(Samples)
    given.tokenizer = Tokenizer(str(tokenizer)).model
    ids, end, beyond = given.tokenizer.encode("the model of"), given.tokenizer.eos_id(), given.tokenizer.vocab_size()
    for tokens in ([*ids, end, *ids], [*ids, beyond, *ids], ids):
        assert given.written(given.tokenizer.encode("a text"), tokens).strip() == "the model of"


def test_prompts_begin_with_the_bos_of_the_data(tokenizer):
    config = Config.from_dict({"sample_prompts": ["the model of", "care"]})
    plain, begun = (Samples(config, tokenizer, bos).tokens for bos in (None, BOS))
    assert plain == [Tokenizer(str(tokenizer)).model.encode(prompt) for prompt in config.run.sample_prompts]
    assert begun == [[BOS, *ids] for ids in plain]
    empty = Config.from_dict({"sample_prompts": ["a", ""]})
    assert Samples(empty, tokenizer, BOS).tokens[1] == [BOS]
    with pytest.raises(ConfigError, match="--sample-prompts '': contains no tokens; give some text"):
        Samples(empty, tokenizer, None)


def test_samples_after_the_resumed_checkpoint_are_dropped(tmp_path):
    (tmp_path / "samples.jsonl").write_text("".join(f'{{"step": {n}, "prompt": "a", "text": "b"}}\n' for n in range(4)))
    RunLog(tmp_path, 2, Config()).close()
    assert [step for step, *_ in samples(tmp_path)] == [0, 1, 2]


def test_samples_that_cannot_be_written_are_refused_before_the_run(flags, data_dir, tmp_path):
    for changes, message in [
        (["--sample-prompts", "a", "\udcff"], r"--sample-prompts '.udcff': is not UTF-8"),
        (["--data-dir", str(data_dir)], f"--sample-prompts: {data_dir} has no tokenizer"),
    ]:
        config, _ = parse_config([*flags, "--eval-tasks", "", *changes, "--checkpoint-dir", str(tmp_path)])
        with pytest.raises(ConfigError, match=message):
            open_data(config, [], False)


def test_a_wrong_file_of_tasks_is_refused_before_the_run(flags, prepared, data_dir, tmp_path):
    other, foreign, empty = (tmp_path / f"{name}.jsonl" for name in ("other", "foreign", "empty"))
    lines = prepared.read_text().splitlines()
    other.write_text("\n".join(['{"tokenizer": "0"}', *lines[1:]]))
    foreign.write_text("{}\n")
    empty.write_text(lines[0])
    cases = [
        (["--eval-tasks", str(other)], "was made with another tokenizer"),
        (["--eval-tasks", str(foreign)], "is not a file of tasks"),
        (["--eval-tasks", str(tmp_path / "none")], "is not a file of tasks"),
        (["--vocab-size", "64"], "below --vocab-size 64"),
        (["--eval-tasks", str(empty)], "has no question"),
    ]
    for changes, message in cases:
        config, _ = parse_config([*flags, *changes, "--checkpoint-dir", str(tmp_path)])
        with pytest.raises(ConfigError, match=message):
            open_data(config, [], False)


def test_tasks_with_and_without_bos_are_for_such_data(data, tokenizer, prepared, tmp_path):
    path = tmp_path / "plain.jsonl"
    given = ["--data", data, "--limit", 1, "--tokenizer", tokenizer, "--output", path]
    assert exit_code(evaluate_prepare, "--suite", "llm6", "--tasks", "piqa", *given) == 0
    begun, plain = (Config.from_dict({"eval_tasks": str(file)}) for file in (prepared, path))
    for config, bos in ((begun, BOS), (plain, None)):
        choices = Tasks(config, tokenizer, bos).questions["piqa"][0].choices
        assert [context[0] == BOS for context, *_ in choices] == [bos == BOS] * 2
    for config, bos, message in ((begun, None, "was made with --bos, unlike the"), (plain, BOS, "lacks the --bos")):
        with pytest.raises(ConfigError, match=message):
            Tasks(config, tokenizer, bos)


def question(**changes):
    return {"task": "a", "gold": 1, "choices": [[[1], [2], 3], [[1], [2, 9], 4]]} | changes


WRONG_ROWS = {
    "an answer without tokens": (question(choices=[[[1], [], 1], [[1], [2], 1]]), "choice 0: has no token"),
    "a context without tokens": (question(choices=[[[1], [2], 1], [[], [2], 1]]), "choice 1: has no token before it"),
    "an id below 0": (question(choices=[[[1], [2], 1], [[-3], [2], 1]]), "choice 1: has the id -3"),
    "an id beyond the vocabulary": (question(choices=[[[1], [64], 1], [[1], [2], 1]]), "choice 0: has the id 64"),
    "an id that is no number": (question(choices=[[[1], [True], 1], [[1], [2], 1]]), "choice 0: has the id true"),
    "an id that is a fraction": (question(choices=[[[1], [2.5], 1], [[1], [2], 1]]), "choice 0: has the id 2.5"),
    "an answer of no characters": (question(choices=[[[1], [2], 0], [[1], [2], 1]]), "choice 0: has 0 characters"),
    "characters of some answers": (question(choices=[[[1], [2], None], [[1], [2], 1]]), "has the characters of some"),
    "an answer of countless characters": (question(choices=[[[1], [2], 10**400], [[1], [2], 1]]), "choice 0: has 1000"),
    "an answer too long": (question(choices=[[[1], [2] * 9, 1], [[1], [2], 1]]), "choice 0: has 9 tokens"),
    "one answer": (question(choices=[[[1], [2], 1]], gold=0), "has 1 choice"),
    "a choice that is none": (question(choices=[[[1], [2]], [[1], [2], 1]]), "choice 0: is not"),
    "a gold that is not there": (question(gold=2), "gold 2: choose 0 to 1"),
    "a gold counted from the end": (question(gold=-1), "gold -1: choose 0 to 1"),
    "a gold that is no number": (question(gold="1"), 'gold "1": choose 0 to 1'),
    "golds of other choices": (question(gold=[1, 0, 0]), "gold [1, 0, 0]: give 0 or 1 for each of 2 choices"),
    "golds that are all right": (question(gold=[1, 1]), "gold [1, 1]"),
    "golds that are all wrong": (question(gold=[0, 0]), "gold [0, 0]"),
    "no name": (question(task=None), "task null"),
}


def tasks_of(path, *rows):
    path.write_text("\n".join(map(json.dumps, [{"tokenizer": "0"}, *rows])))
    more = {"eval_tasks": str(path), "seq_length": 8, "batch_tokens": 8, "vocab_size": 64}
    return Tasks(Config.from_dict(more), None, None)


@pytest.mark.parametrize("case", WRONG_ROWS)
def test_a_question_that_cannot_be_scored_is_refused_by_its_line(case, tmp_path):
    row, message = WRONG_ROWS[case]
    with pytest.raises(ConfigError) as error:
        tasks_of(tmp_path / "tasks", question(), row, question(gold=0))
    (problem,) = error.value.problems
    assert f"tasks: line 3: {message}" in problem and problem.endswith("make it again with tools/evaluate_prepare.py")


def test_questions_with_one_and_with_several_golds_are_taken(tmp_path):
    several = question(gold=[0, 1], choices=[[[1], [2], None], [[1], [63], None]])
    assert len(tasks_of(tmp_path / "tasks", question(), several).questions["a"]) == 2


def test_of_many_wrong_questions_some_are_named_and_all_counted(tmp_path):
    with pytest.raises(ConfigError) as error:
        tasks_of(tmp_path / "tasks", *[question(gold=5)] * 40)
    assert len(error.value.problems) < 12 and "and 32 more" in error.value.problems[-1]


def test_a_row_without_a_right_answer_is_not_prepared(data, tokenizer, tmp_path, capsys):
    shutil.copytree(data, tmp_path / "data")
    path = tmp_path / "data" / "piqa" / "validation.jsonl"
    path.write_text("".join(json.dumps(json.loads(line) | {"label": -1}) + "\n" for line in path.open()))
    given = ["--tokenizer", tokenizer, "--data", tmp_path / "data", "--output", tmp_path / "made"]
    assert exit_code(evaluate_prepare, "--suite", "llm6", "--tasks", "piqa", *given) == 2
    assert "piqa: row 0: gold -1: choose 0 to 1; fix the row" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
