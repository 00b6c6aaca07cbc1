"""Text in, token shards out; as ``train`` and ``extend``, SentencePiece models. For users: docs/data.md.

    python data_prep/tokenize.py --tokenizer M.model --source NAME=GLOB [--source ...] --output DIR [--workers N]
    python data_prep/tokenize.py --tokenizer M.model --recognize DIRECTORY [--only NAME ...] --output DIR
    python data_prep/tokenize.py train --help

The inputs (inputs.py, recognised by corpora.py) are cut into units (units.py). Each becomes a shard (writing.py, from
documents.py and encoding.py) of the data directory DIR (output.py; its layout: moh_lm/data/shards.py) in one of several
processes (workers.py). A restart keeps the shards that are complete; a shard that an earlier run made of the same input
with other content or options is replaced. Exit codes: 0 complete, 1 an input failed, 2 wrong usage.
"""

import os
import sys

if __name__ == "__main__":  # the root of the checkout, not this folder, whose tokenize.py hides a standard module
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from data_prep.flags import extend_flags, tokenize_flags, train_flags
from moh_lm.cli.command import run

COMMANDS = {
    "train": (train_flags, "data_prep.sentencepiece_training"),
    "extend": (extend_flags, "data_prep.sentencepiece_extension"),
}


def main(texts: list[str]) -> int:
    parse, work = COMMANDS.get(texts[0] if texts else "", (tokenize_flags, "data_prep.tokenization"))
    arguments, again = texts[parse is not tokenize_flags :], "stopped; the same command goes on from here"
    return run("tokenize.py", parse, arguments, work, remark="; nothing was written", interrupted=again)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
