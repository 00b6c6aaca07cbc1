"""The work of tools/import_hf.py: which heads and tokenizer are wanted, and the plan of step 0."""

import math
import shlex
import time
from dataclasses import fields, replace
from functools import partial

from tqdm import tqdm

from moh_lm.checkpoint.manifest import describe
from moh_lm.config import TRAINING_ONLY, Config, ConfigError, HeadsConfig, RunConfig, flag, raise_any
from moh_lm.cost.summary import describe_model
from moh_lm.data.files import ShardError, read_json
from moh_lm.data.shards import TOKENIZER_FILES, tokenizer_files
from moh_lm.flags import read_value
from tools.heads.importance import ranked, sample_shards, sample_text
from tools.hf.convert.hub import model_directory
from tools.hf.convert.import_config import fits, model_config, own_heads, read_config, refuse_run
from tools.hf.convert.import_step import output_problems, write_step
from tools.hf.convert.import_vocabulary import new_rows, read_tokenizer, spelled, tokens_of
from tools.hf.convert.import_weights import Source, plan
from tools.hf.convert.keys import ARCHITECTURES

RELEASED = {  # half of the heads shared and a quarter routed, which is the default, stands in their code alone
    "moh-llama3-8b": {"head_selection": "mixture", "routing": "query_norm", "routing_dtype": "bf16"},
}
FAILURES = (OSError, ShardError)


def run(arguments):
    """The whole program. Raises ConfigError before anything is written, ConfigError or OSError after."""
    problems = output_problems(arguments.output)
    raise_any(problems)
    named = arguments.model.name.strip(".")  # . and .. are none
    name = str(arguments.model if named else arguments.model.resolve())
    arguments.model = model_directory(arguments.model)
    refuse_run("--model", arguments.model)
    values = read_config(arguments.model)
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
    source = Source(arguments.model)
    old, new, tokenizer = find_tokenizers(arguments, vocab_size)
    num_tokens = tokens_of(old or arguments.model, old_vocab_size) if arguments.extend_vocab else old_vocab_size
    kept = num_tokens if new else old_vocab_size  # new tokens take the rows that pad the old vocabulary
    pieces = spelled(old, new, num_tokens, vocab_size) if old and new and vocab_size > kept else {}
    router_seed = arguments.seed if own_heads(values).head_selection == "all" else None
    trained = replace(config, heads=own_heads(values))
    plan(config, source, old_vocab_size, {}, None, router_seed, trained)  # refuses what cannot be read
    length = values.get("max_position_embeddings", 2048)  # LlamaConfig's own default
    orders, measured = {}, None
    if arguments.select_shared == "importance":
        tokens = find_sample(arguments, old_vocab_size, min(length, 2048), old)
        with tqdm(desc="layers measured", total=config.num_layers, leave=False, disable=None) as bar:
            orders, measured = ranked(config, source, tokens, bar.update)
    more = partial(new_rows, source, pieces, arguments.seed, num_tokens, range(kept, vocab_size))
    extend = (kept, more) if vocab_size > kept else None
    parts = plan(config, source, old_vocab_size, orders, extend, router_seed, trained)
    facts = {
        "source": name,
        "config_sha256": describe(arguments.model / "config.json")["sha256"][0],
        "dtypes": ", ".join(source.dtypes),
        "vocabulary": describe_vocabulary(kept, vocab_size, len(pieces)),
        "token_ids": token_ids(arguments.model, values),
        "seed": arguments.seed,
        "shared_heads": arguments.select_shared,
        **({"head_importance": measured} if measured else {}),
    }
    say_plan(config, source, parts, facts, new or ("tokenizer.json" in tokenizer and "tokenizer.json of the model"))
    if arguments.dry_run:
        return
    started = time.perf_counter()
    whole = Config(model=config, run=RunConfig(seq_length=length, seed=arguments.seed))
    total = sum(4 * math.prod(part.shape) for part in parts)
    with tqdm(desc="importing", total=total, unit="B", unit_scale=True, leave=False, disable=None) as bar:
        step = write_step(arguments.output, whole, parts, facts, tokenizer, bar.update)
    print(f"imported {name} as {step}: {total:,} bytes of weights in {time.perf_counter() - started:.0f} s")
    print("to train it (the model's flags are taken from there; any that contradicts it is refused):")
    flags = f"--checkpoint-dir {shlex.quote(str(arguments.output))} --data-dir DATA --seq-length {length}"
    print(f"    python -m moh_lm.pretrain {flags} ...")


