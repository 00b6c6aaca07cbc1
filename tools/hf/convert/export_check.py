"""Checks an export before it is published: the written files must give the same logits as the checkpoint.

Three models compute the logits of the same random tokens in fp32 (docs/huggingface.md). The trainer's models hold the
embedding, the output head and one decoder layer at a time; transformers holds the export as it is, and one layer of it
in fp32. It runs in a separate process,

    python tools/hf/convert/export_check.py EXPORT SCRATCH [TOKENIZER [BOS]]

because a process keeps the remote code of the first of two directories with the same name. It reads SCRATCH/tokens.npy
[b, s] and writes SCRATCH/logits.npy [b, s, vocab]. It also compares the tokenizer with the TOKENIZER of training on
``TEXTS``, on user-defined symbols, and on every control token unless the export is for chats. Before each comes the id
BOS, if texts begin with it.
"""

import os
import sys

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import functools
import signal
import subprocess
import tempfile
from dataclasses import replace

import numpy as np
import torch
from sentencepiece import SentencePieceProcessor

from moh_lm.build import build_model
from moh_lm.checkpoint.fragments import FragmentReader
from moh_lm.config import ConfigError
from moh_lm.data.files import read_json
from moh_lm.data.hugging_face_model import HuggingFaceModel
from moh_lm.data.sentencepiece_model import proto_of, user_defined
from moh_lm.data.tokenizer import read_model
from moh_lm.model.router import stored_dtype
from moh_lm.model.transformer import saved_tensors
from tools.hf.convert.export_files import ExportError, weight_files
from tools.hf.convert.import_config import model_config
from tools.hf.convert.source_tokenizer import begin_id

try:
    import transformers
except ImportError:  # an export can be made without it
    transformers = None

TOLERANCE = 1e-5  # relative to the largest logit if that is above 1
DRAWS = 3  # of the tokens on which a mixture is compared
MOST_SYMBOLS = 1000
TEXTS = (  # without repeated characters, which a unigram model may split in two ways with equal scores
    "The quick brown fox jumps over the lazy dog.",
    "def f(x):\n\treturn x ** 2 # 1234567890\n",
    " two  spaces ",
    "Zürich, naïve café, Ελληνικά, русский, العربية, हिन्दी, 한국어, 日本語",
    "\U0001f642 \U0001d54f \u00a0 \u200b \ufffd",
)


class LogitsDiffer(ExportError):
    """The export gives other logits than the checkpoint."""


def check_export(step, config, directory, tokenizer, stock=None):
    """Compare the logits of the export in ``directory`` with those of the checkpoint ``step``.

    tokenizer: path of the tokenizer whose ids the export's must give, or None. stock: see stock_classes.py, or None.
    Returns lines that say how they differ. Raises ExportError if they differ by more than ``TOLERANCE``; in a mixture
    two scores may be as close as rounding, and another head is then selected, so a fault must show in each draw.
    """
    draws = DRAWS if any(config.model.heads.num_active_routed_heads) else 1
    for seed in range(draws):
        try:
            return compare_models(step, config, directory, tokenizer, stock, seed)
        except LogitsDiffer:
            if seed == draws - 1:
                raise


