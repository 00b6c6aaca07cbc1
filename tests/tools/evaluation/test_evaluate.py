"""tools/evaluate.py: the harness scores an export as the trainer's own model and SentencePiece do."""

import json
import shutil
import sys
from argparse import Namespace
from contextlib import nullcontext
from unittest.mock import Mock

import numpy as np
import pytest
import sentencepiece
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from data_prep.encoding import Tokenizer
from tests.distributed import run_ranks
from tests.tools.evaluating import LLM6, WORDS, exit_code, made_rows
from tests.tools.exporting import PAPER, make_weights, write_checkpoint
from tools import evaluate, evaluate_prepare, export_hf, head_report
from tools.heads import task_text
from tools.hf.convert import export_check, tokenizer_json
from tools.tasks import suites
from tools.tasks.rows import task_manager

huggingface = pytest.importorskip("lm_eval.models.huggingface")


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory):
    """An export."""
    directory = tmp_path_factory.mktemp("model")
    run_ranks(write_checkpoint, 1, directory / "run", PAPER, tokenizer, False, 1024)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_check, "transformers", None)  # its own test loads it
        assert exit_code(export_hf, "--checkpoint", directory / "run", "--output", directory / "hf") == 0
    return directory / "hf"


@pytest.fixture(scope="module")
def result(model, data, tmp_path_factory):
    """The file of --output for the six tasks."""
    output = tmp_path_factory.mktemp("result") / "result.json"
    given = ["--suite", "llm6", "--data", data, "--dtype", "float32", "--device", "cpu", "--output", output]
    assert exit_code(evaluate, "--model", model, *given) == 0
    return json.loads(output.read_text())


def requests(data, suite, names, shots, scratch):
    """{task: (task object of the harness, its requests)} on local rows."""
    columns = {entry.task for entry in suites.SUITES[suite] if set(entry.tasks) & set(names)}
    manager = task_manager(suites.entries_of(suite, columns), data, scratch)
    found = {}
    for name, task in manager.load(names)["tasks"].items():
        task.set_config("num_fewshot", shots)
        task.build_all_requests(rank=0, world_size=1)
        found[name] = task, task.instances
    return found


@torch.no_grad()
def own_score(model, original, context, continuation):
    """Log-likelihood by the trainer's model and SentencePiece; spaces at the end of the context go to the other."""
    kept = context.rstrip()
    before, both = original.encode(kept), original.encode(context + continuation)
    rows = model(torch.tensor([both]))[:, 0].double().log_softmax(-1)  # [s, vocab]
    return sum(rows[position - 1, both[position]].item() for position in range(len(before), len(both)))


def test_scores_and_table_are_those_of_the_trainers_model(model, data, tokenizer, result, tmp_path):
    original = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    trainer, truthful = make_weights(PAPER), {}
    loaded = huggingface.HFLM(
        pretrained=str(model), trust_remote_code=True, dtype="float32", device="cpu", batch_size=8
    )
    for name, (task, instances) in requests(data, "llm6", LLM6, 0, tmp_path).items():
        own = [own_score(trainer, original, *instance.args) for instance in instances]
        theirs = [score for score, _ in loaded.loglikelihood(instances, disable_tqdm=True)]
        np.testing.assert_allclose(theirs, own, rtol=0, atol=1e-4)

        rights, parts = [], [row for row in result["tasks"] if row["task"] == name]
        for doc_id, doc in enumerate(task.eval_docs):
            scores = [score for score, i in zip(own, instances, strict=True) if i.doc_id == doc_id]
            if name == "truthfulqa_mc2":
                probabilities = np.exp(scores) / np.exp(scores).sum()
                rights.append(probabilities[:2].sum())
                continue
            if name not in ("winogrande", "truthfulqa_mc1"):  # whose choices stand before the continuation
                scores = [score / len(choice) for score, choice in zip(scores, task.doc_to_choice(doc), strict=True)]
            gold = {
                "truthfulqa_mc1": lambda doc: 0,
                "sciq": lambda doc: 3,
                "piqa": lambda doc: doc["label"],
                "winogrande": lambda doc: int(doc["answer"]) - 1,
                "openbookqa": lambda doc: "ABCD".index(doc["answerKey"]),
                "logiqa": lambda doc: "abcd".index(doc["label"]),
            }[name](doc)
            rights.append(float(np.argmax(scores) == gold))
        value, stderr = 100 * np.mean(rights), 100 * np.std(rights, ddof=1) / len(rights) ** 0.5
        truthful[name] = value, stderr
        for row in parts:
            assert (row["value"], row["stderr"]) == pytest.approx((value, stderr), abs=0.01)
    row = next(row for row in result["tasks"] if row["task"] == "truthfulqa")
    found = [truthful[part] for part in ("truthfulqa_mc1", "truthfulqa_mc2")]
    assert list(row["parts"].values()) == pytest.approx([value for value, _ in found], abs=0.01)
    assert (row["value"], row["stderr"]) == pytest.approx(np.mean(found, axis=0).tolist(), abs=0.01)
    assert result["average"] == pytest.approx(np.mean([row["value"] for row in result["tasks"]]))


