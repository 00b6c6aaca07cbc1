"""The page of a dry run: its order and width, what was given, the time, and a warning for what is hardly meant."""

import re
import shlex
import signal
import sys
import types
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moh_lm import pretrain
from moh_lm.build import build_model
from moh_lm.checks import config_problems
from moh_lm.cost import summary
from moh_lm.cost.description import describe_heads
from moh_lm.cost.devices import Machine
from moh_lm.cost.flops import computed_share, flops_per_token
from moh_lm.cost.memory import memory_estimate
from moh_lm.cost.summary import describe_attention, describe_configuration, describe_gain, memory_warnings
from moh_lm.cost.time import against_dense
from moh_lm.flags import changes, parse_config
from moh_lm.kernels import choose, measured
from moh_lm.kernels.choose import head_time
from moh_lm.vision.config import ViTTraining

SCRIPT = """--num-layers 4 --hidden-size 64 --intermediate-size 96 --num-attention-heads 8 --num-shared-heads 4
    --num-active-routed-heads 2 --vocab-size 64 --seq-length 16 --batch-tokens 64 --train-tokens 100M --warmup-iters 4
    --data-mix even=1 odd=2 --validation-fraction 0.1"""
PLAN = ["--train-iters", "40"]


@pytest.fixture
def dry_run(data_dir, tmp_path, capsys, monkeypatch):
    """(exit code, standard output) of a dry run of SCRIPT with more flags."""

    def start(*flags):
        given = ["--script", "script.sh", "--data-dir", str(data_dir), "--checkpoint-dir", str(tmp_path / "a" / "run")]
        monkeypatch.setattr(sys, "argv", ["pretrain", *SCRIPT.split(), *given, *flags, "--dry-run"])
        monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process goes on
        with pytest.raises(SystemExit) as end:
            pretrain.main()
        output = capsys.readouterr()
        return end.value.code, output.out + output.err

    return start


def test_a_dry_run_is_a_page_that_begins_with_warnings(dry_run, tmp_path):
    same = "--vocab-size 64 --precision bf16 --seed 1234 --warmup-init-lr 1.0e-7 --num-shared-heads 4 4 4 4"
    code, page = dry_run(*PLAN, *same.split(), "--data-mix", "even=1", "--warmup-iters", "50")
    lines = page.splitlines()
    assert code == 0 and list(tmp_path.iterdir()) == []
    places = [line for line in lines if str(tmp_path.parent) not in line]  # a path is never cut
    assert max(map(len, places)) <= 80
    assert lines[0].startswith("warning: --warmup-iters 50") and "given      after script.sh:" in lines
    assert "  --train-iters 40, was --train-tokens 100M" in lines and "  --data-mix even=1, was even=1 odd=2" in lines
    listed = [line.split()[0] for line in lines if line.startswith("  --")]
    assert listed == ["--data-dir", "--data-mix", "--warmup-iters", "--train-iters", "--checkpoint-dir"]
    labels = [line.split()[0].strip(":") for line in lines if re.match(r"[a-zFLOP]+ |warning: ", line)]
    order = "warning given model parameters heads batch budget data layout memory cache FLOPs time".split()
    assert [label for label in labels if label in order] == order
    assert "heads      layers 0-3: 4 shared, 2 of 4 routed; 75.0% of the heads per token;" in lines
    assert re.search(r"memory     about [1-9]\d?\.\d\d MiB per rank", page) and "0.00 GiB" not in page
    assert "  head_selection mixture, num_shared_heads layers 0-3: 4," in lines  # the resolved configuration


def test_fewer_held_out_sequences_than_asked_for_are_said(dry_run):
    page = " ".join(dry_run(*PLAN)[1].split())
    said = re.search(r"fewer sequences are held out than --eval-samples 128: even (\d+), odd (\d+); a larger", page)
    assert all(0 < int(number) < 128 for number in said.groups())
    assert "fewer sequences" not in dry_run(*PLAN, "--eval-samples", "1")[1]
    assert "fewer sequences" not in dry_run(*PLAN, "--validation-fraction", "0")[1]


def test_heads_by_layer_and_widths_of_heads_are_told_as_such(dry_run):
    code, page = dry_run(*PLAN, *"--num-attention-heads 8 4 8 4 --num-shared-heads 4 2 4 2 --head-dim 8".split())
    assert code == 0 and "layers 0: 8, 1: 4, 2: 8, 3: 4 heads x 8" in " ".join(page.split())
    code, page = dry_run(*PLAN, *"--head-dims 8 8 4 4 4 4 2 2".split())
    assert code == 0 and "8 heads x 2 to 8," in page and "head_dims 8 8 4 4 4 4 2 2," in page


