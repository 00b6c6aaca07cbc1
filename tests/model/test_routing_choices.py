"""Key/value groups as experts, and a number of heads that varies by token: runs, figures, export and import."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from moh_lm.checkpoint.saver import find_step
from moh_lm.config import AlarmConfig, Config, HeadsConfig, ModelConfig, ParallelConfig
from moh_lm.cost.description import describe_heads
from moh_lm.cost.flops import flops_per_token
from moh_lm.cost.memory import parameter_counts
from moh_lm.data.files import read_json
from moh_lm.flags import parse_config
from moh_lm.model.batch_context import BatchContext
from moh_lm.model.router import HeadRouter
from moh_lm.monitor.alarms import Alarms, Announcer
from moh_lm.monitor.head_load import head_figures
from moh_lm.monitor.head_map import head_map
from moh_lm.training.step_sums import RouterSums
from tests.distributed import run_ranks
from tests.monitor.intervals import interval
from tests.monitor.logged import ROUNDING, cells, events_of
from tests.tools.exporting import PAPER, write_checkpoint
from tests.training.runs import arguments, distance, left_after, parameters, rows, run, state
from tools import export_hf, import_hf
from tools.checkpoints.write import consolidate
from tools.hf.convert.import_config import model_config

HEADS = "--num-attention-heads 16 --num-key-value-heads 8 --head-dim 4"
GROUPS = f"{HEADS} --routing-unit key_value_group --num-shared-heads 4"  # two groups of two heads, and six routed ones
TOP_P = "--routing-top-p 0.54 --routing-entropy-coefficient 0.5"  # untrained routers give six experts 1/6 each, nearly
MODELS = {
    "groups, query norm": f"{GROUPS} --num-active-routed-heads 4 --routing query_norm --seed 7 "
    "--router-gumbel-noise 0.1",
    "top-p, released": f"{HEADS} --num-shared-heads 2 10 --num-active-routed-heads 9 6 {TOP_P} --routing released "
    "--load-balance-scope global_batch",
    "both": f"--routing paper {GROUPS} --num-active-routed-heads 10 {TOP_P}",
    "scaled, z-loss": f"{HEADS} --num-shared-heads 4 8 --num-active-routed-heads 4 8 --routing paper_scaled "
    "--router-z-loss 3 --router-gumbel-noise 0.1",
    "gated": f"{HEADS} --head-selection gated",
    "tamed": f"{HEADS} --num-shared-heads 4 8 --num-active-routed-heads 4 4 --routing released "
    "--dense-warmup-iters 1 --router-gumbel-noise 1 --router-learning-rate-scale 0.1 --router-gradient-clipping 1e-4 "
    "--gradient-clipping 0.5",
    "bias": f"{HEADS} --num-shared-heads 4 8 --num-active-routed-heads 4 4 --routing sigmoid "
    "--load-balance-coefficient 0 --load-balance-bias-rate 0.005",
}
MODELS["gated, softplus, narrow"] = f"{MODELS['gated']} --routing softplus --gate-width 3"
MODELS["element gates"] = f"{HEADS} --head-selection all --element-gates --window 9"
MODELS["relu"] = f"{HEADS} --num-shared-heads 4 8 --num-active-routed-heads 7 3 --routing relu"
IN_GROUPS = f"{HEADS} --num-key-value-heads 4 --routing-unit head_in_group --num-shared-heads 0 4"
MODELS["in groups"] = f"{IN_GROUPS} --num-active-routed-heads 8 4 --routing released"
MODELS["in groups, bias, query norm"] = (
    f"{IN_GROUPS} --num-active-routed-heads 4 --routing query_norm --seed 7 --load-balance-bias-rate 0.01 --window 6"
)
STEADY = """--train-iters 2 --log-interval 1 --save-interval 1 --eval-samples 1 --eval-interval 0 --warmup-iters 0
    --learning-rate 2e-5 --min-learning-rate 1e-5 --gradient-clipping 0"""
LAYOUTS = {
    "tensor": (2, "--tensor-parallel-size 2"),
    "context": (2, "--context-parallel-size 2 --recompute"),
    "pipeline": (2, "--pipeline-parallel-size 2 --recompute"),
    "data, sparse": (2, "--zero-stage 3 --attention-backend cpu_sparse --recompute"),
}


@pytest.fixture(scope="module")
def one_process(data_dir, tmp_path_factory):
    """Run directories of the models on one process, made when first asked for."""
    made = {}

    def of(model):
        if model not in made:
            made[model] = tmp_path_factory.mktemp("one")
            run_ranks(run, 1, arguments(data_dir, made[model], *STEADY.split(), *MODELS[model].split()))
        return made[model]

    return of


@pytest.mark.parametrize(
    "model, layout",
    [
        ("groups, query norm", "context"), ("top-p, released", "pipeline"), ("both", "tensor"),
        ("scaled, z-loss", "data, sparse"), ("gated, softplus, narrow", "tensor"), ("element gates", "tensor"),
        ("tamed", "tensor"), ("bias", "pipeline"), ("bias", "data, sparse"), ("relu", "context"),
        ("in groups", "data, sparse"), ("in groups, bias, query norm", "tensor"),
        ("in groups, bias, query norm", "context"),
    ],  # fmt: skip
)
def test_a_layout_trains_the_model_of_one_process(model, layout, data_dir, tmp_path, one_process):
    world_size, flags = LAYOUTS[layout]
    run_ranks(run, world_size, arguments(data_dir, tmp_path, *STEADY.split(), *MODELS[model].split(), *flags.split()))
    expected = one_process(model)
    for mine, theirs in zip(rows(tmp_path), rows(expected), strict=True):
        assert mine["step"] == theirs["step"]
        for key in theirs.keys() & {"loss", "load_balance_loss", "grad_norm", "evaluation"}:
            assert mine[key] == pytest.approx(theirs[key], rel=1e-6), (mine["step"], key)
        heads = theirs.get("heads", {})
        assert all(mine["heads"][key] == heads[key] for key in heads.keys() & {"load", "active_heads"})
        assert ("active_heads" in heads) == ("heads" in theirs and model in ("top-p, released", "both", "relu"))
        if model == "relu" and mine["step"]:
            coefficients = [saved_state(directory, mine["step"]).get("l1_steps") for directory in (tmp_path, expected)]
            assert coefficients[0] == coefficients[1] != 0
    for step in (1, 2):  # counts
        mine, theirs = state(tmp_path, step), state(expected, step)
        biases = [key for key in theirs if key.endswith("router.bias_steps")]
        assert len(biases) == (6 if "bias" in model else 0)
        assert all(torch.equal(mine[key], theirs[key]) for key in biases)
    mine, theirs = state(tmp_path, 1), state(expected, 1)
    # A step of Adam from 0 is that of rounding where a gradient is as small: the moments of these gates are compared.
    compared = [key for key in theirs if not (key.startswith("master/") and key.endswith("g_proj.weight"))]
    far = {key: distance(mine[key], theirs[key]) for key in compared}
    assert max(far.values()) < 1e-5, sorted(far.items(), key=lambda item: -item[1])[:5]


def saved_state(directory, step):
    return read_json(directory / "checkpoints" / f"step-{step}" / "state.json")


def test_the_entropy_is_in_the_gradient_not_the_balance_loss(data_dir, tmp_path, one_process):
    flags = f"{STEADY} {MODELS['both']} --routing-entropy-coefficient 0"
    run_ranks(run, 1, arguments(data_dir, tmp_path, *flags.split()))
    without, with_it = rows(tmp_path)[1], rows(one_process("both"))[1]  # of the first step
    assert without["load_balance_loss"] == with_it["load_balance_loss"] and without["loss"] == with_it["loss"]
    mine, theirs = state(tmp_path, 1), state(one_process("both"), 1)
    key = "exp_avg/model.layers.1.self_attn.router.w_routed"
    assert distance(mine[key], theirs[key]) > 0.1
    key = "exp_avg/lm_head.weight"
    assert distance(mine[key], theirs[key]) < 1e-6


@pytest.mark.parametrize(
    "model, sizes",
    [
        ("top-p, released", ""), ("relu", ""),
        ("in groups, bias, query norm", "--num-key-value-heads 4 --window 6 --seed 7"),
    ],  # fmt: skip
)
def test_a_resumed_run_takes_the_routing_of_its_checkpoint(model, sizes, data_dir, tmp_path, one_process):
    flags = arguments(data_dir, tmp_path, *STEADY.split())
    left_after(1, one_process(model), tmp_path)
    run_ranks(run, 1, [*flags, *HEADS.split(), *sizes.split()])
    assert rows(tmp_path) == rows(one_process(model))
    coefficients = [saved_state(directory, 2).get("l1_steps") for directory in (tmp_path, one_process(model))]
    assert coefficients[0] == coefficients[1]
    expected = parameters(one_process(model))
    assert all(torch.equal(value, expected[name]) for name, value in parameters(tmp_path).items())


# --- Figures ---


def run_recorded(flags):
    """Run; returns {layer: [selection [s, b, E] of each forward pass of training]}."""
    select, taken = HeadRouter.select, {}

    def recorded(router, *others):
        selected = select(router, *others)
        if torch.is_grad_enabled():
            taken.setdefault(router.layer.index, []).append(selected)
        return selected

    HeadRouter.select = recorded
    run(flags)
    return taken


def test_a_bias_follows_whole_steps_and_an_export_selects_by_it(data_dir, tmp_path, export):
    flags = arguments(data_dir, tmp_path / "run", *STEADY.split(), *MODELS["bias"].split(), "--train-iters", "3")
    (taken,) = run_ranks(run_recorded, 1, flags)
    export(tmp_path / "run", tmp_path / "hf", "--dtype", "bfloat16")  # which compares logits
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    consolidate(tmp_path / "run", tmp_path / "one.safetensors", False, torch.bfloat16)
    in_one = load_file(tmp_path / "one.safetensors")
    for layer, num_routed in enumerate((12, 8)):
        steps, expected = torch.cat(taken[layer], dim=1).split(8, dim=1), [0] * num_routed  # of 8 sequences each
        assert len(steps) == 3
        for selected in steps:
            loads = selected.sum((0, 1)).tolist()
            mean = sum(loads) / num_routed
            expected = [count + (load < mean) - (load > mean) for count, load in zip(expected, loads, strict=True)]
        assert len(set(expected)) > 1
        name = f"model.layers.{layer}.self_attn.router.bias_steps"
        assert state(tmp_path / "run", 3)[f"master/{name}"].tolist() == expected
        for found in (exported[name], in_one[name]):
            assert found.dtype == torch.int32 and found.tolist() == expected
    assert import_hf.main(["--model", str(tmp_path / "hf"), "--output", str(tmp_path / "in")]) == 0
    assert parameters(tmp_path / "in")[name].tolist() == expected


@pytest.mark.parametrize("budgets, sign", [((7, 3), 1), ((7, 7), -1)])
def test_the_coefficient_of_relu_gates_follows_the_selected_heads(budgets, sign, data_dir, tmp_path):
    flags = f"{STEADY} --train-iters 3 {MODELS['relu']} --num-active-routed-heads {budgets[0]} {budgets[1]}"
    (taken,) = run_ranks(run_recorded, 1, arguments(data_dir, tmp_path, *flags.split()))
    expected = 0
    steps = [torch.cat(taken[layer], dim=1).split(8, dim=1) for layer in (0, 1)]
    for number, (first, second) in enumerate(zip(*steps, strict=True), start=1):
        selected = first.sum(-1).mean().item() + second.sum(-1).mean().item()  # of a token, in both layers
        expected = max(0, expected + (selected > sum(budgets)) - (selected < sum(budgets)))
        assert saved_state(tmp_path, number)["l1_steps"] == expected
    assert number == 3 and (expected > 0) == (sign > 0)


def test_the_coefficient_of_relu_gates_stays_where_they_can_follow_it():
    """During a warm-up the gates hardly move, and a coefficient that grew meanwhile would dwarf the loss."""
    layers = replace(PAPER, heads=replace(PAPER.heads, routing="relu")).routed_layers()
    batch = BatchContext()
    sums, found = RouterSums([], batch, layers, 1, None, "cpu"), []
    for load in (1, 0):
        for _ in range(150):
            counts = {layer.index: torch.full((layer.num_routed,), 8.0 * load) for layer in layers}
            sums.follow(counts, tokens=8)
            found.append(batch.l1.item())
    assert max(found) == pytest.approx(1e-8 * 1.2**101) and found[-1] == pytest.approx(1e-8)
    assert found[149] > found[150] > found[160]  # falls as soon as too few are selected


def test_active_heads_loads_and_mfu_follow_the_selections(data_dir, tmp_path):
    flags = f"--train-iters 2 --log-interval 2 --eval-interval 0 --eval-samples 1 --peak-tflops 0.001 {MODELS['both']}"
    flags = arguments(data_dir, tmp_path, *flags.split(), "--learning-rate", "0.3", "--head-curves")
    (taken,) = run_ranks(run_recorded, 1, flags)
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    board, active = events_of(tmp_path), {}
    for layer in range(2):
        selected = torch.cat([part.flatten(0, 1) for part in taken[layer]])
        assert len(selected) == 2 * 128 and len(set(selected.sum(-1).tolist())) > 1
        active[layer] = 4 + 2 * selected.sum(-1).mean().item()
        assert row["heads"]["active_heads"][layer] == pytest.approx(active[layer], rel=1e-4)
        assert row["heads"]["load"][layer] == pytest.approx(selected.mean(0).tolist(), rel=1e-4)
        shown = {"active_heads": active[layer], "load_group_02": selected[:, 0].mean().item()}
        for name, value in shown.items():
            (scalar,) = board.Scalars(f"routed_heads/layer_{layer:02d}/{name}")
            assert scalar.value == pytest.approx(value, rel=1e-5)
        last_step = selected[128:].mean(0).tolist()  # which --load-balance-scope global_batch goes by
        assert read_json(find_step(tmp_path) / "state.json")["router_shares"][layer] == pytest.approx(last_step)
    (image,) = board.Images("routed_heads_load/all")
    assert (image.height, image.width) == head_map((), (), 2, 8).shape[:2]
    model = parse_config(flags)[0].model
    per_head = flops_per_token(model, 16, {0: 1, 1: 0})["active"] - flops_per_token(model, 16, {0: 0, 1: 0})["active"]
    flops = flops_per_token(model, 16)["dense"] - per_head * sum(16 - heads for heads in active.values())
    speed = row["tokens_per_second"]
    assert row["runtime"]["mfu"]["active"] == pytest.approx(flops * speed / 1e9, rel=1e-3 + ROUNDING / speed)


def test_fair_is_the_mean_load_where_k_is_only_the_most():
    heads = HeadsConfig(num_shared_heads=(4,), num_active_routed_heads=(4,), routing_top_p=0.5)
    model = ModelConfig(num_layers=1, num_attention_heads=8, heads=heads)
    sums = np.array([[0.0, 10.0, 0, 0, 2, 4, 8, 10]])
    figures = head_figures(model.routed_layers(), sums, ["a"], [2], 10, 1.3, ParallelConfig())
    assert figures["load"] == figures["source_load"]["a"] == [[0.1, 0.2, 0.4, 0.5]]
    assert figures["active_heads"] == [pytest.approx(5.2)]
    assert figures["overused"] == [0.5]  # fair is 30%, and 1.3 times it 39%
    alarms = Alarms(AlarmConfig(alarm_intervals=1, alarm_head_low=0.4), model.routed_layers(), {})
    (text,) = Announcer().lines(alarms.check(interval(), figures))
    assert text == "alarm: routing collapse in layer 0: head 4 is selected by 10.0% of the tokens; fair is 30.0%"


def test_a_layer_whose_tokens_select_nearly_all_heads_is_healthy():
    heads = HeadsConfig(num_shared_heads=(4,), num_active_routed_heads=(4,), routing_top_p=0.9)
    model = ModelConfig(num_layers=1, num_attention_heads=8, heads=heads)
    alarms = Alarms(AlarmConfig(alarm_intervals=1), model.routed_layers(), {})
    assert alarms.check(interval(), {"load": [[1.0, 1.0, 1.0, 0.9]], "balance_loss": [1.0], "gate_mean": [1.0]}) == []


def test_alarms_and_maps_speak_of_groups():
    heads = HeadsConfig(num_shared_heads=(4,), num_active_routed_heads=(4,), routing_unit="key_value_group")
    model = ModelConfig(num_layers=1, num_attention_heads=16, num_key_value_heads=4, heads=heads)
    figures = {"load": [[0.0, 0.5, 0.5]], "balance_loss": [0.3], "gate_mean": [1.0]}
    alarms = Alarms(AlarmConfig(alarm_intervals=1), model.routed_layers(), {})
    (facts,) = found = alarms.check(interval(), figures)
    (text,) = Announcer().lines(found)
    assert text == "alarm: routing collapse in layer 0: group 1 is selected by 0.0% of the tokens; fair is 33.3%"
    assert facts["groups"] == [1]
    found = alarms.check(interval(), {"load": [[0.3, 0.4, 0.3]], "balance_loss": [0.3], "gate_mean": [1.0]})
    (text,) = Announcer().lines(found)
    assert text == "alarm over: routing collapse in layer 0: group 1"
    picture = head_map(model.routed_layers(), figures["load"], 1, 4)
    assert [colour.tolist() for colour in cells(picture, 1, 4)[0]] == [[204] * 3, [0, 34, 78], *[[125, 124, 120]] * 2]


def test_alarms_name_heads_that_are_routed_in_every_group():
    heads = HeadsConfig(num_shared_heads=(2,), num_active_routed_heads=(4,), routing_unit="head_in_group")
    model = ModelConfig(num_layers=1, num_attention_heads=8, num_key_value_heads=2, heads=heads)
    figures = {"load": [[0.7, 0.6, 0.7, 0.0, 1.0, 1.0]], "balance_loss": [0.3], "gate_mean": [1.0]}
    alarms = Alarms(AlarmConfig(alarm_intervals=1), model.routed_layers(), {})
    (text,) = Announcer().lines(alarms.check(interval(), figures))
    assert text.startswith("alarm: routing collapse in layer 0: head 5 is selected by 0.0% of the tokens; fair is")
    colours = [colour.tolist() for colour in cells(head_map(model.routed_layers(), figures["load"], 1, 8), 1, 8)[0]]
    assert colours[0] == colours[4] == [204] * 3 and colours[5] == [0, 34, 78]
    assert model.numbers_always_on(0) == [0, 4]


# --- What a model is said to be, and its files ---


def test_the_summary_says_what_a_token_selects():
    model = parse_config(f"--num-layers 2 {MODELS['both']}".split())[0].model
    assert describe_heads(model) == (
        "layers 0-1: 4 shared, at most 10 of 12 routed; at most 87.5% of the heads per token; routing paper, "
        "whole key/value groups of 2, top-p 0.54"
    )
    gated = parse_config("--num-shared-heads 2 --head-selection gated".split())[0].model
    assert describe_heads(gated) == "all 12 for every token, each with a gate; routing sigmoid"
    assert parameter_counts(model)["router"] == 2 * 768 * (8 + 2)  # eight groups, a1 and a2


@pytest.mark.parametrize(
    "changes",
    [
        dict(element_gates=True, heads=HeadsConfig(head_selection="all")),
        dict(heads=HeadsConfig(head_selection="gated", routing="softplus", gate_width=5)),
    ],
    ids=["of features", "narrow"],
)
def test_gates_survive_an_export_and_an_import(changes, tmp_path, export):
    model = replace(PAPER, **changes)
    run_ranks(write_checkpoint, 1, tmp_path / "run", model, None, False)
    export(tmp_path / "run", tmp_path / "hf")  # which compares the logits of the trainer and of transformers
    assert import_hf.main(["--model", str(tmp_path / "hf"), "--output", str(tmp_path / "in")]) == 0
    assert Config.load(find_step(tmp_path / "in") / "config.json").model == model


def test_groups_and_top_p_survive_an_export_and_an_import(tmp_path, export):
    heads = replace(PAPER.heads, routing_unit="key_value_group", routing_top_p=0.6)
    model = replace(PAPER, heads=replace(heads, num_shared_heads=(2, 0), num_active_routed_heads=(2, 4)))
    run_ranks(write_checkpoint, 1, tmp_path / "run", model, None, False)
    export(tmp_path / "run", tmp_path / "hf")  # which compares the logits of the trainer and of transformers
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (values["routing_unit"], values["routing_top_p"]) == ("key_value_group", 0.6)
    assert model_config(values) == replace(model, heads=replace(model.heads, routing_entropy_coefficient=1e-4))
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "| routing | released, whole key/value groups of 2, top-p 0.6 |" in card
    assert "| layer | shared groups | routed groups per token |" in card
    assert "| 0 | 1 | at most 1 of 1 | 50.0% | 40.0% | 60.0% |" in card
    assert import_hf.main(["--model", str(tmp_path / "hf"), "--output", str(tmp_path / "in")]) == 0
    assert Config.load(find_step(tmp_path / "in") / "config.json").model == model


def test_heads_in_groups_survive_an_export_and_an_import(tmp_path, export):
    budgets = dict(num_shared_heads=(2, 0), num_active_routed_heads=(2, 2), routing_unit="head_in_group")
    model = replace(PAPER, heads=replace(PAPER.heads, **budgets))
    run_ranks(write_checkpoint, 1, tmp_path / "run", model, None, False)
    export(tmp_path / "run", tmp_path / "hf")  # which compares the logits of the trainer and of transformers
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert values["routing_unit"] == "head_in_group" and model_config(values) == model
    assert "| routing | released, inside key/value groups of 2 |" in (tmp_path / "hf" / "README.md").read_text()
    assert import_hf.main(["--model", str(tmp_path / "hf"), "--output", str(tmp_path / "in")]) == 0
    assert Config.load(find_step(tmp_path / "in") / "config.json").model == model


def test_an_export_of_a_plain_model_has_none_of_the_keys(tmp_path, monkeypatch, export):
    monkeypatch.setattr("tools.hf.convert.export_check.transformers", None)
    run_ranks(write_checkpoint, 1, tmp_path / "run", PAPER, None, False)
    export(tmp_path / "run", tmp_path / "hf")
    assert not {"routing_unit", "routing_top_p"} & json.loads((tmp_path / "hf" / "config.json").read_text()).keys()


@pytest.fixture
def export(monkeypatch, programs):
    """tools/export_hf.py in this process."""
    monkeypatch.setattr(sys, "executable", str(programs / "python"))  # of its check

    def call(checkpoint, output, *more):
        arguments = ["--checkpoint", str(checkpoint), "--output", str(output), *more]
        assert export_hf.main(arguments) == 0

    return call