def test_arc_easy_of_the_appendix_is_scored_as_by_the_harness(model, data, tmp_path):
    """The harness's own program, task by task and question by question, on the same rows."""
    output = tmp_path / "result.json"
    given = ["--suite", "llama14e", "--tasks", "arc_easy", "--data", data, "--dtype", "float32", "--device", "cpu"]
    assert exit_code(evaluate, "--model", model, *given, "--output", output) == 0
    (row,) = json.loads(output.read_text())["tasks"]
    loaded = huggingface.HFLM(
        pretrained=str(model), trust_remote_code=True, dtype="float32", device="cpu", batch_size=1
    )
    task, instances = requests(data, "llama14e", ["arc_easy"], 0, tmp_path)["arc_easy"]
    scores = [score for score, _ in loaded.loglikelihood(instances, disable_tqdm=True)]
    rights = []
    for doc_id, doc in enumerate(task.eval_docs):
        of_doc = [score for score, i in zip(scores, instances, strict=True) if i.doc_id == doc_id]
        normed = [score / len(text) for score, text in zip(of_doc, doc["choices"]["text"], strict=True)]
        rights.append(int(np.argmax(normed)) == "ABCD".index(doc["answerKey"]))
    assert (row["column"], row["value"]) == ("ARC-E", pytest.approx(100 * np.mean(rights), abs=0.01))
    assert [entry.column for entry in suites.SUITES["llama14e"]] == (
        "MMLU CMMLU NQ GSM8K TruthfulQA HellaSwag LogiQA BoolQ LAMBADA SciQ PIQA WinoGrande ARC-E ARC-C".split()
    )


def test_tasks_with_examples_take_them_from_the_training_rows(model, data, tmp_path, capsys):
    given = ["--suite", "llama14", "--data", data, "--tasks", "arc_challenge", "lambada_openai", "--limit", "3"]
    assert exit_code(evaluate, "--model", model, *given, "--device", "cpu") == 0
    printed = capsys.readouterr().out
    assert printed.split()[:3] == ["model", "LAMBADA", "ARC-C"] and "first 3 questions" in printed
    assert "(25)" in printed
    found = requests(data, "llama14", ["arc_challenge"], 25, tmp_path)
    _, instances = found["arc_challenge"]
    rows = made_rows()
    for instance in instances:
        assert instance.args[0].count("Question: ") == 26
        assert f"Question: {instance.doc['question']}\nAnswer:" == instance.args[0].split("\n\n")[-1]
        assert instance.doc["question"] in [row["question"] for row in rows["arc_challenge/test"]]


