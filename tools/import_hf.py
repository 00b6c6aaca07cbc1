"""A Llama in Hugging Face form -> step 0 of a run, as it is or as the start of a Mixture-of-Head model.

    python tools/import_hf.py --model HF_DIR --output RUN
    python tools/import_hf.py --model MODEL.gguf --output RUN
    python tools/import_hf.py --model HF_DIR --output RUN --head-selection mixture --calibrate
    python tools/import_hf.py --model HF_DIR --output RUN --head-selection mixture --routing query_norm \\
        --num-shared-heads 16 --num-active-routed-heads 8
    python tools/import_hf.py --model MoH-LLaMA3-8B --output RUN --released moh-llama3-8b
    python tools/import_hf.py --model HF_DIR --output RUN --extend-vocab 160896 --tokenizer EXTENDED.model

RUN gets checkpoints/step-0 (tools/hf/convert/import_step.py). docs/continue.md explains every step.

Exit codes: 0 step 0 is in RUN, or --dry-run has shown it; 2 an argument or the model has to be fixed, or a file could
not be written, and nothing is there under the final name.
"""

import math
import shlex
import sys
import time
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.checkpoint.manifest import describe
from moh_lm.cli.command import output_path, run_file
from moh_lm.config import Config, ConfigError, HeadsConfig, RunConfig, flag, raise_any
from moh_lm.data.files import ShardError
from moh_lm.flags import is_list, placeholder
from moh_lm.units import at_least, quantity


def main(texts):
    left = "nothing is left"
    words = {"remark": f"; {left}", "interrupted": f"stopped; {left}"}
    return run_file(__file__, __doc__, add_flags, run, texts, failures=(ShardError,), code=2, extra="hf", **words)


def add_flags(parser):
    add = parser.add_argument
    add("--model", required=True, metavar="HF_DIR", help="a Llama (or its GGUF file), a Mistral, an "
        "export of ours; or OWNER/NAME or hf://OWNER/NAME on the hub")  # fmt: skip
    add("--output", required=True, type=output_path, metavar="RUN", help="run directory to make")
    heads = parser.add_argument_group("heads (default: those of an export, otherwise all heads)")
    for entry in fields(HeadsConfig):
        nargs = "+" if is_list(entry) else "?" if entry.type is bool else None
        shown = {"metavar": placeholder(entry), "help": entry.metadata["help"]}
        heads.add_argument(flag(entry.name), nargs=nargs, const="true" if nargs == "?" else None, **shown)
    heads.add_argument("--released", choices=("moh-llama3-8b",), help="use the settings of the authors' code")
    heads.add_argument(
        "--allow-routing-change", action="store_true", help="let a mixture become --head-selection all or static"
    )
    add("--select-shared", choices=("first", "importance"),
        help="heads that are shared or static (default: the most important ones, if the model has a tokenizer to "
        "measure them with)")  # fmt: skip
    add("--sample-data", type=Path, metavar="DIR", help="sample: shards in the model's tokens, without their last 5%%")
    add("--sample-text", type=Path, metavar="FILE", help="sample: a text (default: the documentation of Python)")
    add("--sample-tokens", type=quantity(1024), default=16384, metavar="N", help="tokens of the sample (default: 16K)")
    add("--calibrate", action="store_true", help="fit output projections and router weights to the sample")
    add("--extend-vocab", type=at_least(1), metavar="N", help="extend the vocabulary to this number of rows")
    add("--tokenizer", type=Path, metavar="MODEL", help="tokenizer of the training data (default: the model's)")
    add("--old-tokenizer", type=Path, metavar="MODEL", help="tokenizer that spells new tokens (default: the model's)")
    add("--seed", type=at_least(0), default=1234, metavar="N", help="seed of new weights (default: %(default)s)")
    add("--dry-run", action="store_true", help="print what would be read and written, and exit")


def run(arguments):
    """Run the whole program. Raises ConfigError before anything is written, ConfigError or OSError after."""
    from tools.hf.convert.gguf_source import hugging_face_form
    from tools.hf.convert.hub import model_directory
    from tools.hf.convert.import_step import output_problems

    raise_any(output_problems(arguments.output))
    path = Path(arguments.model)
    name = arguments.model if path.name.strip(".") else str(path.resolve())  # . and .. are not names
    given = model_directory(arguments.model)
    with hugging_face_form(given, arguments.output) as arguments.model:
        import_model(arguments, name, given)


