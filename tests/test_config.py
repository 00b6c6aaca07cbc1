"""Configuration: flags, quantities, JSON, and every refusal in one line with the value and the remedy."""

import re
from dataclasses import replace

import pytest

from moh_lm.checks import config_problems
from moh_lm.checks.idle import idle_flags
from moh_lm.checks.layout import context_problems, tensor_problems
from moh_lm.checks.model import model_problems
from moh_lm.config import Config, ConfigError, HeadsConfig, ReliabilityConfig, RoutedLayer, walk
from moh_lm.config.resolve import model_values
from moh_lm.cost.memory import parameter_counts
from moh_lm.data.files import write_json
from moh_lm.flags import config_of, make_parser, parse_config, parse_flags, save_config, without_replaced
from moh_lm.model.matrices import blocks_of
from moh_lm.monitor.head_map import CELL, LEFT, TOP, head_map
from moh_lm.units import duration, duration_text
from moh_lm.vision.config import KINDS

REQUIRED = ["--data-dir", "data", "--checkpoint-dir", "run", "--train-iters", "10"]
TINY = ["--vocab-size", "64", "--seq-length", "16", "--validation-fraction", "0"]


def parse(*flags):
    return parse_config([*REQUIRED, *flags])[0]


@pytest.mark.parametrize(
    "text, seq_length, tokens",
    [("4M", 2048, 4_194_304), ("16M", 8192, 2**24), ("512K", 1024, 2**19), ("6144", 2048, 6144)],
)
def test_batch_quantities_count_in_powers_of_two(text, seq_length, tokens):
    config = parse("--batch-tokens", text, "--seq-length", str(seq_length))
    assert config.run.tokens_per_iteration == tokens


@pytest.mark.parametrize("text, tokens", [("100B", 10**11), ("0.5B", 5 * 10**8), ("200b", 2 * 10**11), ("7", 7)])
def test_budgets_count_in_powers_of_ten(text, tokens):
    assert parse("--train-tokens", text).run.train_tokens == tokens


def test_the_budget_is_rounded_up_to_iterations():
    assert parse("--train-tokens", "100B").run.train_iters == 23_842
    assert parse("--train-tokens", "200B").run.train_iters == 47_684


def test_the_later_flag_wins_also_between_the_two_budgets():
    assert parse("--num-layers", "3", "--num-layers", "5").model.num_layers == 5
    assert parse("--train-tokens", "100B", "--train-iters", "12").run.train_iters == 12
    assert parse("--train-iters", "12", "--train-tokens", "100B").run.train_iters == 23_842


def test_head_budgets_are_one_number_or_one_per_layer():
    assert parse("--num-layers", "3", "--num-shared-heads", "2").model.heads.num_shared_heads == (2, 2, 2)
    assert parse("--num-layers", "3", "--num-shared-heads", "2", "4", "6").model.heads.num_shared_heads == (2, 4, 6)


@pytest.mark.parametrize("tensor, context", [(1, 4), (2, 2), (4, 2)])
@pytest.mark.parametrize(
    "more", ["", "--num-key-value-heads 8", "--head-selection static", "--num-key-value-heads 1"]
)
def test_a_budget_is_spread_so_that_ranks_can_share_sequences(more, tensor, context):
    flags = "--num-layers 4 --num-attention-heads 16 --hidden-size 64 --head-budget 0.6 --head-budget-slope 0.3"
    degrees = f"--tensor-parallel-size {tensor} --context-parallel-size {context}"
    model = parse(*flags.split(), *more.split(), *degrees.split(), *TINY).model
    assert [*tensor_problems(model, tensor), *context_problems(model, tensor, context)] == []


@pytest.mark.parametrize("tensor", ["4", "8"])
def test_a_budget_is_not_spread_in_groups_that_ranks_divide(tensor):
    flags = "--num-layers 1 --num-attention-heads 32 --num-key-value-heads 2 --head-dim 4 --tensor-parallel-size"
    mixed, static = (
        parse(*flags.split(), tensor, "--head-budget", *more.split(), *TINY).model
        for more in ("0.75", "0.3 --head-selection static")
    )
    assert (mixed.heads.num_shared_heads, mixed.heads.num_active_routed_heads) == ((16,), (8,))
    assert static.active_heads(0) == 8


