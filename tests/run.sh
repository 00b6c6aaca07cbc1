#!/usr/bin/env bash
# The whole test suite on the CPU, in the environment that it makes. Arguments go to pytest:
#
#     bash tests/run.sh
#     bash tests/run.sh --quick
#     bash tests/run.sh tests/launch/test_quickstart.py -k corpus
#
# --quick runs the tests that are marked `quick`: in a minute and a half on two cores they say whether a change broke an
# equation (router, attention, positions, the exported model), a format (shards, mixture, tokens, checkpoints, exports)
# or the parity of two ranks with one. The exit code is pytest's, or 1 if ruff finds something.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source launch/environment.sh test

scratch=$(mktemp -d)
trap 'rm -rf -- "$scratch"' EXIT
unset PYTHONDONTWRITEBYTECODE # makes every process compile each module of this checkout again
unset LOCAL_SIZE # makes every rank of DeepSpeed leave 66 MiB in /dev/shm
export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}" OMP_NUM_THREADS=1
export TORCH_EXTENSIONS_DIR="$scratch/torch_extensions" # a build killed elsewhere would be waited for
# Torch asks for the name behind each address of a rank: a name server that drops questions costs five seconds each.
if RES_OPTIONS=attempts:0 getent hosts "$HOSTNAME" >"$scratch/name"; then # this machine needs none to know itself
    export RES_OPTIONS=attempts:0 TORCH_CPP_LOG_LEVEL=ERROR # torch warns of addresses without a name
fi
export HF_HOME="$scratch/huggingface" HF_HUB_OFFLINE=1

# Four files at a time, in the order of conftest.py: tests that wait leave two cores idle (docs/history/log.md). Quick ones do not.
workers=4
if [[ ${1:-} == --quick ]]; then
    workers=2
    set -- -m quick "${@:2}"
fi
python -m ruff check .
python -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
