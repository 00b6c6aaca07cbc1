"""Copy a data directory to this machine: token shards, by their manifest, each file checked against its checksum.

    python tools/fetch_data.py FROM --output DIR [--workers N] [--verify]

FROM is a directory, or a URL that fsspec reads, such as s3://BUCKET/data (pip install -e '.[remote]'). The manifest is
written last, so that no run starts with a part of the data. The same command resumes: it keeps complete shards and
continues files that were cut short. With --verify it reads the complete ones, and copies damaged ones again.

Exit codes: 0; 1 a file could not be read, or is damaged at FROM; 2 an argument has to be fixed.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import Failure, output_path, run_file
from moh_lm.data.files import ShardError
from moh_lm.units import at_least, counted

RESUMES = "; run the same command again to resume"


def main(texts):
    return run_file(__file__, __doc__, add_flags, run, texts, failures=(ShardError,), remark=RESUMES, extra="remote")


def add_flags(parser):
    parser.add_argument("source", metavar="FROM", help="data directory, or a URL that fsspec reads")
    parser.add_argument("--output", type=output_path, required=True, metavar="DIR", help="data directory to be made")
    help_of_workers = "shards that are copied at once (default: %(default)s)"
    parser.add_argument("--workers", type=at_least(1), default=8, metavar="N", help=help_of_workers)
    help_of_verify = "also read the shards that are already there, and copy damaged ones again"
    parser.add_argument("--verify", action="store_true", help=help_of_verify)


def run(arguments):
    from data_prep.report import room
    from tools.shards.fetch import fetch

    try:
        copied, kept = fetch(arguments.source, arguments.output, arguments.workers, arguments.verify)
    except OSError as error:
        if not error.errno or error.filename:
            raise
        raise Failure(f"{arguments.output}: {error.strerror}, {room(arguments.output)}") from error  # while writing
    how = "verified" if arguments.verify else "not read again"
    made = f"{counted(copied, 'shard')} copied and verified"
    print(f"{arguments.output} is complete: {made}, {kept} already there and {how}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