def import_model(arguments, name, given):
    """Import the directory ``arguments.model``, called ``name`` in messages. given: the directory, or its GGUF file."""
    from tqdm import tqdm

    from tools.checkpoints.read import progress
    from tools.heads.calibration import calibrate
    from tools.heads.importance import ranked
    from tools.hf.convert.gguf_source import add_weights
    from tools.hf.convert.import_config import model_config, own_heads, read_config, refuse_run
    from tools.hf.convert.import_heads import find_sample, sample_problems, wanted_heads
    from tools.hf.convert.import_step import write_step
    from tools.hf.convert.import_stock import StockSource, read_stock
    from tools.hf.convert.import_vocabulary import find_tokenizers, new_rows, spelled, token_ids, tokens_of
    from tools.hf.convert.import_weights import Source, plan
    from tools.hf.convert.source_tokenizer import names_code, settings_of

    problems = []
    refuse_run("--model", arguments.model)
    values, stock = read_stock(read_config(arguments.model), arguments.model)
    old_vocab_size, vocab_size = values.get("vocab_size"), arguments.extend_vocab or values.get("vocab_size")
    try:
        config = model_config(values, wanted_heads(arguments, values), arguments.released or arguments.head_selection)
        if vocab_size < old_vocab_size:
            problems.append(f"--extend-vocab {vocab_size}: the model has {old_vocab_size} rows already")
        problems += sample_problems(arguments, config, values)
    except ConfigError as error:
        problems += error.problems
    raise_any(problems)
    config = replace(config, vocab_size=vocab_size)
    ids = token_ids(arguments.model, values)
    old, new, tokenizer = find_tokenizers(arguments, old_vocab_size, vocab_size)
    settings = settings_of(arguments.model, old, ids)
    if "tokenizer.json" in tokenizer and names_code(arguments.model):
        print("note: tokenizer_config.json names Python code, which is left out; tokenizer.json is used without it")
    num_tokens = tokens_of(arguments.model, old, old_vocab_size) if arguments.extend_vocab else old_vocab_size
    kept = num_tokens if new else old_vocab_size  # new tokens take the rows that pad the old vocabulary
    is_compared = not arguments.old_tokenizer and (arguments.model / "tokenizer.json").is_file()  # by find_tokenizers
    grows = vocab_size > kept
    spell = old, new, num_tokens, vocab_size, is_compared or not grows
    pieces = spelled(*spell) if old and new and (grows or arguments.tokenizer) else {}
    length = values.get("max_position_embeddings", 2048)  # LlamaConfig's own default
    tokens, origin = find_sample(arguments, config, values, old_vocab_size, min(length, 2048), old)
    if tokens is None and arguments.calibrate:
        raise ConfigError([f"--calibrate: there is no sample to fit to, since the heads keep their order: {origin}"])
    add_weights(given, arguments.model)
    source = StockSource(arguments.model, stock) if stock else Source(arguments.model)
    router_seed = arguments.seed if own_heads(values).head_selection == "all" else None
    trained = replace(config, heads=own_heads(values))
    plan(config, source, old_vocab_size, {}, None, router_seed, trained)  # refuses what cannot be read
    orders, measured = {}, None
    if tokens is not None:
        with tqdm(desc="layers measured", total=config.num_layers, leave=False, disable=None) as bar:
            orders, measured = ranked(config, source, tokens, bar.update)
    more = partial(new_rows, source, pieces, arguments.seed, num_tokens, range(kept, vocab_size))
    extend = (kept, more) if vocab_size > kept else None
    parts = plan(config, source, old_vocab_size, orders, extend, router_seed, trained)
    if arguments.calibrate:
        with tqdm(desc="layers fitted", total=config.num_layers, leave=False, disable=None) as bar:
            fitted = calibrate(config, source, parts, tokens, bar.update)
        parts = [part.fitted(fitted[part.name]) if part.name in fitted else part for part in parts]
    facts = {
        "source": name,
        "config_sha256": describe(arguments.model / "config.json")["sha256"][0],
        "dtypes": ", ".join(source.dtypes),
        "vocabulary": describe_vocabulary(kept, vocab_size, len(pieces)),
        "token_ids": ids,
        "tokenizer": settings,
        "max_position_embeddings": length,
        "seed": arguments.seed,
        "shared_heads": "importance" if measured else "first",
        "calibrated": arguments.calibrate,
        **({"head_importance": measured} if measured else {}),
    }
    kept_tokenizer = "tokenizer.json of the model" if "tokenizer.json" in tokenizer else None
    say_plan(config, source, parts, facts, origin, new or kept_tokenizer)
    if arguments.dry_run:
        return
    started = time.perf_counter()
    whole = Config(model=config, run=RunConfig(seq_length=length, seed=arguments.seed))
    total = sum(4 * math.prod(part.shape) for part in parts)
    with progress("importing", total) as bar:
        step = write_step(arguments.output, whole, parts, facts, tokenizer, bar.update)
    print(f"imported {name} as {step}: {total:,} bytes of weights in {time.perf_counter() - started:.0f} s")
    print("to train it (the model's flags are taken from there; any that contradicts it is refused):")
    print(f"    {next_command(arguments.output, config, length)}")


