"""Ranks the heads of a Llama on sample text, and reorders them without changing its function.

Heads are ranked by the size of what they write into the residual stream,

    I_i = mean over tokens t of |W_O_i H_i(t)|    H_i(t): output of head i, W_O_i: its columns of the output projection

which needs forward passes only, so the model is read layer by layer and one layer is in memory at a time.

Attention is a sum over heads, so heads may be in any order if the rows of q and the columns of o move together. With
grouped key/value heads, whole groups may change places, with their rows of k and v, and query heads inside their group.
So groups are ranked by the mean of their heads, and heads within their group. If the number of shared heads ends
within a group, the best heads of that group are shared.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F

from data_prep.encoding import Tokenizer
from moh_lm.build import Settings, decoder_layers
from moh_lm.config import ConfigError, DataConfig, HeadsConfig
from moh_lm.data.dataset import Dataset
from moh_lm.data.loader import Loader
from moh_lm.model.batch_context import BatchContext
from moh_lm.model.transformer import saved_tensors
from tools.hf.convert.import_weights import EMBEDDING, POSITIONS

HELD_OUT = 0.05  # share at the end of every shard that is not sampled: training may hold it out


def sample_shards(data_dir, vocab_size, seq_length, num_tokens, seed):
    """Tokens int64 [b, s] of a data directory that was made with the tokenizer of the model, without the ends of its
    shards. Raises ConfigError."""
    data = DataConfig(data_dir=str(data_dir), validation_fraction=HELD_OUT)
    dataset = Dataset.open(data, seq_length=seq_length, seed=seed, vocab_size=vocab_size, validates=False)
    count = max(1, num_tokens // seq_length)
    loader = Loader(
        dataset, global_batch_size=count, micro_batch_size=count, data_parallel_rank=0, data_parallel_size=1,
    )  # fmt: skip
    (batch,) = loader.read_step(0)
    return batch.tokens


def sample_text(path, tokenizer, vocab_size, seq_length, num_tokens):
    """(tokens int64 [b, s], their source) of a text file, or of the documentation of Python if ``path`` is None.

    Raises ConfigError if the text is shorter than one sequence, is not UTF-8, or has tokens unknown to the model.
    """
    name = f"--sample-text {path}" if path else "the documentation of Python"
    try:
        text = path.read_text(encoding="utf-8") if path else "\n\n".join(documentation().values())
    except (OSError, UnicodeDecodeError, ImportError) as error:
        raise ConfigError([f"{name}: cannot be read ({error}); give another file by --sample-text"]) from error
    ids = torch.from_numpy(Tokenizer(str(tokenizer)).encode(text)).long()
    count = min(max(1, num_tokens // seq_length), len(ids) // seq_length)
    if count == 0:
        raise ConfigError([f"{name}: {len(ids)} tokens; give at least {seq_length}"])
    if ids.max() >= vocab_size:
        raise ConfigError([f"{name}: the tokenizer has more tokens than the model's {vocab_size} rows; give its own"])
    return ids[: count * seq_length].view(count, seq_length), str(path or name)


def documentation():
    """{topic: text} of the documentation that most installations of Python have. Raises ImportError elsewhere."""
    from pydoc_data.topics import topics

    return topics


@torch.no_grad()
def measure(config, source, tokens, progress):
    """Return I_i of every layer, float64 [layers, heads]. config: ModelConfig with all heads on. tokens: int64 [b, s].

    progress: called after each layer.
    """
    x = embedded(config, source, tokens)
    found = []
    for layer in range(config.num_layers):
        block = read_layer(config, layer, source.whole)
        contexts = []
        block.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs, kept=contexts: kept.append(inputs[0]))
        x = torch.cat([block(sequence) for sequence in x.split(1, dim=1)], dim=1)
        context = torch.cat(contexts, dim=1).unflatten(-1, (-1, config.head_dim))  # [s, b, h, e]
        found.append(written_sizes(context, block.self_attn.o_proj.weight).mean((0, 1)).double())
        progress()
    return torch.stack(found)


def written_sizes(context, weight):
    """|W_O_i H_i(t)| of every token and head, [s, b, h]. context: H [s, b, h, e]; weight: W_O [d, h e]."""
    weight = weight.unflatten(1, (-1, context.shape[-1]))  # [d, h, e]
    gram = torch.einsum("dhe,dhf->hef", weight, weight)
    return torch.einsum("sbhe,hef,sbhf->sbh", context, gram, context).clamp_min(0).sqrt()


def embedded(config, source, tokens):
    """Return the input of the first layer for tokens int64 [b, s], fp32 [s, b, d]."""
    x = F.embedding(tokens.t(), source.whole(EMBEDDING))
    return x + source.rows(POSITIONS, 0, len(x)).unsqueeze(1) if "learned" in config.position else x


def read_layer(config, layer, read):
    """The decoder layer of a ``ModelConfig``. read: a function that gives the tensor of a parameter's name."""
    with torch.device("meta"):
        block = decoder_layers(config, BatchContext(), Settings())[layer]()
    block.to_empty(device="cpu")
    for name, tensor in saved_tensors(block):
        tensor.copy_(read(f"model.layers.{layer}.{name}"))
    return block.eval()


def head_order(importance, num_key_value_heads):
    """An order of heads that does not change the model, the most important ones first as far as groups allow.

    importance: [heads] of one layer.
    """
    groups = importance.view(num_key_value_heads, -1)  # [groups, heads of each]
    size = groups.shape[1]
    best_groups = groups.mean(1).sort(descending=True, stable=True).indices.tolist()
    within = groups.sort(dim=1, descending=True, stable=True).indices.tolist()
    return [group * size + head for group in best_groups for head in within[group]]


def kept_share(importance, heads):
    """The share of a layer's importance that ``heads`` have."""
    return (importance[heads].sum() / importance.sum()).item()


def ranked(config, source, tokens, progress):
    """Return (orders, facts): {layer: order of heads}, and what state.json records about the measurement, JSON-able.

    config: ModelConfig of the import, on the vocabulary of the source.
    """
    importance = measure(replace(config, heads=HeadsConfig("all")), source, tokens, progress)
    orders, kept, first, best, cut = {}, [], [], [], []
    for layer, values in enumerate(importance):
        orders[layer] = head_order(values, config.num_key_value_heads)
        places = config.numbers_always_on(layer)
        kept.append(kept_share(values, [orders[layer][place] for place in places]))
        first.append(kept_share(values, places))
        best.append(kept_share(values, values.sort(descending=True).indices[: len(places)].tolist()))
        cut.append((1 - kept[-1]) * (len(values) - config.active_heads(layer)) / max(1, len(values) - len(places)))
    shares = {"chosen": kept, "first": first, "best_without_groups": best}
    return orders, {
        "formula": "mean over tokens of |W_O_i H_i|",
        "tokens": tokens.numel(),
        "importance": importance.tolist(),
        "orders": list(orders.values()),
        "share_of_shared_heads": {name: sum(values) / len(values) for name, values in shares.items()},
        "share_cut": sum(cut) / len(cut),  # if every routed head is selected as often as any other
    }
