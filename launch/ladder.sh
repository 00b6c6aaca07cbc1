#!/usr/bin/env bash
# The ladder: the presets one after another, the loss of the next one predicted before it is trained.
#
#     bash launch/ladder.sh [OUT] [--rungs 1M 3M 10M] [FLAGS]
#
# Each size is trained once, at a stable rate, with decay branches for a quarter, half and all of its budget. A law is
# fitted to their losses against compute (docs/ladder.md). OUT (default: runs/ladder) receives text, tokens, runs,
# predictions, REPORT.md and ladder.png. Stop it whenever you like: the same command goes on.
#
# --dry-run shows the command of each size and what it would do. --widths 128 256 512 trains one depth at these widths
# over a range of learning rates, with and without --base-width. FLAGS are those of python -m launch.ladder --help, and
# any of moh_lm.pretrain, which win.
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/quickstart_functions.sh"
compare ladder make_english "docstrings=4 prose=1 code=5" "$@"
