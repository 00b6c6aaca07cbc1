"""The page of a run: what its directory says (series), the pictures, the HTML."""

import sys
from pathlib import Path


def report_run(directory, config_type):
    """Write report.html into the directory of a run with a configuration of this type.

    A failure is a line on standard error: a page is not worth a run.
    """
    path = Path(directory) / "report.html"
    try:
        from moh_lm.monitor.report.page import write_page  # optional: it needs matplotlib and Jinja2

        write_page([directory], path, config_type)
        print(f"wrote {path}", flush=True)
    except ModuleNotFoundError as error:
        print(f"no {path}: {error.name} is not installed; pip install matplotlib jinja2", file=sys.stderr, flush=True)
    except Exception as error:
        print(f"no {path}: {error}", file=sys.stderr, flush=True)