def test_questions_with_examples_are_those_of_the_harness(model, data, tokenizer, tmp_path, monkeypatch):
    asked = []

    class Recorder(huggingface.HFLM):
        def loglikelihood(self, requests, **_):
            asked.extend((request.doc_id, *request.args) for request in requests)
            return [(0.0, False) for _ in requests]

    monkeypatch.setattr(huggingface, "HFLM", Recorder)
    path = tmp_path / "tasks.jsonl"
    given = ["--suite", "llama14", "--tasks", "arc_challenge", "--data", data]
    assert exit_code(evaluate, "--model", model, "--device", "cpu", *given) == 0
    assert exit_code(evaluate_prepare, "--tokenizer", tokenizer, "--output", path, *given) == 0
    encode = evaluate_prepare.encoder(Tokenizer(str(tokenizer)))
    expected = {}
    for doc_id, context, continuation in asked:
        expected.setdefault(doc_id, []).append(list(encode(context, continuation)))
    prepared = [json.loads(line)["choices"] for line in path.read_text().splitlines()[1:]]
    assert [[choice[:2] for choice in choices] for choices in prepared] == [expected[n] for n in sorted(expected)]


@pytest.mark.parametrize("bos", [False, True])
def test_prepared_ids_are_those_of_the_harness_on_an_export(bos, tokenizer, tmp_path):
    converted = tokenizer_json.read_model(tokenizer)
    tokenizer_json.write_tokenizer(converted, tmp_path, max_length=64)
    if bos:
        tokenizer_json.begin_texts(tmp_path, converted.trainer_spec.bos_id)
    asked = []

    class Recorder(huggingface.HFLM):
        def _loglikelihood_tokens(self, requests, **_):
            asked.extend([*request[1:]] for request in requests)

    small = LlamaConfig(num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=1)
    harness = Recorder(LlamaForCausalLM(small), tokenizer=AutoTokenizer.from_pretrained(tmp_path))
    pairs = [("", "the model"), ("Question: a text\nAnswer:", " care"), ("words  ", "and numbers")]
    harness.loglikelihood([Namespace(args=pair) for pair in pairs], disable_tqdm=True)
    encode = evaluate_prepare.encoder(Tokenizer(str(tokenizer), bos))
    assert [list(encode(*pair)) for pair in pairs] == asked