@pytest.mark.parametrize("heads, groups", [(9, 3), (12, 6), (14, 2), (32, 8), (12, 12)])
def test_groups_of_heads_have_a_default_budget_that_routes(heads, groups):
    shape = f"--num-attention-heads {heads} --num-key-value-heads {groups} --head-dim 4 --hidden-size 64"
    model = parse(*shape.split(), "--routing-unit", "key_value_group", *TINY).model
    assert model_problems(model) == []
    assert all(0 < layer.num_active < layer.num_routed for layer in model.gated_layers())


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("rate, slope", [(0.75, 0.5), (0.6, 0.3), (0.5, 0.0), (0.7, -0.4), (1.0, 0.0)])
@pytest.mark.parametrize(
    "shape, unit, group",
    [
        ("--num-layers 7 --num-attention-heads 16 --head-dim 4", 1, 1),
        ("--num-layers 9 --num-attention-heads 32 --num-key-value-heads 8 --head-dim 4", 1, 4),
        ("--num-layers 4 --num-attention-heads 32 --num-key-value-heads 8 --routing-unit key_value_group", 4, 4),
        ("--num-layers 4 --num-attention-heads 32 --num-key-value-heads 8 --routing-unit head_in_group", 8, 1),
        ("--num-layers 5 --num-attention-heads 16 --head-dim 4 --head-selection static", None, 1),
    ],
)
def test_a_budget_is_spread_over_layers_in_whole_shares(shape, unit, group, rate, slope, tensor):
    flags = f"{shape} --hidden-size 64 --head-budget {rate} --head-budget-slope {slope} --tensor-parallel-size {tensor}"
    config = parse(*flags.split(), *TINY)
    model, heads, step = config.model, config.model.num_attention_heads, tensor * group
    if unit != step and rate < 1:
        assert [*model_problems(model), *tensor_problems(model, tensor)] == []
    active = [model.active_heads(layer) for layer in range(model.num_layers)]
    assert active == sorted(active, reverse=slope < 0)
    unit = unit or step
    assert all(count % unit == 0 for count in active)
    assert all(number % max(step if tensor > 1 else 1, unit) == 0 for number in model.heads.num_shared_heads) or (
        model.heads.head_selection == "static"
    )
    assert abs(sum(active) - rate * heads * model.num_layers) <= unit
    assert Config.from_dict(config.to_dict()) == config  # also where the degree changes on a resume


@pytest.mark.parametrize("unit, heads, keys, step", [
    ("head", 8, 8, 1 / 8), ("key_value_group", 12, 4, 1 / 4), ("head_in_group", 12, 6, 1 / 2),
    ("head_in_group", 9, 3, 1 / 3),
])  # fmt: skip
def test_a_budget_is_refused_or_kept_to_half_a_step_of_one_layer(unit, heads, keys, step):
    shape = f"--num-layers 4 --num-attention-heads {heads} --num-key-value-heads {keys} --head-dim 4 --hidden-size 64"
    for hundredth in range(1, 100):
        flags = f"{shape} --routing-unit {unit} --head-budget {hundredth / 100}"
        model = parse(*flags.split(), *TINY).model
        if problems := [one for one in model_problems(model) if "none is routed" not in one]:
            assert hundredth / 100 < step and "choose at least" in problems[0]
            assert model.active_share() == pytest.approx(step)
        else:
            assert abs(model.active_share() - hundredth / 100) <= step / 2 / 4 + 1e-9
        for slope in (0.02, 0.4, -0.4, 0.9):
            sloped = parse(*flags.split(), "--head-budget-slope", str(slope), *TINY).model
            active = [*map(sloped.active_heads, range(4))]
            assert model_problems(sloped) or (active[-1] - active[0]) * slope > 0


def test_a_slope_leaves_the_budget_of_a_single_layer_as_it_is():
    flags = "--num-layers 1 --num-attention-heads 16 --head-budget 0.75 --head-budget-slope -0.4"
    assert parse(*flags.split()).model.active_share() == 0.75