@pytest.mark.parametrize("flags, heads", [
    ("--routed-keys selected --num-shared-heads 4 8 --num-active-routed-heads 2 0", 8),  # own keys: not by triton
    ("--num-attention-heads 8 16 --head-dim 8 --num-shared-heads 4 8 --num-active-routed-heads 2 4", 16),
])  # fmt: skip
def test_each_layer_has_the_backend_of_its_own_heads_and_keys(flags, heads, monkeypatch):
    monkeypatch.setattr(choose, "fastest", lambda _1, _2, shape, *_: ("dense", "triton")[shape[2] == heads])
    monkeypatch.setattr(choose, "TRITON", "installed")
    monkeypatch.setattr(choose, "missing_for_triton", lambda: None)
    config = parse_config([*SCRIPT.split(), *PLAN, "--num-layers", "2", *flags.split()])[0]
    assert "dense in 1 of 2 layers, triton in 1 of 2 layers" in next(describe_attention(config))


def test_a_flag_beside_a_preset_replaces_the_value_of_the_preset():
    lines = changes("--preset 1M --num-layers 8 --hidden-size 128 --train-iters 7 --window 256".split())
    new = ["--num-layers 8, was 5", "--window 256, was not given", "--train-iters 7, was --train-tokens 20000000"]
    assert lines[1:] == [f"  {text}" for text in ("--preset 1M", *new)]


def test_a_flag_after_the_preset_of_a_script_replaces_its_value():
    script = ["--preset", "B-75", "--drop-path", "0.6", "--script", "mine.sh"]
    assert changes([*script, "--drop-path", "0.5"], ViTTraining)[1:] == ["  --drop-path 0.5, was 0.6"]
    (line,) = changes([*script, "--depths", "5", "5", "22", "5"], ViTTraining)[1:]
    assert line == "  --depths 5 5 22 5, was layers 0-1: 5, 2: 23, 3: 5"


def test_texts_are_quoted_as_a_shell_wants_them():
    given = ["--sample-prompts", "def f(x):", "it's"]
    quoted = shlex.join(given)
    assert changes(given)[1:] == [f"  {quoted}, was not given"]
    page = " ".join(" ".join(describe_configuration(parse_config([*SCRIPT.split(), *given])[0])).split())
    assert f"sample_prompts {quoted.partition(' ')[2]}, sample_tokens 40" in page


def test_settings_that_are_texts_stand_as_they_were_given():
    texts = {"batch_warmup": "256:2000", "seq_length_warmup": "8:2", "wandb": "heads", "profile": "3:5"}
    texts["after_save"] = "cp -r {path} disk"
    given = [word for name, text in texts.items() for word in (f"--{name.replace('_', '-')}", text)]
    page = " ".join(" ".join(describe_configuration(parse_config([*SCRIPT.split(), *given])[0])).split())
    assert [f"{name} {text}" for name, text in texts.items() if f" {name} {text}" not in page] == []


def test_the_time_and_its_cost_follow_from_flops_peak_and_price(dry_run):
    code, page = dry_run("--train-iters", "300000", "--peak-tflops", "1e-4", "--gpu-hour-price", "2.5")
    flops = flops_per_token(parse_config(SCRIPT.split())[0].model, 16)["dense"]
    assert code == 0 and f"FLOPs      {flops:.3e} per token" in page
    hours = flops * 300_000 * 64 / (0.34 * 1e8) / 3600  # slower than any host
    minutes = round(hours * 3600) // 60
    text = " ".join(page.split())
    cost = f"{hours:,.1f} GPU-hours at 2.5 = {hours * 2.5:,.2f}"
    days, left = divmod(minutes, 24 * 60)
    time = f"{days}d {left // 60:02d}h" if days else f"{left // 60}h {left % 60:02d}m"
    assert f"time {time}, {cost} on 1 device; assumes 34% of 0.0001 TFLOPS (last measured: 34% on one H200" in text


def test_a_dry_run_says_what_other_devices_would_do(dry_run):
    more = "--micro-batch-size 1 --batch-tokens 1K --devices 64 --device-name".split()
    code, page = dry_run(*PLAN, *more, "h100")
    text = " ".join(page.split())
    assert code == 0 and "tensor 1 x pipeline 1 x data 64, ZeRO-1, bf16; 1 micro-batches of 1 sequences" in text
    assert "on 64 devices; assumes 34% of 989 TFLOPS" in text and "attention auto: chosen on the H100" in text
    assert "MoH a step of 16 tokens takes, relative to a dense one, about" in text and "--routed-keys selected" in text
    of_a_gpu = ["--cuda-graph", "--attention-backend", "triton", "--head-dim", "16"]
    assert [dry_run(*PLAN, *of_a_gpu, *named)[0] for named in (["--device-name", "H200"], [])] == [0, 2]
    text = " ".join(dry_run(*PLAN, *more, "H200")[1].split())
    assert "chosen on the H200, by measurements of one that ship with moh_lm" in text
    text = " ".join(dry_run(*PLAN, *more, "A100")[1].split())
    assert "chosen on the A100, by measurements made there; without them, dense unless layers are compiled" in text
    code, page = dry_run(*PLAN, *more, "MI300X", "--tensor-parallel-size", "3")
    assert code == 2 and "--tensor-parallel-size 3: needs a multiple of 3 processes, and 64 were started" in page


