"""The run report: reading the run directory (series, curves), pictures, tables and the HTML page."""

import sys
from pathlib import Path


def report_run(directory, config_type, progress):
    """Write report.html into the directory of a run with a configuration of this type. progress: called for each row.

    A failure only prints a line on standard error, because a report is not worth ending a run for.
    """
    path = Path(directory) / "report.html"
    try:
        from moh_lm.monitor.report.page import write_page  # optional: it needs matplotlib and Jinja2

        write_page([directory], path, config_type, progress=progress)
        print(f"wrote {path}", flush=True)
    except ModuleNotFoundError as error:
        print(f"no {path}: {error.name} is not installed; pip install matplotlib jinja2", file=sys.stderr, flush=True)
    except Exception as error:
        print(f"no {path}: {getattr(error, 'strerror', None) or error}", file=sys.stderr, flush=True)