def test_a_budget_with_one_of_its_parts_given_keeps_it():
    heads = parse(*"--num-layers 3 --num-attention-heads 8 --head-budget 0.75 --num-shared-heads 5".split()).model.heads
    assert (heads.num_shared_heads, heads.num_active_routed_heads) == ((5, 5, 5), (1, 1, 1))
    default, spread = (parse("--num-attention-heads", "16", *flags) for flags in ((), ("--head-budget", "0.5")))
    assert default.model.heads.num_shared_heads == spread.model.heads.num_shared_heads
    assert default.model.heads.num_active_routed_heads == spread.model.heads.num_active_routed_heads


def test_the_later_of_budget_and_routed_heads_counts():
    script = "--num-layers 4 --num-attention-heads 16 --num-shared-heads 8 --num-active-routed-heads 4".split()
    heads = parse(*script, *"--head-budget 0.75 --head-budget-slope 0.5".split()).model.heads
    assert (heads.num_shared_heads, heads.num_active_routed_heads) == ((8,) * 4, (1, 3, 5, 8))
    heads = parse(*"--head-budget 0.5".split(), *script).model.heads
    assert (heads.head_budget, heads.num_active_routed_heads) == (None, (4,) * 4)
    small = parse(*"--preset 1M --head-budget 0.5 --head-budget-slope 0.6".split())
    plain = parse(*"--preset 1M".split())
    assert small.model.heads != plain.model.heads and len({*map(small.model.active_heads, range(4))}) > 1
    run = {"num_layers": 2, "head_budget": 0.75, "num_shared_heads": (8, 6), "num_active_routed_heads": (4, 6)}
    assert without_replaced(run, {"head_budget": 0.75}) == run  # as the same command again says
    assert without_replaced(run, {"head_budget": 0.5}) == {"num_layers": 2, "head_budget": 0.75}
    assert without_replaced(run, {"num_active_routed_heads": (3,)}).keys() == run.keys() - {"head_budget"}
    most = model_problems(parse(*script, "--head-budget", "0.5").model)
    assert most == ["--head-budget 0.5: the numbers of shared and routed heads use 56.2% of all; choose another share, "
                    "or another --num-shared-heads"]  # fmt: skip


def test_a_changed_model_is_resolved_again():
    """And nothing changes in one that is whole already."""
    model = parse(*"--num-layers 3 --num-attention-heads 16".split()).model
    assert replace(model) == model and model_values(model).items() <= vars(model).items()
    changed = replace(model, window=(7,), heads=HeadsConfig("gated"))
    assert changed.window == (7, 7, 7) and changed.heads.head_selection == "mixture"
    assert (changed.heads.num_shared_heads, changed.heads.num_active_routed_heads) == ((16,) * 3, (0,) * 3)
    assert model.window == (0, 0, 0)


def test_flags_alone_and_with_true_or_false():
    assert parse("--recompute").run.recompute and parse("--recompute", "true").run.recompute
    assert not parse("--two-stage", "false").model.heads.two_stage


def test_json_gives_back_the_same_configuration(tmp_path):
    config = parse(*"--num-layers 2 --num-shared-heads 4 6 --data-mix a=1.50 b-c=2 --tie-embeddings".split())
    write_json(tmp_path / "config.json", config.to_dict())
    assert Config.load(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("num_layers", "12", "num_layers is '12', and must be a whole number"),
        ("num_layers", None, "num_layers is None, and must be a whole number"),
        ("hidden_size", 2**70, "and must be below 2^63"),
        ("window", -1, "window is -1, and must be a list of whole numbers"),
        ("routing", [], "routing is [], and must be a text"),
    ],
)
def test_a_value_of_another_type_in_a_file_is_named(tmp_path, key, value, said):
    write_json(tmp_path / "config.json", {**Config().to_dict(), key: value})
    with pytest.raises(ConfigError) as caught:
        Config.load(tmp_path / "config.json")
    (problem,) = caught.value.problems
    assert problem.startswith(f"{tmp_path}/config.json: {key} is ") and said in problem