def test_a_dry_run_says_what_was_measured_on_this_machine(monkeypatch):
    monkeypatch.setattr(measured, "processor", lambda: "AMD EPYC")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    sizes = "--seq-length 2048 --batch-tokens 2048 --precision fp32"
    config = parse_config([*SCRIPT.split(), *PLAN, *sizes.split()])[0]
    (line,) = describe_gain(config, partial(config_problems, world_size=1))
    assert "an attention layer of 2,048 tokens takes 0.91 of" in line and "measured on AMD EPYC" in line
    in_groups = parse_config([*SCRIPT.split(), *PLAN, *sizes.split(), *IN_GROUPS.split()])[0]
    problems = partial(config_problems, world_size=1)
    assert [*describe_gain(in_groups, problems)] == []  # heads that tokens choose among all were measured


IN_GROUPS = "--num-key-value-heads 4 --routing-unit head_in_group --num-shared-heads 0 --num-active-routed-heads 4"
QUARTER, OWN, GROUPS = "with a quarter of the heads", "with --routed-keys selected", "with --routing-unit head_in_group"


@pytest.mark.parametrize("flags, listed", [
    ("", [QUARTER, OWN]), ("--num-key-value-heads 2", [QUARTER, OWN, GROUPS]),
    ("--routed-keys selected", [QUARTER]), ("--routed-keys selected --num-key-value-heads 2", [QUARTER]),
    ("--num-shared-heads 0 --num-active-routed-heads 2", [OWN]), ("--position cope", [QUARTER]),
    (IN_GROUPS, []), (IN_GROUPS.replace("heads 4 --routing", "heads 2 --routing"), [QUARTER]),
    ("--routing relu --num-key-value-heads 2", [QUARTER, OWN]),
    ("--window-strategy entropy --num-key-value-heads 2 --tensor-parallel-size 4", [QUARTER]),
    ("--num-key-value-heads 2 --routing-unit key_value_group --num-shared-heads 0 --head-budget 0.5", [OWN, GROUPS]),
])  # fmt: skip
def test_only_what_this_run_could_take_is_said_to_save_more(flags, listed, monkeypatch):
    monkeypatch.setattr(summary, "measurement", lambda *_: None)
    given = [*SCRIPT.split(), "--data-dir", "data", "--checkpoint-dir", "run", *PLAN, *flags.split()]
    config, world = parse_config([*given, "--peak-tflops", "1"])[0], 4
    assert config_problems(config, world) == []
    (line,) = describe_gain(config, partial(config_problems, world_size=world))
    share = config.model.active_share()
    changes = {
        QUARTER: "--num-shared-heads 0 --head-budget 0.25",
        OWN: "--routed-keys selected",
        GROUPS: f"--routing-unit head_in_group --num-shared-heads 0 --head-budget {share}",
    }
    assert [way for way in changes if way in line] == listed
    for way in listed:
        other = parse_config([*given, *changes[way].split()])[0]
        assert config_problems(other, world) == [] and other.model != config.model


@pytest.mark.parametrize("shared, seconds", [(4, 0.310), (8, 0.333)])
def test_the_gain_of_a_mixture_is_near_what_an_h200_measured(shared, seconds):
    """LLM-B on 2 x 8,192 tokens, whose dense step took 0.318 s (docs/results.md)."""
    sizes = "--num-layers 24 --hidden-size 1536 --intermediate-size 4096 --num-attention-heads 16 --vocab-size 65536"
    model = parse_config([*sizes.split(), *PLAN])[0].model
    found = against_dense(model, 8192, Machine(1, 989), head_time(shared / 16, 4 / 16))
    assert found == pytest.approx(seconds / 0.318, abs=0.03)


@pytest.mark.parametrize("name, room", [("A100", "80.00"), ("NVIDIA H100 NVL", "94.00"), ("L40S", "48.00")])
def test_a_plan_is_held_against_the_memory_of_a_named_device(name, room, dry_run):
    code, page = dry_run(*PLAN, "--hidden-size", "65536", "--device-name", name)
    assert code == 0 and f"per rank, and a GPU has {room} GiB" in " ".join(page.split())


