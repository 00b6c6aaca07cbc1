"""Exports a checkpoint of an image model: a classifier for transformers, a DiT for diffusers.

    python tools/export_vision.py RUN_OR_STEP --output DIR [--weights ema]
    python tools/export_vision.py RUN_OR_STEP --output DIR --vae VAE_DIR        a DiT of latents, with its decoder

    AutoModelForImageClassification.from_pretrained(DIR, trust_remote_code=True)
    DiffusionPipeline.from_pretrained(DIR, trust_remote_code=True)

DIR contains the code of the model, which only needs torch, and transformers or diffusers. Everything is written beside
DIR, read again and compared with the checkpoint's model, and then renamed to DIR.

Exit codes: 0 the export is in DIR; 1 it failed its check or could not be written, and nothing is there; 2 an argument
or the checkpoint must be fixed.
"""

import shutil
import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import output_path, run_file
from moh_lm.config import TWO_STAGE, ConfigError
from moh_lm.data.files import read_json, write_json

ROUTING = "head_selection num_shared_heads num_active_routed_heads routing two_stage".split()
OF_VIT = "image_size hidden_sizes depths num_attention_heads mlp_ratios sr_ratios".split()
OF_DIT = "input_size in_channels patch_size num_classes hidden_size num_layers num_attention_heads".split()
OF_DIT += ["head_dim", "mlp_ratio", "class_dropout"]
AUTO_MAP = {
    "AutoConfig": "modeling_moh_vit.MoHViTConfig",
    "AutoModelForImageClassification": "modeling_moh_vit.MoHViTForImageClassification",
}
TOLERANCE = 1e-7  # relative to the largest output if that is above 1
CARDS = {
    True: ("MoH-ViT", "transformers", "image-classification", "AutoModelForImageClassification"),
    False: ("MoH-DiT", "diffusers", "unconditional-image-generation", "DiffusionPipeline"),
}


def main(texts):
    words = {"remark": "; nothing was exported", "extra": "vision"}
    return run_file(__file__, __doc__, add_flags, run, texts, **words)


def add_flags(parser):
    add = parser.add_argument
    add("model", type=Path, metavar="RUN_OR_STEP", help="run directory, or its checkpoints/step-N")
    add("--output", required=True, type=output_path, metavar="DIR", help="directory to create")
    add("--weights", choices=("master", "ema"), help="weights, or their moving average (default: ema if kept)")
    add("--vae", type=Path, metavar="DIR", help="for a DiT of latents: directory of the AutoencoderKL to include")


def run(arguments):
    """Run the whole program. Raises ConfigError before anything is written, ExportError or OSError after."""
    import torch
    from transformers.utils import logging

    from data_prep.output import writable_directory
    from moh_lm.checkpoint.directory import reading
    from moh_lm.checkpoint.saver import find_step
    from moh_lm.vision.load import load_model
    from moh_lm.vision.loader import names_of_training
    from tools.hf.convert.export_directory import publish, workplace, write_list

    logging.disable_progress_bar()
    output = arguments.output.resolve()
    check_empty(output, arguments.output)
    step = find_step(arguments.model)
    with reading(step):
        training, model = load_model(step, arguments.weights)
        is_classifier = training.kind == "vit"
        names = names_of_training(step) if is_classifier else None
    config = training.model
    if arguments.vae:
        check_vae(arguments.vae, is_classifier, config)
    with workplace(writable_directory(output.parent)) as temporary:
        with torch.no_grad():
            if is_classifier:
                difference = write_classifier(config, model, names, temporary)
            else:
                difference = write_pipeline(config, model, arguments.vae, temporary)
        count = sum(parameter.numel() for parameter in model.parameters())
        (temporary / "README.md").write_text(card(config, is_classifier, step, count), encoding="utf-8")
        write_list(temporary)
        check_empty(output, arguments.output)  # another program may have written there meanwhile
        publish(temporary, output)
    print(f"exported {step} to {output}: {count:,} parameters")
    print(f"checked: outputs differ from the checkpoint's by at most {difference:.1e}")


def check_empty(output, given):
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError([f"--output {given}: is not empty; give another directory"])


def check_vae(path, is_classifier, config):
    from tools.hf.convert.autoencoder import load_autoencoder

    if is_classifier:
        raise ConfigError([f"--vae {path}: the model is a classifier; leave it out"])
    if list(path.glob("*.bin")) and not list(path.glob("*.safetensors")):
        raise ConfigError([f"--vae {path}: has no .safetensors; write it again with safe_serialization=True"])
    channels = load_autoencoder(path).config.latent_channels
    if channels != config.in_channels:
        raise ConfigError([f"--vae {path}: has {channels} channels, but the model's latents {config.in_channels}"])


def copy_vae(vae, directory):
    """Copy configuration and weights only: no code, and no reference to code."""
    directory.mkdir()
    values = read_json(vae / "config.json")
    write_json(directory / "config.json", {key: value for key, value in values.items() if key != "auto_map"})
    for path in (*vae.glob("*.safetensors"), *vae.glob("*.safetensors.index.json")):
        shutil.copyfile(path, directory / path.name)