def test_a_name_with_control_characters_keeps_its_sentence_on_one_line():
    (problem,) = ConfigError(["--source a\n\x1b[2Jb\udcff ü: fix it"]).problems
    assert problem == r"--source a\n\x1b[2Jb\udcff ü: fix it"


def test_names_are_unique_and_help_shows_every_flag():
    names = [field.name for _, field in walk(Config())]
    assert len(names) == len(set(names))
    text = make_parser().format_help()
    assert all("--" + name.replace("_", "-") in text for name in names)


@pytest.mark.parametrize(
    "model, heads, millions",
    [
        ("--num-layers 12 --hidden-size 768 --intermediate-size 2048 --num-attention-heads 12", "all", 186),
        ("--num-layers 12 --hidden-size 768 --intermediate-size 2048 --num-attention-heads 12", "mixture", 186),
        ("--num-layers 24 --hidden-size 1536 --intermediate-size 4096 --num-attention-heads 16", "all", 881),
        ("--num-layers 24 --hidden-size 1536 --intermediate-size 4096 --num-attention-heads 16", "mixture", 882),
    ],
)
def test_parameter_counts_are_those_of_the_paper(model, heads, millions):
    config = parse(*model.split(), "--head-selection", heads, "--routing", "paper")
    assert round(parameter_counts(config.model)["total"] / 1e6) == millions


def test_a_file_of_flags_stands_for_them(tmp_path):
    said = "--num-layers 3 --learning-rate 3e-5 --num-shared-heads 4 6 2 --data-mix a=4.24 b=1e1 --train-tokens 1M"
    flags = [*said.split(), *"--batch-tokens 4K --two-stage false --qk-norm --exit-after 2h --routing relu".split()]
    path = str(tmp_path / "run.yaml")
    save_config(parse_flags(make_parser(), flags), path)
    assert parse_config(["--config", path]) == parse_config(flags)
    assert parse_config(["--num-layers", "9", "--config", path])[0].model.num_layers == 3
    assert parse_config(["--config", path, "--num-shared-heads", "5"])[0].model.heads.num_shared_heads == (5, 5, 5)
    later = parse_config(["--config", path, "--train-iters", "7"])[0].run
    assert (later.train_iters, later.train_tokens) == (7, 7 * 4096)


def test_numbers_in_a_file_of_flags_are_read_as_written(tmp_path):
    written = ("checkpoint_dir: 1.10", "seed: 0123", "data_mix: {01: 4.20}", "train_tokens: 1_000", "qk_norm: yes")
    (tmp_path / "run.yaml").write_text("\n".join(written))
    config = parse_config(["--config", str(tmp_path / "run.yaml")])[0]
    assert (config.run.checkpoint_dir, config.run.seed, config.run.train_tokens) == ("1.10", 123, 1000)
    assert config.data.data_mix == (("01", "4.20"),)
    assert config.model.qk_norm is True
    written = "data_mix: {no: 3, en: 4}", "sample_prompts: [yes, No, true, 'off']", "two_stage: OFF"
    (tmp_path / "run.yaml").write_text("\n".join(written))
    config = parse_config(["--config", str(tmp_path / "run.yaml")])[0]
    assert config.data.data_mix == (("no", "3"), ("en", "4")) and config.model.heads.two_stage is False
    assert config.run.sample_prompts == ("yes", "No", "true", "off")
    (tmp_path / "run.yaml").write_text("exit_after: 12:30")
    with pytest.raises(ConfigError, match="--exit-after 12:30: write seconds, or days"):
        parse_config(["--config", str(tmp_path / "run.yaml")])


@pytest.mark.parametrize("line", ["warmup_iters:", "warmup_iters: ~", "num_shared_heads: [null]", "data_mix: {a: }"])
def test_a_name_without_a_value_in_a_file_is_refused(line, tmp_path):
    (tmp_path / "run.yaml").write_text(f"num_layers: 3\n{line}\n")
    with pytest.raises(ConfigError, match="run.yaml: .*: has no value; give one, or leave the line out"):
        parse_config(["--config", str(tmp_path / "run.yaml")])


