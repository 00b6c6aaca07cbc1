"""Whole small runs of image models: every layout trains the model of one rank, a resumed run is the same to the bit."""

import functools
import re
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from moh_lm.checkpoint.fragments import FragmentReader
from moh_lm.checkpoint.saver import find_step
from moh_lm.config import Config, ConfigError, flag
from moh_lm.extras.gumbel import GumbelNoise
from moh_lm.flags import make_parser
from moh_lm.model.batch_context import RouterInputs
from moh_lm.model.block import modules_of
from moh_lm.model.router import HeadRouter
from moh_lm.run.loop import Run
from moh_lm.run.resume import contradictions, differing, model_changes, of_data, of_training
from moh_lm.supervise.processes import start_process_group
from moh_lm.supervise.run_directory import make_run_directory
from moh_lm.vision.checks import vit_problems
from moh_lm.vision.config import KINDS
from moh_lm.vision.engine import ImageEngine
from moh_lm.vision.evaluation import DiffusionEvaluation
from moh_lm.vision.load import MODELS
from moh_lm.vision.model_config import ViTConfig
from moh_lm.vision.task import DIT, VIT
from tests.distributed import run_ranks
from tests.running import rows, train_here
from tests.training.runs import events, left_after
from tests.vision.cases import parsed
from tools import checkpoint, evaluate_vision

