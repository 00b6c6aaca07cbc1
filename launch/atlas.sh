#!/usr/bin/env bash
# The atlas: does choosing heads pay, against gating them, against having fewer of them?
#
#     bash launch/atlas.sh [OUT] [FLAGS]
#
# Forms of routing and gating at three sizes, each at its own best learning rate, with several seeds on the same samples
# (docs/history/atlas.md). OUT (default: runs/atlas) receives corpus, tokens, runs, REPORT.md and its pictures. Stop it whenever
# you like: the same command resumes, and repeats nothing that is complete.
#
# FLAGS are those of python -m studies.atlas --help, and any of moh_lm.pretrain, which win. For a report of the
# complete runs while it works, run: bash launch/atlas.sh OUT --report.
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/quickstart_functions.sh"
compare atlas make_english "docstrings=4 prose=1 code=5" "$@"
