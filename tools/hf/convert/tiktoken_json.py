"""Converts LLaMA-3's ``tokenizer.model`` in tiktoken's format to the files of tokenizer_json.py, with equal ids.

tiktoken joins the neighbours whose result has the lowest rank; Hugging Face's BPE has a list of pairs. That list gets
every pair of tokens that forms a token, in the order of ranks. With ``ignore_merges`` a word that is a token stays
whole, as in tiktoken. Bytes are spelled as in GPT-2. The file lacks special tokens. Begin and end of text and LLaMA
3.1's padding are named, and are in the vocabulary, because ``tokenizers`` would otherwise give them ids after the last
one.
"""

from moh_lm.data.tiktoken_model import WORDS, read_ranks
from tools.hf.convert.tokenizer_json import bpe_model, config_with, content_of, write_files

END, PAD = "<|end_of_text|>", "<|finetune_right_pad_id|>"
SPECIAL = {"<|begin_of_text|>": 0, END: 1, PAD: 4}  # positions among the special tokens


def write_tokenizer(path, directory, max_length):
    """Convert the file at ``path``; returns ``special_ids``, see tools/hf/convert/tokenizer_json.py. Raises
    ConfigError."""
    tokens = {"bos_token": END, "eos_token": END, "pad_token": PAD}
    write_files(directory, tokenizer_json(path), config_with(tokens, max_length))
    first = read_ranks(path)[1]
    end, pad = first + SPECIAL[END], first + SPECIAL[PAD]
    return {"bos": end, "eos": end, "pad": pad, "unk": None}


def vocabulary(ranks, first):
    """Return {text: id} of the tokenizer.json that is made of what ``read_ranks`` returns."""
    letters = byte_letters()
    spelled = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    return spelled | {content: first + number for content, number in SPECIAL.items()}


def tokenizer_json(path):
    """Content of tokenizer.json. Raises ConfigError."""
    ranks, first = read_ranks(path)
    ids = vocabulary(ranks, first)
    texts = {index: text for text, index in ids.items()}
    words = {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False}
    in_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return content_of(
        added=[(ids[content], content, True) for content in SPECIAL],
        normalizer=None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [words, in_bytes]},
        decoder=in_bytes,
        model=bpe_model(
            ids,
            [[texts[ranks[left]], texts[ranks[right]]] for left, right in pairs(ranks)],
            ignore_merges=True,
        ),
    )


def pairs(ranks):
    """Return every pair of tokens that forms a token, those with the lowest result first."""
    for token in sorted(ranks, key=ranks.get):
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        found = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        yield from sorted(found, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def byte_letters():
    """Return the letter of each byte: itself if it is visible, or else one from U+0100 on, in order."""
    shown = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) if byte in shown else chr(256 + others.index(byte)) for byte in range(256)}
