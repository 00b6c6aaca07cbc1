#!/usr/bin/env bash
# The ladder: the presets trained one after another, the smallest first, and a table of their losses.
#
#     bash launch/ladder.sh [OUT] [--rungs 1M 3M 10M] [FLAGS]
#
# Each size is trained once, at a stable rate, with decay branches for a quarter, half and all of its budget
# (docs/history/ladder.md). OUT (default: runs/ladder) receives text, tokens, runs, and REPORT.md with their losses. Stop it
# whenever you like: the same command resumes.
#
# --dry-run shows the command of each size and what it would do. --widths 128 256 512 trains one depth at these widths
# over a range of learning rates, with and without --base-width. FLAGS are those of python -m studies.ladder --help, and
# any of moh_lm.pretrain, which win.
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/quickstart_functions.sh"
compare ladder make_english "docstrings=4 prose=1 code=5" "$@"
