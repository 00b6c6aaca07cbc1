"""Shows for which images the heads of an image model are chosen: loads by class and layer, and for a MoH-DiT by time
step.

    python tools/head_report_images.py RUN_OR_STEP --images DIR --output heads
    python tools/head_report_images.py RUN_OR_STEP --images DIR --classes 1 7 3 --number 500 --weights master

DIR holds held-out images, or latents for a MoH-DiT, like --validation-dir in training. --output receives heads.json,
with all numbers, and heads.png. A table shows for each layer the number of routed heads, the entropy of their load, the
least and the most used head, and how much classes differ; tools/heads/image_report.py has the formulas.

Exit codes: 0; 1 an image is damaged, or a file cannot be written; 2 an argument must be fixed.
"""

import json
import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import device, output_path, run_file
from moh_lm.config import ConfigError, raise_any
from moh_lm.data.files import ShardError, publish_own, refuse_foreign
from moh_lm.units import at_least


def main(texts):
    return run_file(__file__, __doc__, add_flags, run, texts, failures=(ShardError,), extra="plot")


def add_flags(parser):
    add = parser.add_argument
    add("model", type=Path, metavar="RUN_OR_STEP", help="run directory, or its checkpoints/step-N")
    add("--images", required=True, type=Path, metavar="DIR", help="held-out images in class folders, or latents")
    add("--classes", type=at_least(0), nargs="+", metavar="N", help="use images of these classes only (default: all)")
    add("--number", type=at_least(1), default=2000, metavar="N", help="images to read, from each class in turn "
        "(default: %(default)s)")  # fmt: skip
    add("--weights", choices=("master", "ema"), help="weights, or their moving average (default: ema if kept)")
    add("--batch-size", type=at_least(1), default=64, metavar="N", help="images at a time (default: %(default)s)")
    add("--output", type=output_path, default="heads", metavar="DIR", help="directory for both files (default: "
        "%(default)s)")  # fmt: skip
    add("--device", type=device, metavar="NAME", help="cpu, cuda, or cuda:N (default: cuda if available, else cpu)")


def run(arguments):
    from data_prep.output import writable_directory
    from moh_lm.checkpoint.saver import find_step
    from moh_lm.cli.devices import usable_device
    from moh_lm.vision.load import load_model
    from moh_lm.vision.loader import open_source
    from tools.heads.image_report import plain, report_of, table

    device = usable_device(arguments.device)
    step = find_step(arguments.model)
    config, model = load_model(step, arguments.weights)
    if not config.model.routed_layers():
        remedy = "so every token uses all of them; give a run with routed heads"
        raise ConfigError([f"{arguments.model}: routes no heads, {remedy}"])
    source = open_source(arguments.images)
    classes = list(dict.fromkeys(arguments.classes or range(config.model.num_classes)))
    check(arguments, step, config.model, source, classes)
    refuse_foreign(writable_directory(arguments.output), ("heads.json", "heads.png"))
    report = report_of(config, model.to(device), source, classes, arguments.number, arguments.batch_size)
    report = {"model": str(arguments.model), "source": str(arguments.images), **report}
    publish_own(arguments.output, {"heads.json": json.dumps(report, default=plain).encode() + b"\n"})
    print(table(report))
    from tools.heads.images import picture  # needs matplotlib, so the numbers come first

    publish_own(arguments.output, {"heads.png": picture(report)})
    print(f"{report['images']} images of {len(classes)} classes; all numbers: {arguments.output / 'heads.json'}")


def check(arguments, step, model, source, classes):
    from moh_lm.vision.loader import held_out_problems

    problems, known = list(held_out_problems(step, model, source)), model.num_classes
    problems += [f"--classes {n}: must be below {known}, the classes of the model" for n in classes if n >= known]
    if arguments.number < len(classes):
        few = f"must be at least {len(classes)}, one image per class"
        problems.append(f"--number {arguments.number}: {few}; or name fewer classes with --classes")
    raise_any(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