def wanted_heads(arguments, values):
    """The HeadsConfig of the flags that were given, the others as they are in the source. Raises ConfigError."""
    given, problems = dict(RELEASED.get(arguments.released, {})), []
    for entry in fields(HeadsConfig):
        texts = getattr(arguments, entry.name)
        if texts is not None:
            try:
                value = read_value(entry, texts)
                if entry.name != "routing_dtype" and given.get(entry.name, value) != value:  # which one may choose
                    ours = f"--released {arguments.released}: has {flag(entry.name)} {given[entry.name]}"
                    problems.append(f"{ours}, not {value}; leave one of the flags out")
                given[entry.name] = value
            except ValueError as error:
                problems.append(f"{flag(entry.name)} {texts if isinstance(texts, str) else ' '.join(texts)}: {error}")
    raise_any(problems)
    if values.get("model_type") not in ARCHITECTURES:
        return HeadsConfig(head_selection="all")  # refused by ``model_config``, with all else that is wrong
    own = own_heads(values)
    if own.head_selection == "all":
        idle = sorted(given.keys() - {"head_selection"})
        if idle and given.get("head_selection", "all") == "all":
            raise ConfigError([f"{flag(idle[0])}: a model with all heads has none; add --head-selection mixture"])
        return replace(own, **given)
    every = values.get("layer_heads") or [values.get("num_attention_heads")] * len(own.num_shared_heads)
    is_gated = own.routing == "sigmoid" and list(own.num_shared_heads) == every
    if is_gated and given.get("head_selection") == "gated":
        del given["head_selection"]  # it is short for what is there
    changed = {}
    for key, value in given.items():
        there = getattr(own, key)
        if isinstance(value, tuple) and len(value) == 1:
            value *= len(there)
        dropped = key == "head_selection" and there == "mixture" and value in ("all", "static")
        if key in TRAINING_ONLY or (dropped and arguments.allow_routing_change):
            changed[key] = value
        elif value != there:
            hint = ", or give --allow-routing-change" if dropped else ""
            raise ConfigError([f"{flag(key)} {value}: the source is trained with {there}; leave the flag out{hint}"])
    return replace(own, **changed)


def sample_problems(arguments, config, values):
    """Sentences for a choice of shared heads that cannot be made."""
    given = [name for name in ("sample_data", "sample_text") if getattr(arguments, name)]
    if arguments.select_shared == "first":
        return [f"{flag(name)}: is only read by --select-shared importance" for name in given]
    if config.heads.head_selection == "all":
        return ["--select-shared importance: all heads are on; give --head-selection mixture, or leave it out"]
    has_code = values["model_type"] != "moh_llama" and values.get("auto_map")  # which selects heads by their place
    if own_heads(values).head_selection != "all" or arguments.released or has_code:
        trained = "the source is trained with its shared heads in their places, which another order would break"
        return [f"--select-shared importance: {trained}; leave it out"]
    if config.attention != "heads" or config.head_dims or len(config.head_counts) > 1:
        needs = "needs as many heads in every layer, of one width, with keys that are not latent"
        return [f"--select-shared importance: {needs}; leave it out"]
    if len(given) != 1:
        return ["--select-shared importance: give the text to measure on, by one of --sample-data and --sample-text"]
    return []