def test_help_is_about_what_is_trained_and_shows_what_can_be_typed():
    for task in (Config, *KINDS.values()):
        shown = make_parser(task).format_help()
        assert ("Muon" in shown, "language" in shown, "--optimizer" in shown) == ((task is Config),) * 3
        (default,) = re.findall(r"--hang-timeout TIME\s[^(]*\(default:\s(\w+)\)", shown)
        assert default == "30m" and duration(default) == ReliabilityConfig().hang_timeout


@pytest.mark.parametrize("seconds", [0, 59, 60, 1800, 13_800, 86_400, 90_061])
def test_a_duration_is_shown_as_it_is_typed(seconds):
    assert duration(duration_text(seconds)) == seconds


def test_flags_without_effect_are_named():
    def note(flags):
        given = parse_flags(make_parser(), flags.split())
        return "".join(idle_flags(given, config_of(given)))

    assert note("--num-shared-heads 3 --router-gumbel-noise 1") == note("--routing paper --two-stage false") == ""
    assert note("--decay-shape linear") == "note: --decay-shape has no effect with --schedule cosine"
    entropy = "note: --routing-entropy-coefficient has no effect without --routing-top-p"
    assert note("--routing-entropy-coefficient 1") == entropy
    assert note("--routing paper --routing-top-p 0.5 --routing-entropy-coefficient 1") == ""
    assert note("--schedule wsd --decay-shape linear") == ""
    assert note("--on-spike skip") == "note: --on-spike has no effect without --spike-sigmas"
    assert note("--sample-tokens 9") == "note: --sample-tokens has no effect without --sample-prompts"
    assert note("--on-spike skip --spike-sigmas 6 --sample-tokens 9 --sample-prompts a") == ""
    assert note("--two-stage false") == "note: --two-stage has no effect with --routing sigmoid"
    found = note("--num-shared-heads 3 --router-gumbel-noise 1 --head-selection all --router-gradient-clipping 1")
    assert found.startswith("note: --num-shared-heads, --router-gumbel-noise, ")
    assert found.endswith("--router-gradient-clipping have no effect with --head-selection all")
    static = "--head-selection static --routing-unit key_value_group --num-key-value-heads 4"
    idle = note(f"{static} --routing relu")
    assert idle == "note: --routing, --routing-unit have no effect with --head-selection static"
    assert note(f"{static} --head-budget 0.6") == ""  # which has whole groups
    relu = "note: --load-balance-coefficient has no effect with --routing relu"
    assert note("--routing relu --load-balance-coefficient 0.5") == relu
    gated = note("--head-selection gated --routing sigmoid --num-shared-heads 3 --router-gumbel-noise 1")
    assert gated.endswith("--num-shared-heads, --router-gumbel-noise have no effect with --head-selection gated")


def test_static_heads_need_no_routed_ones():
    flags = "--num-layers 2 --num-attention-heads 4 --num-shared-heads 3 0 --num-active-routed-heads 0 4".split()
    assert config_problems(parse(*flags, "--head-selection", "static"), 1) == []
    assert "heads 0: must be 1: " in config_problems(parse(*flags), 1)[0]


def test_muon_refuses_uneven_heads_on_several_ranks():
    flags = "--num-attention-heads 8 --head-dims 8 8 8 4 4 4 4 8 --num-shared-heads 4 --hidden-size 64"
    config = parse(*flags.split(), *"--optimizer muon --tensor-parallel-size 2".split())
    assert any("--tensor-parallel-size 2: Muon needs equal parts" in text for text in config_problems(config, 2))


@pytest.mark.parametrize("keys, split, refused", [(2, "group", True), (2, "head", False), (4, "group", False)])
def test_muon_splits_by_groups_only_if_ranks_hold_whole_ones(keys, split, refused):
    flags = f"--num-attention-heads 8 --num-key-value-heads {keys} --hidden-size 64 --tensor-parallel-size 4"
    config = parse(*flags.split(), "--optimizer", "muon", "--muon-split", split)
    found = [text for text in config_problems(config, 4) if text.startswith("--muon-split")]
    given = "--muon-split group: the heads that share one of 2 key/value heads are on several ranks"
    assert found == [f"{given} with --tensor-parallel-size 4; choose head or matrix"] * refused


