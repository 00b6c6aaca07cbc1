"""Presets: sizes that follow from one formula, and what a flag beside them changes."""

from pathlib import Path

import pytest
import torch

from moh_lm import flags
from moh_lm.checks import config_problems
from moh_lm.checks.model import model_problems
from moh_lm.config import ConfigError
from moh_lm.config.presets import SIZES, parameters
from moh_lm.cost.memory import parameter_counts
from moh_lm.data.files import write_json
from moh_lm.flags import make_parser, parse_config, parse_flags, save_config
from moh_lm.model.initial_gates import gates_of_one


@pytest.mark.parametrize("size", SIZES)
def test_a_preset_has_the_parameters_of_its_name_and_can_start(size):
    config = parse_config(["--preset", size, "--data-dir", "data", "--checkpoint-dir", "run"])[0]
    counts = parameter_counts(config.model)
    tolerance = 0.13 if size == "100K" else 0.06  # it has few layers to choose from
    assert counts["total"] - counts["embedding"] == pytest.approx(parameters(size), rel=tolerance)
    assert config.run.train_tokens == 20 * parameters(size) and not config_problems(config, world_size=1)
    assert config.model.active_share() == 0.5 and gates_of_one(config.model)


def test_a_width_that_a_preset_cannot_cut_is_refused():
    for size, width, advice in (("100K", 36, "multiple of 8"), ("1M", 100, "multiple of 32")):
        with pytest.raises(ConfigError, match=f"--hidden-size {width}: --preset {size} has .*heads.*{advice}"):
            parse_config(["--preset", size, "--hidden-size", str(width)])
    model = parse_config("--preset 100K --hidden-size 56".split())[0].model
    assert (model.num_attention_heads, model.head_dim) == (4, 14)


@pytest.mark.parametrize("flags", ["30M --num-key-value-heads 2 --routing-unit key_value_group",
                                   "10M --num-key-value-heads 5 --routing-unit head_in_group"])  # fmt: skip
def test_groups_beside_a_preset_have_the_budget_of_groups(flags):
    size, *more = flags.split()
    config = parse_config(["--preset", size, *more, "--data-dir", "data", "--checkpoint-dir", "run"])[0]
    assert not model_problems(config.model)


def test_flags_beside_a_preset_win_and_the_rest_follows():
    config = parse_config("--hidden-size 256 --preset 10M --train-iters 100 --learning-rate 1e-2".split())[0]
    model, optimizer = config.model, config.optimizer
    assert (model.hidden_size, model.num_layers, model.num_attention_heads, model.head_dim) == (256, 13, 8, 32)
    assert (optimizer.learning_rate, optimizer.min_learning_rate, optimizer.warmup_iters) == (1e-2, 1e-3, 4)
    assert config.run.train_iters == 100 and config.run.train_tokens == 100 * config.run.batch_tokens
    assert parse_config(["--preset", "1M"])[0].optimizer.min_learning_rate == 1.5e-4


def test_scripts_and_presets_compile_where_there_is_a_gpu(monkeypatch):
    def compiles(text):
        return parse_config(text.split())[0].run.compile

    assert not compiles("--preset 1M") and compiles("--preset 1M --device-name H100 --dry-run")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not compiles("--preset 1M")  # the tests run with DS_ACCELERATOR=cpu
    monkeypatch.delenv("DS_ACCELERATOR")
    assert compiles("--preset 1M") and compiles("--hidden-size 96 --script launch/pretrain_llm_s.sh")
    for others in ("--hidden-size 96", "--preset 1M --compile false", "--preset 1M --window-strategy entropy"):
        assert not compiles(others)


def test_a_file_of_flags_says_what_its_script_adds_on_a_gpu(tmp_path):
    path = tmp_path / "run.yaml"
    script = "--script launch/pretrain_llm_s.sh"
    others = (f"{script} --compile", f"{script} --window-strategy entropy", "--preset 1M")
    for given, adds in ((script, True), *((other, False) for other in others)):
        save_config(parse_flags(make_parser(), given.split()), path)
        assert ("On a GPU launch/pretrain_llm_s.sh adds --compile" in path.read_text()) == adds
        parse_config(["--config", str(path)])


@pytest.fixture
def begun(monkeypatch):
    """A run that is there, of these flags: its configuration."""

    def begin(text):
        config = parse_config(text.split())[0]
        monkeypatch.setattr(flags, "newest_model", lambda *_: (Path("step-0"), config.model))
        return config

    return begin


def test_a_run_that_goes_on_keeps_its_model_beside_a_preset(begun):
    began = begun("--preset 10M --hidden-size 256 --routing paper")
    config = parse_config("--preset 10M --checkpoint-dir run".split())[0]
    assert config.model == began.model and config.run.batch_tokens == began.run.batch_tokens == 65536


def test_a_run_that_goes_on_keeps_its_warmup_with_a_longer_budget(tmp_path, monkeypatch):
    for step, kept in ((500, 122), (0, 1220)):  # an import begins at step 0
        place = tmp_path / f"step-{step}"
        began = parse_config(["--preset", "10M"])[0]
        place.mkdir()
        write_json(place / "config.json", began.to_dict())
        monkeypatch.setattr(flags, "newest_model", lambda *_, place=place, model=began.model: (place, model))
        resumed = parse_config("--preset 10M --checkpoint-dir run --train-tokens 2B".split())[0]
        assert (began.optimizer.warmup_iters, resumed.optimizer.warmup_iters) == (122, kept)
        given = parse_config("--preset 10M --checkpoint-dir run --warmup-iters 7".split())[0]
        assert given.optimizer.warmup_iters == 7


def test_gated_heads_do_not_take_the_gates_of_the_run(begun):
    begun("--routing paper")
    assert parse_config("--checkpoint-dir run".split())[0].model.heads.routing == "paper"
    gated = parse_config("--checkpoint-dir run --head-selection gated".split())[0]
    assert gated.model.heads.routing == "sigmoid"  # and the resume names every difference
    with pytest.raises(ConfigError, match="contradicts --routing paper"):
        parse_config("--checkpoint-dir run --head-selection gated --routing paper".split())


@pytest.mark.parametrize("size, width", [("1M", 128), ("10M", 320)])
def test_the_latent_of_a_preset_grows_with_the_width(size, width):
    model = parse_config(["--preset", size, "--attention", "latent"])[0].model
    assert (model.hidden_size, model.kv_lora_rank) == (width, width // 2)