def test_a_comparison_has_a_line_for_every_model(model, data, result, tmp_path, capsys):
    other = {**result, "model": "somewhere/other", "average": 12.34, "max_length": 256}
    for name, content in (("one", result), ("two", other)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    given = Namespace(suite="llm6", tasks=None, limit=None)
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    evaluate.print_table([evaluate.result_in(path, given) for path in files], given)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["model", *(row["column"] for row in result["tasks"]), "Average"]
    assert lines[1].split()[0] == str(model) and lines[3].split()[0] == "somewhere/other"
    assert lines[1].split()[1:7] == [f"{row['value']:.1f}" for row in result["tasks"]]
    assert lines[3].split()[-1] == "12.3"
    assert len({len(line) for line in lines[:5]}) == 1
    assert [line.split(" is the mean of ")[0] for line in lines[5:7]] == [
        f"TruthfulQA of {name}" for name in (model, "somewhere/other")
    ]
    (said,) = lines[7:]
    assert f": at most 1024 of {model}, 256 of somewhere/other; --max-length" in said
    evaluate.print_table([{**result, "max_length": length} for length in (64, 1024)], given)  # of one model
    assert f": at most 64 of {model}, 1024 of {model}; --max-length" in capsys.readouterr().out
    mine = f": by lm_eval {result['versions']['lm_eval']} and --dtype float32 for {model}, "
    for changed, said in (({"versions": {"lm_eval": "0.3"}}, "lm_eval 0.3"), ({"dtype": "auto"}, "--dtype auto")):
        evaluate.print_table([result, result | changed], given)
        _, found = capsys.readouterr().out.split(mine)
        assert said in found and found.count("\n") == 1


def test_an_error_that_one_question_cannot_have_is_left_out(model, data, result, tmp_path, capsys):
    given = ["--suite", "llm6", "--data", data, "--device", "cpu", "--tasks", "sciq", "--limit", "1"]
    assert exit_code(evaluate, "--model", model, *given, "--output", tmp_path / "one.json") == 0
    assert "±" not in capsys.readouterr().out
    one = json.loads((tmp_path / "one.json").read_text())
    assert one["tasks"][0]["stderr"] is one["average_stderr"] is None
    assert exit_code(evaluate, "--model", model, *given, "--compare", tmp_path / "one.json") == 0
    assert "±" not in capsys.readouterr().out
    whole = np.linalg.norm([row["stderr"] for row in result["tasks"]]) / len(result["tasks"])
    assert result["average_stderr"] == pytest.approx(whole)


def test_a_file_of_other_tasks_or_questions_stands_in_no_table(model, result, tmp_path, capsys):
    files = {
        "other": {**result, "tasks": result["tasks"][1:2]},  # as many columns as asked for, but another one
        "fewer": {**result, "tasks": result["tasks"][:1], "limit": 5},
        "foreign": {"results": {}},
        "lacking": {key: value for key, value in result.items() if key != "average"},
    }
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    given = ["--model", model, "--suite", "llm6", "--tasks", result["tasks"][0]["task"]]
    said = ["has other columns", "--limit 5", *["neither a model nor a file"] * 3]
    for name, message in zip([*files, "absent"], said, strict=True):
        assert exit_code(evaluate, *given, "--compare", tmp_path / f"{name}.json") == 2
        assert message in capsys.readouterr().err


def test_wrong_arguments_and_files_are_one_line_each(model, data, tmp_path, capsys):
    (tmp_path / "sciq").mkdir()
    (tmp_path / "sciq" / "test.jsonl").write_text('{"question": "x"}\n')
    for name in ("bare", "table", "winogrande"):
        (tmp_path / name).mkdir()
    (tmp_path / "winogrande" / "validation.jsonl").write_bytes("{}\n".encode("utf-16"))
    (tmp_path / "table" / "config.json").write_text('{"model_type": "moh_llama", "learned_positions": 40}')
    (tmp_path / "bare" / "config.json").write_text('{"model_type": "moh_llama"}')
    good = ["--model", model, "--suite", "llm6"]
    cases = [
        (["--model", tmp_path / "bare", "--suite", "llm6"], ["bare: has no tokenizer;"]),
        (["--model", tmp_path, "--suite", "llm6"], ["has no config.json"]),
        ([*good, "--max-length", 41, "--compare", tmp_path / "table"], ["a table of 40 positions; give at most 40"]),
        ([*good, "--batch-size", "autofoo"], ["--batch-size autofoo: write a number from 1 on"]),
        ([*good, "--tasks", "mmlu", "--compare", model], ["mmlu: is not in llm6"]),  # before a model is evaluated
        ([*good, "--data", data, "--tasks", "mmlu"], ["mmlu: is not in llm6"]),
        ([*good, "--data", tmp_path, "--tasks", "sciq", "piqa"], ["line 1 has no support, correct", "piqa/validation"]),
        ([*good, "--data", tmp_path, "--tasks", "winogrande"], ["line 1 is not a JSON object ('utf-8' codec"]),
        ([*good, "--compare", tmp_path], [f"--compare {tmp_path}: has no config.json"]),
        ([*good, "--output", tmp_path / "absent/a.json"], ["there is no directory"]),
        (["--model", model, "--suite", "llama14", "--data", data, "--tasks", "boolq"], ["validation", "boolq/train"]),
    ]
    for given, messages in cases:
        assert exit_code(evaluate, *given) == 2
        errors = capsys.readouterr().err.splitlines()
        assert len(errors) == len(messages), errors
        assert all(message in error for message, error in zip(messages, errors, strict=True)), errors


def test_python_of_a_model_is_run_only_where_it_is_trusted(model, data, programs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(programs / "python"))  # for the models that are compared
    copy, mark = shutil.copytree(model, tmp_path / "copy"), tmp_path / "ran"
    given = ["--suite", "llm6", "--data", data, "--tasks", "sciq", "--limit", 1, "--device", "cpu"]
    code = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n"
    (copy / "modeling_moh.py").write_text(code + (model / "modeling_moh.py").read_text())
    for compared in ([], ["--compare", copy]):
        assert exit_code(evaluate, "--model", model if compared else copy, *given, *compared) == 2
        error = capsys.readouterr().err
        assert "copy: differs from the code of this installation in modeling_moh.py, which is not run" in error
    assert not mark.exists()
    assert exit_code(evaluate, "--model", model, *given, "--compare", copy, "--trust-code") == 0
    assert mark.exists()
    first, _, second, *_ = capsys.readouterr().out.splitlines()[1:]
    assert first.split()[1:] == second.split()[1:]  # the same scores, by whichever copy of the code


def test_code_of_a_tokenizer_is_not_run_unasked(model, data, tmp_path, capsys):
    copy = shutil.copytree(model, tmp_path / "copy")
    named = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (copy / "tokenizer_config.json").write_text(json.dumps(named))
    given = ["--suite", "llm6", "--data", data, "--tasks", "sciq", "--limit", 1, "--device", "cpu"]
    assert exit_code(evaluate, "--model", copy, *given) == 2
    error = capsys.readouterr().err
    assert "needs Python files of its own, which are not run; read them, and add --trust-code" in error


def test_an_answer_longer_than_the_models_sequences_is_refused(model, data, tmp_path, capsys):
    (tmp_path / "piqa").mkdir()
    rows = [json.loads(line) for line in (data / "piqa" / "validation.jsonl").read_text().splitlines()[:2]]
    rows[1]["sol2"] = " ".join(WORDS * 4)
    (tmp_path / "piqa" / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--model", model, "--suite", "llm6", "--data", tmp_path, "--tasks", "piqa", "--max-length", 64]
    assert exit_code(evaluate, *given) == 2
    error = capsys.readouterr().err
    assert "piqa: prompts with answers do not fit into 64 tokens" in error and "--max-length" in error
    assert exit_code(evaluate, *given[:-1], 1024) == 0


def test_the_prompts_of_tasks_are_the_domains_of_a_head_report(model, data, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    tasks = "--suite llm6 --tasks sciq winogrande --tokens 64 --seq-length 32 --examples 1".split()
    arguments = [*tasks, "--task-data", str(data), "--model", str(model), "--output", str(tmp_path / "heads")]
    assert head_report.main(arguments) == 0
    report = json.loads((tmp_path / "heads" / "heads.json").read_text())
    assert [(domain["name"], domain["tokens"]) for domain in report["domains"]] == [("SciQ", 64), ("WinoGrande", 64)]
    assert report["load"].keys() == {"SciQ", "WinoGrande"} and len(report["similarity"]) == 2
    assert head_report.main(arguments[5:]) == 2
    assert "either --data or --suite" in capsys.readouterr().err


def test_the_text_of_a_task_is_its_prompts_in_order(model, data, tokenizer):
    tokens = Tokenizer(str(tokenizer))
    (domain,) = task_text.task_domains("llm6", ["sciq"], data, tokens, 32, 64)
    found = tokens.model.decode([int(token) for window in domain.windows for token in window])
    first = json.loads((data / "sciq" / "test.jsonl").read_text().splitlines()[0])
    expected = f"{first['support']} Question: {first['question']} Answer:"
    assert " ".join(found.split()).startswith(expected)  # the tokenizer of this file knows no lines


def test_the_subjects_of_a_task_take_turns_until_the_text_is_full(monkeypatch):
    def subject(name, questions):
        asked = [Namespace(doc_id=n, args=(f"{name}{n}", choice)) for n in range(questions) for choice in "AB"]
        return Mock(instances=asked)

    subjects = {name: subject(name, questions) for name, questions in (("x", 3), ("y", 1), ("z", 2))}
    monkeypatch.setattr(task_text, "load_tasks", lambda *_: nullcontext((None, {"mmlu": {"tasks": subjects}})))
    encoded = []
    tokens = Namespace(encode=lambda text: encoded.append(text) or np.zeros(20, np.uint32))
    (domain,) = task_text.task_domains("llama14", ["mmlu"], None, tokens, 32, 81)
    assert encoded == ["x0", "y0", "z0", "x1", "z1"] and len(domain.windows) == 2
