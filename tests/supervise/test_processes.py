"""How a rank joins the others."""

import pytest

from moh_lm import pretrain
from moh_lm.training.deepspeed import start
from tests.training.runs import arguments


def test_a_rank_without_a_gpu_of_its_own_says_so(data_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(start, "visible_gpus", lambda: 1)
    monkeypatch.setattr("sys.argv", ["pretrain", *arguments(data_dir, tmp_path)])
    place = {"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for key, value in {**place, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(SystemExit, match="2"):
        pretrain.main()
    assert capsys.readouterr().err.endswith("LOCAL_RANK 1: GPUs that this process sees: 1; start one rank for each\n")