def compare_models(step, config, directory, tokenizer, stock, seed):
    """Do that on random tokens drawn from ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.model.vocab_size, (1, min(config.run.seq_length, 256)), generator=generator)
    values = read_json(directory / "config.json")
    dtype = getattr(torch, values["torch_dtype"])
    checkpoint, files = FragmentReader(step), weight_files(directory)

    def exact(name):
        return checkpoint.read("master", name).to(stored_dtype(name, dtype))

    def read(name):
        return files[name].get_tensor(name)

    def written(name):
        return stock.original(name, lambda name: read(name).float()) if stock else read(name)

    if stock and dtype != torch.float32:
        exact = written  # rounding in another form gives other numbers
    described = config.model if stock else model_config(values)
    expected = trainer_logits(in_fp32(config.model), exact, tokens)
    logits = trainer_logits(in_fp32(described), written, tokens)
    lines = [compare("the trainer's model", expected, logits)]
    if transformers is None:
        remedy = "pip install transformers, and repeat with --overwrite"
        return [*lines, f"not checked with transformers, which is not installed: {remedy}"]
    begin = begin_id(read_json(step / "state.json"), directory) if tokenizer else None
    logits = hugging_face_logits(directory, tokens, tokenizer, [] if begin is None else [begin])
    return [*lines, compare(f"transformers {transformers.__version__}", expected, logits)]


def in_fp32(model):
    """Return ``model`` with scores ranked in fp32, because in bf16 the last bit of a query may select another head."""
    return replace(model, heads=replace(model.heads, routing_dtype="fp32"))


def compare(what, expected, logits):
    difference = np.abs(expected - logits).max().item()
    allowed = TOLERANCE * max(1.0, np.abs(expected).max().item())
    if not difference <= allowed:  # true for NaN too
        raise LogitsDiffer(
            f"{what} differs from the checkpoint by {difference:.1e} in its logits; allowed is {allowed:.1e}"
        )
    return f"checked: logits of {what} differ from the checkpoint's by at most {difference:.1e}"


@torch.no_grad()
def trainer_logits(config, read, tokens):
    """Logits of the trainer's model, fp32, numpy [s, b, vocab].

    config: ModelConfig. read: the tensor of a parameter, by its name. tokens: int64 [b, s].
    """
    with torch.device("meta"):
        model = build_model(config)
    for prefix, module in dict(model.in_order()).items():
        if prefix.startswith("model.layers."):
            module.register_forward_pre_hook(functools.partial(fill, prefix=prefix, read=read))
            module.register_forward_hook(empty)
        else:
            fill(module, prefix=prefix, read=read)
    return model(tokens).numpy()


def fill(module, inputs=None, *, prefix, read):
    """Fill the tensors of a module on the meta device with their values."""
    module.to_empty(device="cpu")
    for name, tensor in saved_tensors(module):
        tensor.copy_(read(prefix + name))


def empty(module, inputs, output):
    module.to("meta")


def hugging_face_logits(directory, tokens, tokenizer, begin):
    """Return the same logits from transformers, in a separate process without network. Raises ExportError with its last
    line. begin: ids that come before the ids of a text."""
    with tempfile.TemporaryDirectory() as scratch:
        np.save(f"{scratch}/tokens.npy", tokens.numpy())
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": scratch, "HF_MODULES_CACHE": f"{scratch}/modules"}
        finished = subprocess.run(
            [sys.executable, __file__, directory, scratch, *([tokenizer, *map(str, begin)] if tokenizer else [])],
            env={**os.environ, **offline},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if finished.returncode < 0:
            name = f"signal {-finished.returncode} ({signal.strsignal(-finished.returncode)})"
            raise ExportError(f"the check with transformers was ended by {name}; if memory was short, free some")
        if finished.returncode:
            lines = finished.stderr.strip().splitlines() or [f"exit code {finished.returncode}"]
            raise ExportError(f"transformers does not load the export: {lines[-1]}")
        return np.load(f"{scratch}/logits.npy")


def main():
    export, scratch, *of_data = sys.argv[1:]
    transformers.logging.set_verbosity_error()
    if of_data:
        check_tokenizer(export, *of_data)
    np.save(f"{scratch}/logits.npy", compute_logits(export, torch.from_numpy(np.load(f"{scratch}/tokens.npy"))))


def check_tokenizer(export, path, *begin):
    """Exit with a message if the tokenizer of ``export`` gives other ids than ``begin`` and those of the one at
    ``path``."""
    try:
        original = read_model(path)
    except ConfigError as error:  # the package is absent
        sys.exit(error.problems[0])
    converted = transformers.AutoTokenizer.from_pretrained(export, trust_remote_code=True)
    spelled = []
    if isinstance(original, SentencePieceProcessor):
        spelled = [f"a {symbol} b{symbol}c" for symbol in checked_symbols(proto_of(original))]
    elif isinstance(original, HuggingFaceModel) and converted.split_special_tokens:
        spelled = [f"a {token} b" for token in original.control_tokens()]
    for text in (*TEXTS, *spelled):
        ids, expected = converted(text)["input_ids"], [*map(int, begin), *original.encode(text)]
        if ids != expected:
            sys.exit(f"tokenizer.json gives {text!r} the ids {ids}, {path} {expected}")


def checked_symbols(proto):
    """Return user-defined symbols; of a unigram model none with spaces, whose runs it may split in two equal ways."""
    is_unigram = proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM
    return [symbol for symbol in user_defined(proto) if not (is_unigram and " " in symbol)][:MOST_SYMBOLS]


@torch.no_grad()
def compute_logits(export, tokens):
    """Logits of the same form as from ``trainer_logits``; exits with a message unless the weights are exactly those of
    the model."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        export, trust_remote_code=True, torch_dtype="auto", output_loading_info=True
    )
    problems = {key: value for key, value in report.items() if value}
    if problems:
        sys.exit(f"the loading report is not empty: {problems}")
    model.eval()
    for module in model.modules():
        module.in_bf16 = False  # as ``in_fp32``
    ends = (model.model.embed_tokens, getattr(model.model, "embed_positions", None), model.model.norm, model.lm_head)
    for module in (*filter(None, ends), *model.model.layers):
        module.register_forward_pre_hook(widen)
        module.register_forward_hook(narrow)
    return model(tokens).logits.transpose(0, 1).numpy()


def widen(module, inputs):
    """Give a module its tensors in fp32. Those of the export, which are mapped from its files, stay as they are."""
    module.as_written = [(tensor, tensor.data) for tensor in (*module.parameters(), *module.buffers())]
    for tensor, data in module.as_written:
        tensor.data = data.float() if data.is_floating_point() else data


def narrow(module, inputs, output):
    for tensor, data in module.as_written:
        tensor.data = data


if __name__ == "__main__":
    main()
