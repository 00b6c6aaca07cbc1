"""Sample text during training: every evaluation continues the prompts of --sample-prompts greedily.

The evaluation's forward pass gives each new token, in every layout and without a second copy of the model: the
label of the last token requests the most likely token instead of a loss. RUN/samples.jsonl has a row for each prompt
and evaluation, {"step", "prompt", "text"}; the run report shows them.
"""

import re

from moh_lm.config import ConfigError
from moh_lm.data.tokenizer import continuation, read_model
from moh_lm.monitor.tasks import labelled_rows
from moh_lm.parallel.cross_entropy import MOST_LIKELY


class Samples:
    """The prompts of ``config.run.sample_prompts``, and how a model continues them.

    tokenizer: path of the data's tokenizer, or None. bos_id: begins the prompts as it begins documents of the data, or
    None. Raises ConfigError if a prompt has no tokens.
    """

    def __init__(self, config, tokenizer, bos_id):
        self.prompts, self.run = config.run.sample_prompts, config.run
        if not self.prompts:
            return
        if tokenizer is None:
            raise ConfigError([f"--sample-prompts: {config.data.data_dir} has no tokenizer; copy it there"])
        if odd := [prompt for prompt in self.prompts if re.search("[\ud800-\udfff]", prompt)]:
            raise ConfigError([f"--sample-prompts {odd[0]!r}: is not UTF-8; give text in UTF-8"])
        self.tokenizer = read_model(tokenizer)
        begin, encode = ([] if bos_id is None else [bos_id]), self.tokenizer.encode
        self.tokens = [[*begin, *map(int, encode(prompt, out_type=int))] for prompt in self.prompts]
        if empty := [prompt for prompt, tokens in zip(self.prompts, self.tokens, strict=True) if not tokens]:
            raise ConfigError([f"--sample-prompts {empty[0]!r}: contains no tokens; give some text"])

    def continued(self, evaluate_rows, *share):
        """Return the continuation of each prompt, [str], up to the end of the document. All ranks call it together.

        evaluate_rows: the method of the engine. share: further arguments of ``labelled_rows``.
        """
        texts = [list(tokens) for tokens in self.tokens]
        for _ in range(self.run.sample_tokens):
            rows = labelled_rows([(text, [MOST_LIKELY]) for text in texts], self.run.seq_length, *share)
            ids = evaluate_rows(rows, len(texts))[:, 0].tolist()
            for text, index in zip(texts, ids, strict=True):
                text.append(int(index))
        return [self.written(prompt, text[len(prompt) :]) for prompt, text in zip(self.tokens, texts, strict=True)]

    def written(self, prompt, tokens):
        """Return the text of ``tokens`` before the first one that ends a document or stands for no text."""
        ends = [token == self.tokenizer.eos_id() or token >= self.tokenizer.vocab_size() for token in tokens]
        return continuation(self.tokenizer, prompt, tokens[: [*ends, True].index(True)])
