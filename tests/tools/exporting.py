"""What the tests of exports share: checkpoints of small models that nobody trained, and readers of what is exported."""

import json
import os
import struct
import subprocess
from pathlib import Path

import torch
import torch.distributed as dist

from moh_lm.build import build_model
from moh_lm.checkpoint.fragments import Fragment
from moh_lm.checkpoint.saver import Saver
from moh_lm.config import Config, HeadsConfig, ModelConfig, RunConfig
from tests.models import draw_zeros

STEP, SEQUENCES = 7, 70
SEGMENTS = [  # the mix was changed after 42 of the sequences
    {"first_sample": 0, "weights": {"books": 1, "code": 1}},
    {"first_sample": 42, "weights": {"books": 1, "code": 2, "web": 1}},
]
HEADS = HeadsConfig(num_shared_heads=(2, 0), num_active_routed_heads=(1, 3), routing="released")
PAPER = ModelConfig(
    num_layers=2,
    hidden_size=24,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=301,
    rope_theta=500.0,
    heads=HEADS,
)
TIED = ModelConfig(
    num_layers=2,
    hidden_size=24,
    intermediate_size=40,
    num_attention_heads=4,
    vocab_size=301,
    tie_embeddings=True,
    heads=HeadsConfig(routing="query_norm", routing_dtype="bf16"),
)


def make_weights(model_config):
    """The model of one rank with weights large enough that each of them shows in the logits."""
    model = build_model(model_config)
    model.initialize(seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1.25)
    return draw_zeros(model)


def write_checkpoint(run, model_config, tokenizer, tensor_parallel, seq_length=32, imported=None, bos_id=None):
    """A checkpoint of ``make_weights``, written by the ranks of this world as a training run would.

    With tensor parallelism each rank owns its slice of every parameter, else a range of the flattened parameter.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    model = build_model(model_config, group=dist.group.WORLD if tensor_parallel else None)
    fragments = []
    whole = dict(make_weights(model_config).named_parameters())
    for name, parameter in model.named_parameters():
        values = whole[name].detach()
        if tensor_parallel:
            replicated = parameter.tensor_partition is None
            start, is_copy = 0, replicated and rank > 0
            owned = values if replicated else parameter.tensor_partition.take(values)
        else:
            start, stop, is_copy = rank * values.numel() // size, (rank + 1) * values.numel() // size, False
            owned = values.flatten()[start:stop]
        tensors = {"master": owned.flatten()}
        fragments.append(Fragment(name, parameter, start, is_copy, tensors))
    run_config = RunConfig(seq_length=seq_length, batch_tokens=10 * seq_length, train_iters=STEP)
    config = Config(model=model_config, run=run_config)
    begin = {} if bos_id is None else {"bos_id": bos_id}
    state = {
        "consumed_samples": SEQUENCES,
        "optimizer_steps": STEP - 1,
        "router_shares": [[0.4, 0.6], [0.6, 0.75, 0.75, 0.9]],
        "data": {"segments": [{**segment, "seq_length": seq_length} for segment in SEGMENTS], **begin},
        **({"imported": imported} if imported else {}),
    }
    (steps := Path(run) / "checkpoints").mkdir(parents=True, exist_ok=True)
    Saver(steps).save(STEP, fragments, config, state, tokenizer)


def read_safetensors(directory):
    """Name -> (dtype, shape, bytes) from the files themselves: u64 length, JSON header, data."""
    tensors = {}
    for path in directory.glob("*.safetensors"):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        assert header.pop("__metadata__") == {"format": "pt"}
        for name, entry in header.items():
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            assert name not in tensors
            tensors[name] = entry["dtype"], tuple(entry["shape"]), data[start:stop]
    return tensors


LOAD = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
directory, prompt = sys.argv[1:]
model, report = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, output_loading_info=True)
tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
inputs = tokenizer(prompt, return_tensors="pt")
with torch.no_grad():
    logits = model(**inputs).logits[0]
generated = model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=None)[0]
print(json.dumps({"report": {key: sorted(map(str, value)) for key, value in report.items()}, "logits": logits.tolist(),
                  "ids": inputs["input_ids"][0].tolist(), "generated": generated.tolist()}))
"""


def load_with_transformers(python, directory, prompt, scratch, trusted=True):
    """Ids, logits and greedy continuation in a process that knows the export only, without network."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    program = LOAD if trusted else LOAD.replace(", trust_remote_code=True", "")
    finished = subprocess.run(
        [str(python), "-c", program, str(directory), prompt],
        env={**environment, "HF_HUB_OFFLINE": "1", "HF_HOME": str(scratch), "HF_MODULES_CACHE": str(scratch / "code")},
        cwd=scratch,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])
