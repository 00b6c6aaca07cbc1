"""The work of tools/run_report.py; the page itself is made by moh_lm/monitor/report."""

from pathlib import Path

from moh_lm.config import ConfigError
from moh_lm.monitor.report.page import write_page
from moh_lm.vision.config import kind_of_run

FAILURES = ()


def run(arguments):
    default = arguments.runs[0] / "report.html" if len(arguments.runs) == 1 else Path("report.html")
    output = arguments.output or default
    kind, *others = map(kind_of_run, arguments.runs)
    for run, other in zip(arguments.runs[1:], others, strict=True):
        if other is not kind:
            programs = f"is of {other.program}, and {arguments.runs[0]} of {kind.program}"
            raise ConfigError([f"{run}: {programs}; give runs of one program"])
    try:
        files = write_page(arguments.runs, output, kind, arguments.png)
    except OSError as error:
        raise ConfigError([f"--output {output}: cannot be written ({error.strerror}); give another file"]) from error
    for path in files:
        print(f"wrote {path}")