def settings(config, names):
    """Return {name: value} of a model and its heads, without the two-stage setting if the routing has one stage."""
    heads = {name: getattr(config.heads, name) for name in ROUTING}
    if config.heads.routing not in TWO_STAGE:
        del heads["two_stage"]
    return {name: getattr(config, name) for name in names} | heads


def without_defaults(path, described):
    """Remove from a config.json the routing settings that its class added to those that are ``described``."""
    added = {*ROUTING} - {*described}
    write_json(path, {name: value for name, value in read_json(path).items() if name not in added})


def write_classifier(config, model, names, directory):
    """Write the files for transformers; returns the largest error of the logits after reading them again."""
    import torch

    from moh_lm.vision.augment import DEVIATION, MEAN
    from tools.hf.convert.shipped_code import VIT, import_code, write_code

    write_code(VIT, directory)
    code = import_code(directory, "modeling_moh_vit")
    numbers = {"num_channels": config.in_channels, "num_labels": config.num_classes}
    if names:
        numbers |= {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}}
    described = settings(config, OF_VIT)
    copy = code.MoHViTForImageClassification(code.MoHViTConfig(**described, **numbers, auto_map=AUTO_MAP))
    copy.load_state_dict(model.state_dict())
    copy.save_pretrained(directory)
    without_defaults(directory / "config.json", described)
    size, channels = config.image_size, config.in_channels
    write_json(directory / "preprocessor_config.json", {
        "image_processor_type": "BitImageProcessor", "do_convert_rgb": channels == 3, "resample": 3,  # bicubic
        "size": {"shortest_edge": int(size / 0.875)}, "crop_size": {"height": size, "width": size},
        "image_mean": MEAN[channels], "image_std": DEVIATION[channels],
    })  # fmt: skip
    images = torch.randn(2, channels, size, size)
    copy = code.MoHViTForImageClassification.from_pretrained(directory).double()
    return compare(model.double()(images), copy(images).logits)


def write_pipeline(config, model, vae, directory):
    """Write the files for diffusers; returns the largest error of the noise after reading them again."""
    import torch
    from diffusers import DDPMScheduler

    from tools.hf.convert.shipped_code import DIT, PIPELINE, import_code, write_code

    steps = config.diffusion_steps
    (directory / "transformer").mkdir()
    write_code(DIT, directory / "transformer")
    write_code(PIPELINE, directory)
    MoHDiTModel = import_code(directory / "transformer", "modeling_moh_dit").MoHDiTModel
    described = settings(config, OF_DIT)
    copy = MoHDiTModel(**described)
    copy.load_state_dict(model.state_dict())
    copy.save_pretrained(directory / "transformer")
    without_defaults(directory / "transformer" / "config.json", described)
    DDPMScheduler(
        steps, beta_start=0.1 / steps, beta_end=20 / steps, variance_type="learned_range", clip_sample=False,
        timestep_spacing="linspace",
    ).save_pretrained(directory / "scheduler")  # fmt: skip
    if vae:
        copy_vae(vae, directory / "vae")
    write_json(directory / "model_index.json", {
        "_class_name": ["pipeline_moh_dit", "MoHDiTPipeline"],
        "transformer": ["modeling_moh_dit", "MoHDiTModel"],
        "scheduler": ["diffusers", "DDPMScheduler"],
        "vae": ["diffusers", "AutoencoderKL"] if vae else [None, None],
    })  # fmt: skip
    x = torch.randn(2, config.in_channels, config.input_size, config.input_size)
    t, y = torch.tensor([1, steps - 1]), torch.tensor([0, config.num_classes])
    copy = MoHDiTModel.from_pretrained(directory / "transformer").double()
    return compare(model.double().predict(x, t, y), copy(x, t, y))


def compare(expected, found):
    """The largest difference between numbers computed in float64. Raises ExportError if it is above ``TOLERANCE``."""
    from tools.hf.convert.export_files import ExportError

    difference, allowed = (expected - found).abs().max().item(), TOLERANCE * max(1, expected.abs().max().item())
    if not difference <= allowed:  # true for NaN too
        raise ExportError(f"the export differs from the checkpoint by {difference:.1e}; allowed is {allowed:.1e}")
    return difference


def card(config, is_classifier, step, count):
    """The text of the model card."""
    name, library, tag, loads = CARDS[is_classifier]
    heads = "ordinary attention"
    if config.heads.head_selection == "mixture":
        share = f"{config.active_share():.0%} of the heads"
        heads = f"Mixture-of-Head attention (arXiv 2410.11842), of which a token uses {share}"
    tagged, grey = f"pipeline_tag: {tag}\n", ""
    if is_classifier and config.in_channels == 1:  # the pipeline of transformers converts images to RGB
        tagged, grey = "", "The model reads grey images; give images in mode L.\n"
    return f"""---
library_name: {library}
{tagged}---
# {name}

An image model of {count:,} parameters and {config.num_classes} classes, with {heads}.
The weights are those of step {step.name.removeprefix("step-")} of a run of MoH-LM.
{grey}
    {loads}.from_pretrained("DIR", trust_remote_code=True)
"""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