def next_command(run, model, length):
    """Return a command that trains the import, with settings for its size. length: tokens of its longest sequence.

    The settings are those of the paper's MoH-LLaMA3-8B, scaled to other sizes: a rate of 2e-5 at width 4096 that is
    larger in narrower models, batches of 16M tokens that shrink with the parameters, and 12.5 tokens per parameter.
    """
    from moh_lm.cost.memory import parameter_counts

    parameters, rate = parameter_counts(model)["total"], 2e-5 * 4096 / model.hidden_size
    tokens = 2 ** round(math.log2(parameters / 512))
    length = min(length, 8192, tokens)
    batch = f"--batch-tokens {max(1, tokens // length) * length} --micro-batch-size 1"
    rates = f"--learning-rate {rate:.1e} --min-learning-rate {rate / 20:.1e} --warmup-iters 50"
    where = f"--checkpoint-dir {shlex.quote(str(run))} --data-dir DATA --require-checkpoint"
    budget = f"--train-tokens {round(12.5 * parameters / 1e6) or 1}M"
    return f"python -m moh_lm.pretrain {where} \\\n        --seq-length {length} {batch} \\\n        {budget} {rates}"


def describe_vocabulary(old, new, num_spelled):
    if new == old:
        return f"{old} rows"
    return (
        f"{old} rows and {new - old} new ones, near the mean of all old tokens; in the embedding {num_spelled} of them "
        "near the mean of the old tokens that spell them"
    )


def say_plan(config, source, parts, facts, sample, tokenizer):
    """Print the model, the sources of its parameters, and sizes. sample: what ranked the heads, or why nothing did."""
    from moh_lm.cost.summary import describe_model

    print("\n".join(describe_model(config)))
    print(f"source     {facts['source']}: {len(source.shapes)} tensors, {facts['dtypes']}")
    print(f"vocabulary {facts['vocabulary']}")
    if "head_importance" in facts:
        measured = facts["head_importance"]
        shares = {name: f"{share:.1%}" for name, share in measured["share_of_shared_heads"].items()}
        print(f"shared     the most important heads on {measured['tokens']:,} tokens of {sample}")
        print(f"importance {shares['chosen']} is in the shared heads; the first heads would have {shares['first']}")
        print(f"cut        {measured['share_cut']:.1%} of it for a token, if routed heads are selected equally often")
    elif config.heads.head_selection != "all":
        print(f"shared     the first heads: {sample}")
    none = "none found: give that of the data with --tokenizer, or training uses the one of its data"
    print(f"tokenizer  {tokenizer or none}")
    for part in parts:
        if not part.name.startswith("model.layers.") or part.name.startswith("model.layers.0."):
            shape = " x ".join(map(str, part.shape))
            print(f"  {part.name:<50}{shape:>16}  {part.origin}")
    print(f"  layers 1 to {config.num_layers - 1} like layer 0" if config.num_layers > 1 else "")
    print(f"size       {4 * sum(math.prod(part.shape) for part in parts):,} bytes", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