def find_sample(arguments, vocab_size, length, tokenizer):
    """Tokens int64 [b, s] on which the heads are measured. Raises ConfigError."""
    if arguments.sample_data:
        return sample_shards(arguments.sample_data, vocab_size, length, arguments.sample_tokens, arguments.seed)
    if tokenizer is None:
        raise ConfigError(["--sample-text: the model has no tokenizer.model; give it by --old-tokenizer"])
    return sample_text(arguments.sample_text, tokenizer, length, arguments.sample_tokens)


def find_tokenizers(arguments, vocab_size):
    """(path of the model's tokenizer, path of that of the data to come, {name: bytes} of files for the step).

    A model without tokenizer.model has no path of its own, and its tokenizer in Hugging Face form is kept unread.
    """
    places = [arguments.model / TOKENIZER_FILES[0], arguments.model / "original" / TOKENIZER_FILES[0]]
    old = arguments.old_tokenizer or next((path for path in places if path.is_file()), None)
    new = arguments.tokenizer or (None if arguments.extend_vocab else old)
    given = [flag(name) for name in ("tokenizer", "old_tokenizer") if getattr(arguments, name)]
    named = given[0] if given else "tokenizer of the model,"
    if new:
        return old, new, read_tokenizer(new, vocab_size, named)
    kept = tokenizer_files(arguments.model) if not arguments.extend_vocab else []
    return old, new, {path.name: path.read_bytes() for path in kept}


def token_ids(directory, values):
    """{"bos", "eos", "pad"} -> id of config.json's ``values`` or of generation_config.json, or None."""
    path = directory / "generation_config.json"
    try:
        more = read_json(path) if path.is_file() else {}
        if not isinstance(more, dict):
            raise ValueError("it holds no settings")
    except ValueError as error:
        raise ConfigError([f"{path}: cannot be read ({error}); mend it, or delete it"]) from error
    keys = {name: f"{name}_token_id" for name in ("bos", "eos", "pad")}
    found = {name: more.get(key) if values.get(key) is None else values[key] for name, key in keys.items()}
    if isinstance(more.get("eos_token_id"), list):  # all that end a text; config.json may name one of them
        found["eos"] = more["eos_token_id"]
    odd = {keys[name]: value for name, value in found.items() if not fits(value, int | None | tuple[int, ...])}
    if odd:
        given = f"{directory}: config.json or generation_config.json"
        raise ConfigError([f"{given} has {key} {value!r}: write a whole number, or null" for key, value in odd.items()])
    return found


def describe_vocabulary(old, new, num_spelled):
    if new == old:
        return f"{old} rows"
    return (
        f"{old} rows and {new - old} new ones, near the mean of all old tokens; in the embedding {num_spelled} of them "
        "near the mean of the old tokens that spell them"
    )


def say_plan(config, source, parts, facts, tokenizer):
    """Print the model, where its parameters come from, and sizes."""
    print("\n".join(describe_model(config)))
    print(f"source     {facts['source']}: {len(source.shapes)} tensors, {facts['dtypes']}")
    print(f"vocabulary {facts['vocabulary']}")
    if "head_importance" in facts:
        measured = facts["head_importance"]
        shares = {name.replace("_", " "): f"{share:.1%}" for name, share in measured["share_of_shared_heads"].items()}
        shown = ", ".join(f"{name} {share}" for name, share in shares.items())
        print(f"shared     by importance on {measured['tokens']:,} tokens; their part of it: {shown}")
    none = "no tokenizer.model there: give that of the data by --tokenizer, or training takes what its data have"
    print(f"tokenizer  {tokenizer or none}")
    for part in parts:
        if not part.name.startswith("model.layers.") or part.name.startswith("model.layers.0."):
            shape = " x ".join(map(str, part.shape))
            print(f"  {part.name:<50}{shape:>16}  {part.origin}")
    print(f"  layers 1 to {config.num_layers - 1} like layer 0" if config.num_layers > 1 else "")
    print(f"size       {4 * sum(math.prod(part.shape) for part in parts):,} bytes", flush=True)
