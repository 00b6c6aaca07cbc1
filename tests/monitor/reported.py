"""What a run that was resumed, that skipped steps and that was killed has logged."""

FLAGS = """--num-layers 2 --hidden-size 32 --num-attention-heads 8 --num-shared-heads 2 3 --num-active-routed-heads 2
    --data-mix web=2.5 <b>=1 --batch-tokens 4K --seq-length 64 --train-iters 100000 --learning-rate 1e-3 --data-dir d"""
STEPS = 1001  # rows; the last one is not complete
EVENTS = (("started", 0), ("saved", 100), ("skipped", 305), ("resumed", 400), ("alarm", 700))
SURROUNDINGS = {"device": "cpu", "ranks": 1, "versions": {}}  # of a start
SINK = {"web": [0.2, None], "<b>": [0.4, 0.1]}


def training_record(step):
    return {
        "step": step, "loss": 3 + 1 / step, "learning_rate": 1e-3, "grad_norm": 1.0 if step != 500 else None,
        "tokens": 4096 * step, "source_loss": {"web": 3 + 1 / step, "<b>": 4.0}, "tokens_per_second": 2048.0,
        "source_bits_per_byte": {"web": 1.0}, "skipped_steps": int(step == 305),
        "heads": {"layer": [0, 1], "load": [[0.25] * 6, [0.5] * 5], "a1": [0.5, None], "entropy": [1.0, 0.5]}
        if step < 9 else {  # an older version left out layers whose heads are all shared, and gates
            "layer": [0, 1, 3], "load": [[0.25] * 6, [0.5] * 5, []], "a1": [0.5, None, None],
            "entropy": [1.0, 0.5, None], "gate_rms": [0.2, 0.3, 1.5],
        },
        "runtime": {"seconds": {"data": 0.5, "forward_backward": 1.0}},
    }  # fmt: skip