def test_muon_takes_each_head_of_a_latent_layer_by_its_own_rows():
    flags = "--attention latent --head-dim 8 --qk-rope-head-dim 4 --q-lora-rank 6"
    model = parse(*flags.split()).model
    names = ("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj")
    blocks = [blocks_of(f"model.layers.0.self_attn.{name}.weight", model, "head") for name in names]
    assert blocks == [None, (0, 12), (0, 16), (1, 8)]


def test_a_map_of_heads_is_blank_where_a_layer_has_none():
    layers = [RoutedLayer(0, 1, 3, 1), RoutedLayer(1, 1, 1, 1)]
    picture = head_map(layers, [[0.5, 0.5, 0.5], [0.5]], 2, 4)
    row, columns = TOP + CELL + CELL // 2, [LEFT + place * CELL + CELL // 2 for place in range(4)]
    blank = [(picture[row, column] == 255).all() for column in columns]
    assert blank == [False, False, True, True]


@pytest.mark.parametrize("heads, shared, routed", [(1, 0, 1), (2, 0, 1), (4, 1, 1), (6, 1, 2), (8, 2, 2), (9, 2, 2),
                                                   (12, 2, 4), (16, 4, 4), (20, 4, 6), (32, 8, 8)])  # fmt: skip
def test_a_token_uses_half_of_the_heads_by_default(heads, shared, routed):
    of_layer = parse(*f"--num-attention-heads {heads} --head-dim 4 --num-layers 1".split()).model.heads
    assert (*of_layer.num_shared_heads, *of_layer.num_active_routed_heads) == (shared, routed)


@pytest.mark.parametrize("heads, shared, routed", [(8, 0, 4), (8, 4, 1), (12, 9, 1), (16, 2, 6)])
def test_routed_heads_make_half_with_given_shared_ones(heads, shared, routed):
    flags = f"--num-attention-heads {heads} --head-dim 4 --num-layers 1 --num-shared-heads {shared}"
    assert parse(*flags.split()).model.heads.num_active_routed_heads == (routed,)


@pytest.mark.parametrize("heads, keys, budget", [(9, 3, (0, 3)), (12, 6, (0, 6)), (14, 2, (2, 4)), (32, 8, (8, 8))])
def test_the_default_budget_leaves_a_choice_in_every_group(heads, keys, budget):
    flags = f"--num-attention-heads {heads} --num-key-value-heads {keys} --hidden-size {16 * heads} --num-layers 1"
    config, _ = parse_config([*flags.split(), "--routing-unit", "head_in_group"])
    of_layer = config.model.heads
    assert (*of_layer.num_shared_heads, *of_layer.num_active_routed_heads) == budget
    assert not [problem for problem in config_problems(config, 1) if "head_in_group" in problem]


@pytest.mark.parametrize("kind, change, said", [
    (Config, {"num_attention_heads": 0}, "num_attention_heads is 0, and must be 1 or above"),
    (Config, {"num_attention_heads": [4, 8]}, "num_attention_heads has 2 entries, not 12"),
    (Config, {"num_shared_heads": [6] * 11}, "num_shared_heads has 11 entries, not 12"),
    (KINDS["vit"], {"num_attention_heads": [2, 2]}, "num_attention_heads has 2 entries, not 4"),
    (KINDS["vit"], {"sr_ratios": []}, "sr_ratios has 0 entries, not 4"),
    (KINDS["dit"], {"num_attention_heads": [6, 6]}, "num_attention_heads has 2 entries, not 12"),
    (KINDS["dit"], {"head_selection": "static", "num_active_routed_heads": [1, 2]}, "num_active_routed_heads has 2"),
])  # fmt: skip
def test_lists_in_a_file_that_fit_no_layers_are_refused(kind, change, said, tmp_path):
    path, config = tmp_path / "config.json", kind.from_dict({} if kind is Config else {"head_selection": "all"})
    values = config.to_dict() | ({} if kind is Config else {"program": kind.program})
    write_json(path, values)
    assert kind.load(path) == config
    write_json(path, values | change)
    with pytest.raises(ConfigError, match=f"{path}: {said}"):
        kind.load(path)
