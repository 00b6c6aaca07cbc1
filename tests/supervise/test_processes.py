"""How a rank joins the others."""

import pytest

from moh_lm import pretrain
from moh_lm.supervise import errors
from moh_lm.training.deepspeed import start
from tests.training.runs import arguments


@pytest.mark.parametrize(
    "gpus, remedy",
    [
        (1, "make all GPUs of the node visible to each task (Slurm's --gpus-per-node), or start one rank for each"),
        (2, "start one rank for each"),
    ],
)
def test_a_rank_without_a_gpu_of_its_own_says_so(gpus, remedy, data_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(start, "visible_gpus", lambda: gpus)
    monkeypatch.setattr("sys.argv", ["pretrain", *arguments(data_dir, tmp_path)])
    place = {"RANK": str(gpus), "LOCAL_RANK": str(gpus), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for key, value in {**place, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(SystemExit, match="2"):
        pretrain.main()
    assert capsys.readouterr().err.endswith(f"LOCAL_RANK {gpus}: GPUs that this process sees: {gpus}; {remedy}\n")


@pytest.mark.parametrize(
    "found, said",
    [
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many' in the environment"),
        ({"PMI_SIZE": ""}, "PMI_SIZE is '' in the environment"),
        ({"RANK": "-1", "WORLD_SIZE": "1"}, "RANK is '-1' in the environment"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 in the environment: must be below WORLD_SIZE 2"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "65536"}, "MASTER_PORT is '65536' in the environment"),
        ({"DS_ACCELERATOR": "xyz"}, "DS_ACCELERATOR is 'xyz' in the environment: must be cuda or cpu; change it"),
        ({"DEEPSPEED_TIMEOUT": "1h"}, "DEEPSPEED_TIMEOUT is '1h' in the environment: must be a number of minutes"),
        ({"TORCH_DISTRIBUTED_DEBUG": ""}, "TORCH_DISTRIBUTED_DEBUG is '' in the environment: must be OFF, INFO or"),
    ],
)
def test_what_a_launcher_did_not_write_is_named(found, said, monkeypatch, capsys):
    for name in {*errors.OF_RANKS, *errors.OF_OTHERS}:
        monkeypatch.delenv(name, raising=False)
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        pretrain.main(["--dry-run"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"moh_lm.pretrain: {said}")
