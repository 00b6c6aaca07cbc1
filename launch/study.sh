#!/usr/bin/env bash
# The study: is it better to choose heads for each token, to gate them all, or to have fewer of them?
#
#     bash launch/study.sh [OUT] [FLAGS]
#
# The arms of docs/study.md at the size s2, each at its own best learning rate, with five seeds on the same samples. OUT
# (default: runs/study) receives corpus, tokens, runs, runs.jsonl, REPORT.md and its pictures. Stop it whenever you like:
# the same command resumes, and repeats nothing that is complete.
#
# The next size: --sizes m2 --seeds 1 2 3. Seconds of every arm, side by side on this machine: --times 5. The report of
# what is complete: --report. --recorded studies/study_runs.jsonl reuses the runs that we trained. On a GPU, train one
# run with --compile first, which fills the compiler's cache, and then twelve at a time: --jobs 12. FLAGS are those of
# python -m studies.study --help, and any of moh_lm.pretrain, which win.
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/quickstart_functions.sh"
compare study make_english "docstrings=4 prose=1 code=5" "$@"
