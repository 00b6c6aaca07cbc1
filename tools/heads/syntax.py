"""Heads that follow syntax: the largest weight lies on the other word of a relation (Voita et al. 2019, section 5.2).

The relations are those of a treebank in CoNLL-U, the form of Universal Dependencies. A decoder sees earlier words only,
so the query is the last token of the later word. It is a hit if the largest weight lies on any token of the earlier
word. Names say which word is sought: in "nsubj dependent" a verb finds its subject, in "nsubj governor" a subject finds
its verb. The baseline of a relation is a head that always looks at the most frequent distance in words. A head
follows a relation if its share of hits is 10 points above that.
"""

import os
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch

from moh_lm.config import ConfigError
from tools.heads.measures import FEWEST, ratio, sweep

ABOVE = 0.1  # share above the baseline


class Sentence(NamedTuple):
    """tokens: int64 [s]. pairs: (relation, distance in words, token that asks, first and end of the tokens sought)."""

    tokens: torch.Tensor
    pairs: list


def read_treebank(path, tokenizer, num_tokens, length):
    """Return [``Sentence``] of at most ``length`` tokens, until there are ``num_tokens``. It leaves out sentences whose
    words do not form their text, or whose tokens do not spell it. Raises ConfigError if none is left."""
    try:
        blocks = path.read_text(encoding="utf-8").strip().split("\n\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"--treebank {path}: cannot be read ({error}); give a file in CoNLL-U"]) from error
    found, total = [], 0
    for block in blocks:
        sentence = read_sentence(block.splitlines(), tokenizer) if total < num_tokens else None
        if sentence and len(sentence.tokens) <= length:
            found.append(sentence)
            total += len(sentence.tokens)
    if not found:
        raise ConfigError([f"--treebank {path}: has no sentence of up to {length} tokens in CoNLL-U; give another"])
    return found


def read_sentence(lines, tokenizer):
    rows = [line.split("\t") for line in lines if line and line[0] != "#"]
    words = {row[0]: row for row in rows if len(row) == 10 and row[0].isdigit()}
    given = [line[9:] for line in lines if line.startswith("# text = ")]
    text = given[0] if given else " ".join(row[1] for row in words.values())
    places, end = {}, 0
    for number, row in words.items():
        start = text.find(row[1], end)
        if start < 0 or text[end:start].strip():
            return None
        places[number] = start, (end := start + len(row[1]))
    ids = list(map(int, tokenizer.model.encode(text, out_type=int)))
    decoded = [tokenizer.model.decode(ids[: end + 1]) for end in range(len(ids))]
    whole = [len(os.path.commonprefix([part, text])) for part in decoded]  # characters that end by each token,
    begun = [end + (len(part) > end) for end, part in zip(whole, decoded, strict=True)]  # or begin: byte tokens
    if not words or tokenizer.model.decode(ids) != text:
        return None
    begin = tokenizer.bos_ids.tolist()
    spans = {  # tokens of each word: those that spell one of its characters
        number: (len(begin) + sum(end <= start for end in begun), len(begin) + sum(end < stop for end in whole) + 1)
        for number, (start, stop) in places.items()
    }
    pairs = []
    for number, row in words.items():
        governor, relation = row[6], row[7].partition(":")[0]
        if governor in words:
            first, later = sorted((number, governor), key=int)
            sought = "governor" if later == number else "dependent"
            pairs.append((f"{relation} {sought}", int(later) - int(first), spans[later][1] - 1, *spans[first]))
    return Sentence(torch.tensor(begin + ids), pairs)


def measure_syntax(model, sentences):
    """Return {relation: {"pairs": number, "baseline": share, "share": [L, h] of hits, "follows": bool [L, h]}}, the
    most frequent relations first. Shares are NaN for heads that too few pairs use."""
    layers = model.model.layers
    counts, distances = {}, {}
    for relation, distance, *_ in (pair for sentence in sentences for pair in sentence.pairs):
        distances.setdefault(relation, Counter())[distance] += 1
        counts.setdefault(relation, np.zeros((2, len(layers), model.config.of_layer(0).num_attention_heads)))
    for layer, number, heads in sweep(model, [sentence.tokens[None] for sentence in sentences]):
        largest = torch.stack([heads.attention(head)[0].argmax(-1) for head in range(heads.query.shape[2])]).cpu()
        for relation, _, asks, first, end in sentences[number].pairs:
            used, at = heads.used[asks, 0].cpu(), largest[:, asks]
            counts[relation][:, layer] += torch.stack((used & (at >= first) & (at < end), used)).numpy()
    found = {}
    for relation, of in sorted(distances.items(), key=lambda item: -item[1].total()):
        hits, asked = counts[relation]
        share, baseline = ratio(hits, np.where(asked < FEWEST, 0, asked)), of.most_common(1)[0][1] / of.total()
        follows = share >= baseline + ABOVE
        found[relation] = {"pairs": of.total(), "baseline": baseline, "share": share, "follows": follows}
    return found
