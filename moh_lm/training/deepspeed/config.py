"""DeepSpeed's settings, including those without which it is wrong or slow.

They follow from the configuration of the run, so there is no second file to keep consistent.
"""

from moh_lm.config import REDUCE_BUCKET


def deepspeed_config(config, micro_batches, num_parameters):
    """Return the dictionary for ``deepspeed.initialize``. num_parameters: parameters of this rank."""
    return {
        "train_micro_batch_size_per_gpu": config.run.micro_batch_size,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": config.optimizer.gradient_clipping,  # DeepSpeed would clip at 1.0 unasked
        "zero_optimization": {
            "stage": config.parallel.zero_stage,
            "reduce_bucket_size": min(REDUCE_BUCKET, num_parameters),  # allocated, however small the model
            "allgather_bucket_size": REDUCE_BUCKET,
            # In stages 1 and 2 a second bucket, for sums that end with the last micro-batch anyway.
            "overlap_comm": config.parallel.zero_stage == 3,
            **({"offload_optimizer": {"device": "cpu"}} if config.parallel.offload_optimizer else {}),
        },
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's own needs a compiler and gives other numbers
        # By default a stage sends 1/tp of an activation and the next one joins the parts of all tensor-parallel
        # ranks: wrong for slices of a sequence, which differ between the ranks.
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
        "bf16": {"enabled": config.run.precision == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",  # by default bf16 gradients are summed in bf16, rounded at every rank
        "steps_per_print": 2**62,
        "timers": {"throughput": {"enabled": False}},  # DeepSpeed's waits for the device in every micro-batch
    }
