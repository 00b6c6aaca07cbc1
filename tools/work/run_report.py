"""The work of tools/run_report.py; the page itself is made by moh_lm/monitor/report."""

from pathlib import Path

from moh_lm.monitor.report.page import write_page

FAILURES = OSError


def run(arguments):
    default = arguments.runs[0] / "report.html" if len(arguments.runs) == 1 else Path("report.html")
    for path in write_page(arguments.runs, arguments.output or default, arguments.png):
        print(f"wrote {path}")
