"""Extends LLaMA-3's vocabulary with tokens that are joined from its tokens and have ids after its special tokens.

The new tokens lie within the words into which LLaMA-3's regular expression cuts a text. They have higher ranks than all
others, so that tiktoken joins the old tokens first. In the file they follow the old lines, which stay as they are.
"""

import base64
from collections import Counter
from pathlib import Path

import numpy as np

from data_prep.bpe_continuation import BETWEEN, cut_where_old, joined_tokens, spelled, too_little_text
from moh_lm.data.tiktoken_model import WORDS, TiktokenModel

BATCH = 100_000  # words per batch


def extended_ranks(path: str, texts: list[str], old_texts: list[str], vocab_size: int) -> bytes:
    """Return the file with tokens added up to ``vocab_size`` ids. Raises ConfigError if ``texts`` give too few."""
    model = TiktokenModel(path)
    first = model.vocab_size()
    tokens = {rank: token for token, rank in model.ranks.items()}
    room = vocab_size - first
    words = cut_where_old(words_of(model, texts), words_of(model, old_texts))
    joined = joined_tokens(words, room + room // 20 + 10)
    new = dict.fromkeys(b"".join(tokens[index] for index in ids) for ids in joined)
    added = [token for token in new if token not in model.ranks][:room]
    if len(added) < room:
        raise too_little_text(vocab_size, first + len(added), first)
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(added, first)]
    return Path(path).read_bytes().rstrip(b"\r\n") + b"\n" + b"".join(lines)


def words_of(model: TiktokenModel, texts: list[str]) -> Counter[str]:
    """The words of ``texts``, in the private alphabet."""
    import regex  # which tiktoken needs too

    found = Counter()
    for text in texts:
        found.update(regex.findall(WORDS, text))
    words, counts = list(found), Counter()
    for start in range(0, len(words), BATCH):
        batch = words[start : start + BATCH]
        encoded = model.encoding.encode_ordinary_batch(batch)
        ends_word = np.zeros(sum(map(len, encoded)), dtype=bool)
        ends_word[np.cumsum([len(ids) for ids in encoded]) - 1] = True
        letters = spelled(np.concatenate([np.array(ids) for ids in encoded]), ends_word).split(BETWEEN)
        for word, spelling in zip(batch, letters, strict=False):  # after the last word there is an empty one
            counts[spelling] += found[word]
    return counts