WARNINGS = {
    "--warmup-iters 40": "--warmup-iters 40: the run of 40 iterations ends at 100% of --learning-rate",
    "--warmup-iters 21": "--warmup-iters 21: the run of 40 iterations is mostly warm-up",
    "--seq-length-warmup 4:4000": "--seq-length-warmup 4:4000: the run ends with parts of 4 tokens",
    "--batch-warmup 16:1M": "--batch-warmup 16:1M: the run ends with 1 sequences per step",
    "--train-iters 9000": r"epochs of even \d\d, odd \d\d: more than 16",
    "--vocab-size 640": "--vocab-size 640: the tokenizer of the data has 64 pieces, so that 90%",
    "--learning-rate 0.02": "--learning-rate 0.02: is high",
    "--weight-decay 50": "--weight-decay 50: is far from what is usual; choose about 0.1",
    "--gradient-clipping 1e-9": "--gradient-clipping 1e-09: is far from what is usual",
    "--load-balance-coefficient 1000": "--load-balance-coefficient 1000: is far from what is usual",
    "--num-active-routed-heads 4": "--num-active-routed-heads: with the shared heads every token uses all of them",
    "--routing released --num-active-routed-heads 1": "--routing released: with one selected head ",
    "--routing released --routing-unit head_in_group --num-key-value-heads 2": "--routing released: with one selected ",
    "--validation-fraction 0.9": "--validation-fraction 0.9: less is left for training than is held out",
    "--require-checkpoint": "--require-checkpoint: --checkpoint-dir .* has none",
    "--data-dir nowhere": "--data-dir nowhere: does not exist",
    "--hidden-size 65536": "memory: about 115[.0-9]* GiB per rank, and a GPU has 288.00 GiB; choose --recompute",
}


@pytest.mark.parametrize("flags", WARNINGS)
def test_what_is_hardly_meant_is_a_warning(flags, dry_run):
    code, page = dry_run(*PLAN, *flags.split())
    (warning,) = page.partition("\n\n")[0].split("warning: ")[1:]
    assert code == 0 and re.match(WARNINGS[flags], " ".join(warning.split()))


def test_a_plan_is_held_against_the_memory_of_this_machines_gpu(monkeypatch):
    config = parse_config([*SCRIPT.split(), *PLAN])[0]
    need = sum(memory_estimate(config, 1).values())
    monkeypatch.setattr(summary, "on_gpu", lambda: True)
    for room, count in ((need, 0), (need - 1, 1)):
        device = types.SimpleNamespace(total_memory=room)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, device=device: device)
        assert len(list(memory_warnings(config, 1))) == count


@pytest.mark.parametrize("flags", [(), ("--vocab-size", "80")])  # 16 of 80 rows are unused; 128 are more
def test_a_sound_plan_has_no_warning(flags, dry_run):
    code, page = dry_run(*PLAN, *flags)
    assert code == 0 and "warning" not in page


def test_a_dry_run_refuses_a_run_directory_that_cannot_be_made(dry_run, tmp_path):
    (tmp_path / "file").touch()
    code, page = dry_run(*PLAN, "--checkpoint-dir", str(tmp_path / "file" / "run"))
    assert code == 2 and "cannot be written (Not a directory)" in page.splitlines()[-1]


def test_heads_of_many_layers_are_ranges():
    flags = "--num-layers 24 --num-attention-heads 8 --num-active-routed-heads 2 --num-shared-heads"
    model = parse_config([*flags.split(), *["4"] * 20, *["2"] * 3, "6"])[0].model
    ranges = "layers 0-19: 4 shared, 2 of 4 routed; 20-22: 2 shared, 2 of 6 routed; 23: 6 shared, 2 of 2 routed"
    assert describe_heads(model) == f"{ranges}; 72.9% of the heads per token; routing sigmoid"


def test_a_step_that_trains_routers_only_multiplies_two_thirds_as_much():
    words = "--num-layers 6 --hidden-size 256 --intermediate-size 512 --num-attention-heads 4 --vocab-size 128"
    counted = {}
    for only in ("all", "router"):
        given = f"{words} --seq-length 32 --train-only {only} --train-iters 9 --data-dir d --checkpoint-dir r"
        config, _ = parse_config(given.split())
        model = build_model(config.model)
        model.initialize(1)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(only == "all" or ".router." in name)
        tokens = torch.arange(64).reshape(2, 32)
        with FlopCounterMode(display=False) as counter:
            model.batch.begin(False, 1)
            model.batch.feed([None], [None])
            model(tokens, tokens)[0].mean().backward()
        counted[only] = counter.get_total_flops() / computed_share(config.optimizer)
    assert counted["router"] == pytest.approx(counted["all"], rel=0.03)
