"""The paper's sets of tasks for lm-evaluation-harness. tools/tasks/rows.py loads them."""

from typing import NamedTuple

from moh_lm.config import raise_any

SEED = 1234  # seed for drawing examples of a prompt, as in the harness's own program


class Entry(NamedTuple):
    """One column of the paper's table.

    task: the harness's name of a task or group. folder: the harness's folder that defines it. shots: examples in the
    prompt. metric: the harness's key. fields: fields that a local row must have. parts: the harness's tasks whose mean
    is the column, if it is not one task; local rows are those of the last part.
    """

    column: str
    task: str
    folder: str
    shots: int
    metric: str
    fields: str
    parts: tuple[str, ...] = ()

    @property
    def tasks(self):
        """The harness's names of its tasks."""
        return self.parts or (self.task,)


ACC, ACC_NORM = "acc,none", "acc_norm,none"
ABCD = "question A B C D answer"
SCIQ = Entry("SciQ", "sciq", "sciq", 0, ACC_NORM, "support question correct_answer distractor1 distractor2 distractor3")
PIQA = Entry("PIQA", "piqa", "piqa", 0, ACC_NORM, "goal sol1 sol2 label")
WINOGRANDE = Entry("WinoGrande", "winogrande", "winogrande", 0, ACC, "sentence option1 option2 answer")
OPENBOOKQA = Entry("OpenbookQA", "openbookqa", "openbookqa", 0, ACC_NORM, "question_stem choices answerKey")
LOGIQA = Entry("LogiQA", "logiqa", "logiqa", 0, ACC_NORM, "context question options label")
TRUTHFULQA = Entry(
    "TruthfulQA", "truthfulqa", "truthfulqa", 0, ACC, "question mc1_targets mc2_targets",
    parts=("truthfulqa_mc1", "truthfulqa_mc2"),
)  # fmt: skip
MMLU = Entry("MMLU", "mmlu", "mmlu/default", 5, ACC, "question choices answer")
CEVAL = Entry("CEVAL", "ceval-valid", "ceval", 5, ACC, ABCD)
CMMLU = Entry("CMMLU", "cmmlu", "cmmlu", 5, ACC, "Question A B C D Answer")
GSM8K = Entry("GSM8K", "gsm8k", "gsm8k", 8, "exact_match,strict-match", "question answer")
HELLASWAG = Entry("HellaSwag", "hellaswag", "hellaswag", 10, ACC_NORM, "activity_label ctx_a ctx_b endings label")
BOOLQ = Entry("BoolQ", "boolq", "super_glue", 32, ACC, "passage question label")
LAMBADA = Entry("LAMBADA", "lambada_openai", "lambada", 0, ACC, "text")
NQ = Entry("NQ", "nq_open", "nq_open", 32, "exact_match,remove_whitespace", "question answer")
ARC_E = Entry("ARC-E", "arc_easy", "arc", 0, ACC_NORM, "question choices answerKey")
ARC_C = Entry("ARC-C", "arc_challenge", "arc", 25, ACC_NORM, "question choices answerKey")
SUITES = {
    "llm6": (SCIQ, PIQA, WINOGRANDE, OPENBOOKQA, LOGIQA, TRUTHFULQA),
    "llama14": (
        MMLU, CEVAL, CMMLU, GSM8K, TRUTHFULQA, HELLASWAG, LOGIQA, BOOLQ, LAMBADA, SCIQ, PIQA, WINOGRANDE, NQ, ARC_C,
    ),
    "llama14e": (
        MMLU, CMMLU, NQ, GSM8K, TRUTHFULQA, HELLASWAG, LOGIQA, BOOLQ, LAMBADA, SCIQ, PIQA, WINOGRANDE, ARC_E, ARC_C,
    ),
}  # fmt: skip


def entries_of(suite, names):
    """Return the entries of a suite, or those in ``names``. Raises ConfigError for a name that it does not have."""
    entries = SUITES[suite]
    known = [entry.task for entry in entries]
    unknown = [name for name in names or () if name not in known]
    raise_any([f"--tasks {name}: is not in {suite}; choose from {', '.join(known)}" for name in unknown])
    return [entry for entry in entries if not names or entry.task in names]
