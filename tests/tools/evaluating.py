"""What the tests of evaluation share: rows of the tasks with made-up words, and a command as a function."""

import random

import pytest

# Without these whatever imports this file is skipped.
pytest.importorskip("transformers")
pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")

WORDS = "the model of a text head token layer attends to words and numbers in data trained with care 7 12".split()
ROWS = 9
LLM6 = ["sciq", "piqa", "winogrande", "openbookqa", "logiqa", "truthfulqa_mc1", "truthfulqa_mc2"]


def made_rows(seed=0):
    """{task/split: rows} in the fields of the official data sets, with made-up words."""
    draw = random.Random(seed)

    def words(most):
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, most)))

    def four():
        return {"text": [words(4) for _ in range(4)], "label": list("ABCD")}

    makers = {
        "sciq/test": lambda: {
            "support": words(12), "question": words(6), "correct_answer": words(3),
            "distractor1": words(2), "distractor2": words(3), "distractor3": words(4),
        },
        "piqa/validation": lambda: {
            "goal": words(6), "sol1": words(6), "sol2": words(6), "label": draw.randint(0, 1)
        },
        "winogrande/validation": lambda: {
            "sentence": f"{words(4)} _ {words(5)}", "option1": words(2), "option2": words(2),
            "answer": draw.choice("12"),
        },
        "openbookqa/test": lambda: {"question_stem": words(6), "choices": four(), "answerKey": draw.choice("ABCD")},
        "logiqa/test": lambda: {
            "context": words(9), "question": words(5), "options": four()["text"], "label": draw.choice("abcd")
        },
        "truthfulqa_mc2/validation": lambda: {
            "question": words(6),
            "mc1_targets": {"choices": four()["text"], "labels": [1, 0, 0, 0]},
            "mc2_targets": {"choices": four()["text"], "labels": [1, 1, 0, 0]},
        },
        "arc_easy/test": lambda: {"question": words(5), "choices": four(), "answerKey": draw.choice("ABCD")},
        "arc_challenge/test": lambda: {"question": words(5), "choices": four(), "answerKey": draw.choice("ABCD")},
        "arc_challenge/train": lambda: {"question": words(5), "choices": four(), "answerKey": draw.choice("ABCD")},
        "lambada_openai/test": lambda: {"text": words(9) + " model"},
    }  # fmt: skip
    return {name: [make() for _ in range(30 if "train" in name else ROWS)] for name, make in makers.items()}


def exit_code(program, *arguments):
    """The exit code of a command, run in this process."""
    return program.main(list(map(str, arguments)))
