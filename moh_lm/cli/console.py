"""The commands that ``pip install`` makes: moh-export-hf is tools/export_hf.py, moh-tokenize is data_prep/tokenize.py.

An installed package has both folders in moh_lm/commands/, where their modules cannot clash with other packages. A
checkout has them in its root.
"""

import runpy
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
PLACE = PACKAGE / "commands" if (PACKAGE / "commands").is_dir() else PACKAGE.parent


def main():
    """Run the script that the command is named after."""
    name = Path(sys.argv[0]).name.removeprefix("moh-").replace("-", "_")
    sys.argv[0] = next(str(path) for path in PLACE.glob(f"*/{name}.py") if path.parent.name in ("tools", "data_prep"))
    runpy.run_path(sys.argv[0], run_name="__main__")