COMMON = """
    --num-classes 3 --in-channels 1 --batch-size 8 --micro-batch-size 2 --train-iters 4 --learning-rate 1e-3
    --min-learning-rate 1e-4 --warmup-iters 2 --precision fp32 --ema-decay 0.9 --workers 0 --log-interval 2
    --eval-interval 3 --save-interval 2 --run-report false
"""
FLAGS = {
    "vit": """--image-size 32 --hidden-sizes 8 16 16 32 --depths 1 1 1 1 --num-attention-heads 2 4 4 8
        --num-shared-heads 2 2 1 2 --num-active-routed-heads 0 1 2 3 --drop-path 0.3""",
    "dit": """--input-size 16 --patch-size 4 --hidden-size 32 --num-layers 2 --num-attention-heads 4 8 --head-dim 8
        --num-shared-heads 4 3 --num-active-routed-heads 0 2 --samples 3 --sampling-steps 3 --diffusion-steps 50""",
}
TASKS = {"vit": VIT, "dit": DIT}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A directory with train/ and val/, three class folders each, of grey pictures that differ by class."""
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(5)
    for part, number in (("train", 7), ("val", 1)):
        for label in range(3):
            folder = root / part / f"class-{label}"
            folder.mkdir(parents=True)
            for place in range(number):
                pixels = rng.integers(0, 80, (32, 32)) + 80 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{place}.png")
    return root


def arguments(kind, images, directory, *more):
    data = ["--data-dir", f"{images}/train", "--validation-dir", f"{images}/val", "--checkpoint-dir", str(directory)]
    return [*COMMON.split(), *FLAGS[kind].split(), *data, *more]


def run(kind, flags, stop_after=None):
    return train_here(TASKS[kind], parsed(kind, flags), stop_after)


def tensors(directory):
    """{KIND/NAME: whole tensor} of the newest checkpoint."""
    reader = FragmentReader(find_step(directory))
    kinds = ("master", "exp_avg", "exp_avg_sq", "ema")
    return {f"{kind}/{name}": reader.read(kind, name) for name in reader.shapes for kind in kinds}


@functools.cache
def whole(kind, images):
    directory = images / kind
    run_ranks(run, 1, kind, arguments(kind, images, directory))
    return directory


@pytest.mark.parametrize(
    "kind, ranks, more",
    [
        ("vit", 2, ("--zero-stage", "2", "--recompute")),
        ("vit", 1, ("--offload-optimizer",)),
        ("dit", 2, ("--zero-stage", "3")),
    ],
)
def test_every_layout_trains_the_model_of_one_rank(images, tmp_path, kind, ranks, more):
    run_ranks(run, ranks, kind, arguments(kind, images, tmp_path / "run", *more))
    expected = whole(kind, images)
    for row, other in zip(rows(tmp_path / "run"), rows(expected), strict=True):
        assert row.keys() == other.keys()
        for key in {"loss", "grad_norm", "load_balance_loss", "evaluation_mean"} & row.keys():
            assert row[key] == pytest.approx(other[key], rel=2e-6), (row["step"], key)
    wanted = tensors(expected)
    for name, value in tensors(tmp_path / "run").items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=2e-6, msg=name)
    if kind == "dit":
        drawn = [np.asarray(Image.open(path / "samples/step-4.png"), int) for path in (tmp_path / "run", expected)]
        assert np.abs(drawn[0] - drawn[1]).max() <= 1


@pytest.mark.parametrize("kind", ["vit", "dit"])
def test_a_stopped_run_resumes_bit_for_bit(images, tmp_path, kind):
    left_after(2, whole(kind, images), tmp_path / "stopped")
    run_ranks(run, 1, kind, arguments(kind, images, tmp_path / "stopped"))
    assert rows(tmp_path / "stopped") == rows(whole(kind, images))
    wanted = tensors(whole(kind, images))
    assert all(torch.equal(value, wanted[name]) for name, value in tensors(tmp_path / "stopped").items())


@torch.no_grad()
@pytest.mark.parametrize("kind", ["vit", "dit"])
def test_gumbel_noise_changes_selections_in_training_only(kind):
    config = parsed(kind, [*COMMON.split(), *FLAGS[kind].split(), "--router-gumbel-noise", "2"])
    model = ImageEngine.build_model(SimpleNamespace(network=MODELS[kind][0], config=config, device="cpu"))
    router, samples = modules_of(model, HeadRouter)[-1], torch.tensor([3, 11])
    x = torch.randn(16, 2, router.width)
    scores = router.scores(x)[1]
    noise = GumbelNoise(2.0, config.run.seed, router.layer.index).draw(samples, 0, scores)
    for ranking in (scores + noise, scores):
        chosen = torch.zeros_like(scores).scatter(-1, ranking.topk(router.layer.num_active).indices, 1.0)
        assert torch.equal(router(x, RouterInputs(samples)).selection, chosen)
        router.eval()


@pytest.mark.parametrize(
    "kind, flags, named",
    [
        ("dit", "--seed 7 --repeated-augmentation 1", ["--seed was 1234 and is 7"]),
        ("vit", "--repeated-augmentation 1 --mixup 0", ["--repeated-augmentation was 3 and is 1"]),
    ],
)
def test_what_places_the_images_in_an_epoch_is_of_the_data(kind, flags, named):
    before, now = parsed(kind, FLAGS[kind].split()), parsed(kind, [*FLAGS[kind].split(), *flags.split()])
    assert of_data(now, before.to_dict()) == named


def test_another_decay_of_the_average_is_a_change_of_training(images, tmp_path):
    flags = arguments("dit", images, tmp_path)
    before, now = (parsed("dit", [*flags, *more]) for more in ((), ("--ema-decay", "0.5")))
    assert differing(of_training(now), before.to_dict(), now.to_dict()) == {"ema_decay": [0.9, 0.5]}


def test_the_average_follows_the_weights(images, tmp_path):
    """EMA of the masters of steps 1 to 3, by hand."""
    flags = arguments("vit", images, tmp_path / "run", "--save-interval", "1", "--eval-interval", "0")
    run_ranks(run, 1, "vit", flags, 3)
    steps = [FragmentReader(tmp_path / "run" / "checkpoints" / f"step-{step}") for step in range(1, 4)]
    for name in ("head.weight", "block4.0.attn.router.w_routed"):
        average = steps[0].read("ema", name)
        for step in steps[1:]:
            average = 0.9 * average + 0.1 * step.read("master", name)
        torch.testing.assert_close(steps[-1].read("ema", name), average)
    first = steps[0].read("ema", "head.weight"), steps[0].read("master", "head.weight")
    assert not torch.equal(*first)  # it began with the first weights


def test_the_checkpoint_tool_compares_averages_and_writes_them(images, tmp_path, capsys):
    step = whole("vit", images) / "checkpoints" / "step-2"
    for decay in ("0.5", "0"):
        run_ranks(run, 1, "vit", arguments("vit", images, tmp_path / decay, "--ema-decay", decay), 2)
    assert checkpoint.main(["diff", str(step), str(tmp_path / "0.5")]) == 1
    assert re.search(r"\n  \S+ +(equal to the bit +){3}[\d.]+ \(", capsys.readouterr().out)
    assert checkpoint.main(["diff", str(step), str(tmp_path / "0")]) == 1
    number = len(FragmentReader(step).shapes)
    assert f"a has moving averages of {number} parameters, b of 0" in capsys.readouterr().out
    assert checkpoint.main(["verify", str(step)]) == checkpoint.main(["show", str(step)]) == 0
    assert checkpoint.main(["consolidate", str(step), str(tmp_path / "weights.safetensors")]) == 0
    written = load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(value, FragmentReader(step).read("ema", name)) for name, value in written.items())


@pytest.mark.parametrize("kind", ["vit", "dit"])
def test_the_log_says_what_heads_and_held_out_images_do(images, kind):
    logged = rows(whole(kind, images))
    last = [row for row in logged if "loss" in row][-1]
    layers = parsed(kind, FLAGS[kind].split()).model.gated_layers()
    assert last["heads"]["layer"] == list(range(len(layers)))
    for layer, load in zip(layers, last["heads"]["load"], strict=True):
        assert sum(load) == pytest.approx(layer.num_active, rel=1e-4)
    assert {row["step"] for row in logged if "evaluation" in row} == {0, 3, 4}
    accuracy = [row["accuracy"] for row in logged if "accuracy" in row]
    assert len(accuracy) == (3 if kind == "vit" else 0)
    if kind == "dit":
        assert last["source_loss"].keys() <= {"t 0-12", "t 13-24", "t 25-37", "t 38-49"}


WRONG = {
    "vit --tensor-parallel-size 2": "--tensor-parallel-size 2: is for language models; leave it out",
    "vit --gpu-hour-price 2.5": "--gpu-hour-price 2.5: is for language models; leave it out",
    "vit --optimizer muon": "--optimizer muon: is for language models; leave it out",
    "vit --routed-keys selected": "--routed-keys selected: is for language models; leave it out",
    "vit --image-size 40": "--image-size 40: must be a multiple of 32",
    "vit --num-active-routed-heads 3 1 2 3": "layer 0 has 2 heads: 2 shared and 3 of 0 others",
    "vit --batch-size 7": "--batch-size 7: not a multiple of --micro-batch-size 2 on 1 processes = 2; choose 8",
    "vit --num-classes 4": "--num-classes 4:",
    "vit --micro-batch-size 1 --mixup 0": "--micro-batch-size 1: Mixup and CutMix join images of one micro-batch",
    "dit --patch-size 3": "--input-size 16: must be a multiple of --patch-size 3",
    "dit --patch-size 0": "--patch-size 0: must be 1 or above",
    "dit --head-dim 0": "--head-dim 0: must be 1 or above",
    "dit --mlp-ratio nan": "--mlp-ratio nan: must be above 0, such as 4",
    "dit --mlp-ratio 1e-9": "--mlp-ratio 1e-09: leaves no feature of --hidden-size",
    "vit --router-z-loss -1": "--router-z-loss -1: must be 0 or above",
    "vit --routing sigmoid --router-z-loss 1": "--router-z-loss 1: --routing sigmoid has gates that this loss would",
    "vit --routing paper --dense-warmup-iters 1": "--dense-warmup-iters 1: gates of --routing paper begin near",
    "vit --peak-tflops 0": "--peak-tflops 0: must be above 0, such as 989",
    "dit --num-attention-heads 4 4 4": "--num-attention-heads: give one number, or one for each of the 2 layers",
    "vit --epochs 1 --dense-warmup-iters 9": "--dense-warmup-iters 9: the mixture would never be trained",
    "dit --sampling-steps 60": "--sampling-steps 60: the model has 50 --diffusion-steps; give at most as many",
    "dit --class-dropout 0": "--cfg-scale 4: guidance compares with images of no class, which --class-dropout 0 never",
    "dit --train-only router --ema-decay 0.9": "--train-only router: the average of frozen weights would be lost; give",
    "dit --ema-decay 1": "--ema-decay 1: must be at least 0 and below 1, such as 0.9999",
}


def test_a_run_of_the_other_kind_is_no_run_to_go_on_with(images):
    for kind, other in (("vit", "dit"), ("dit", "vit")):
        config = parsed(kind, arguments(kind, images, whole(other, images)))
        assert f"holds a run of moh_lm.vision {other}; use that command" in contradictions(config)[0]
        assert contradictions(parsed(other, arguments(other, images, whole(other, images)))) == []
        with pytest.raises(ConfigError, match=f"belongs to a run of moh_lm.vision {other}; give one of"):
            Config.load(whole(other, images) / "config.json")


def refused(kind, flags, more):
    """Why a run with these flags does not resume with ``more``."""
    before, now = (parsed(kind, [*FLAGS[kind].split(), *text.split()]) for text in (flags, f"{flags} {more}"))
    return model_changes(before.to_dict(), now)


def test_an_image_run_is_not_sent_to_tools_of_language_models():
    (sentence,) = refused("vit", "--routing paper", "--head-selection all")
    assert sentence == "head_selection was mixture and is all, but gates of --routing paper are far from 1"


def test_a_model_may_be_trained_on_with_other_dropout():
    assert refused("vit", "", "--drop-path 0") == refused("dit", "", "--class-dropout 0.2") == []
    assert refused("dit", "", "--class-dropout 0") == ["class_dropout was 0.1 and is 0.0"]
    assert refused("dit", "--class-dropout 0", "--class-dropout 0.1") == ["class_dropout was 0.0 and is 0.1"]


def test_other_dropout_at_a_resume_is_an_event(images, tmp_path):
    left_after(2, whole("vit", images), tmp_path)
    run_ranks(run, 1, "vit", arguments("vit", images, tmp_path, "--drop-path", "0.1"), 3)
    (event,) = events(tmp_path, "loss changed")
    assert (event["step"], event["changes"]) == (2, {"drop_path": [0.3, 0.1]})
    assert not events(tmp_path, "routing changed")


def test_a_classifier_is_not_judged_by_folders_of_other_names(images, tmp_path, capsys):
    shutil.copytree(images / "val", tmp_path / "val")
    run_directory = str(whole("vit", images))
    assert evaluate_vision.main([run_directory, "--images", f"{tmp_path}/val", "--workers", "0"]) == 0
    (tmp_path / "val/class-1").rename(tmp_path / "val/cat")
    assert evaluate_vision.main([run_directory, "--images", f"{tmp_path}/val", "--workers", "0"]) == 2
    assert "val: has cat where the training data had class-0" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["depths", "hidden_sizes", "num_attention_heads", "mlp_ratios", "sr_ratios"])
def test_an_empty_list_of_stages_is_refused(key):
    """A file of flags may have one."""
    assert any(flag(key) in sentence for sentence in vit_problems(ViTConfig(**{key: ()})))


@pytest.mark.parametrize("kind", ["vit", "dit"])
def test_help_leaves_out_what_is_for_language_models(kind):
    shown = set(re.findall(r"^  (--[a-z-]+)", make_parser(KINDS[kind]).format_help(), re.M))
    assert shown > {"--zero-stage", "--weight-decay", "--routing", "--num-classes", "--batch-size"}
    assert not shown & {"--tensor-parallel-size", "--muon-split", "--routed-keys", "--seq-length", "--window"}


@pytest.mark.parametrize("words, said", WRONG.items())
def test_what_cannot_be_trained_is_refused_by_name(images, tmp_path, words, said):
    kind, *more = words.split()
    config = parsed(kind, arguments(kind, images, tmp_path / "run", *more))
    with pytest.raises(ConfigError, match=r"(?s)" + said.replace("(", r"\(").replace(")", r"\)")):
        TASKS[kind].open_data(config, TASKS[kind].problems(config, 1, on_gpu=False), False)


def evaluated(kind, flags):
    """What happens in an evaluation, in order: p for each report of progress, m for each pass through the model."""
    task, events = TASKS[kind], []
    config, dataset = task.open_data(parsed(kind, flags), [], False)
    make_run_directory(config.run.checkpoint_dir)
    made = Run(task, config, dataset, start_process_group(900), Mock(), Mock())
    loader = task.make_loader(config, dataset, made.groups, made.device)
    evaluate = task.make_evaluation(config, made.engine, loader, None, lambda: events.append("p"))
    made.watchdog.progress.side_effect = lambda: events.append("p")
    first = "patch_embed1" if kind == "vit" else "x_embedder.proj"
    made.engine.model.get_submodule(first).register_forward_hook(lambda *_: events.append("m"))
    evaluate(1)
    return "".join(events)


@pytest.mark.parametrize("kind, passes", [("vit", 2), ("dit", 2 + 2 * 3)])  # of 3 images, 2 at once; 3 steps of drawing
def test_an_evaluation_reports_progress_after_every_pass(images, tmp_path, kind, passes):
    (events,) = run_ranks(evaluated, 1, kind, arguments(kind, images, tmp_path / "run"))
    assert "mm" not in events and events.count("m") == passes


def test_a_drawing_that_cannot_be_written_ends_no_run(tmp_path, capsys):
    (tmp_path / "samples").write_text("no directory")
    made = SimpleNamespace(
        config=SimpleNamespace(run=SimpleNamespace(checkpoint_dir=str(tmp_path))), log=SimpleNamespace(writers=Mock())
    )
    DiffusionEvaluation.keep(made, np.zeros((4, 4, 3), np.uint8), 5)
    said = capsys.readouterr()
    assert said.err == f"{tmp_path}/samples/step-5.png: File exists; this drawing is skipped\n" and not said.out
    made.log.writers.picture.assert_called_once()
