"""The core of the attention layer: computes g_i H_i of every head from queries, keys, values and gates.

Implementations are dense and head-sparse attention (gated_attention.py), context parallelism
(moh_lm/parallel/ulysses.py) and positions that change scores (moh_lm/extras/cope.py). Forward hooks of this module
measure attention sinks, entropies and the head report.
"""

from copy import copy

import torch

from moh_lm.compared import COMPARED_TOKENS, Compared, differences, leaves, results
from moh_lm.kernels.gated_attention import TRITON, gated_attention, needs_no_kernel
from moh_lm.kernels.masks import apply_window


class CoreAttention(Compared):
    """Attention of the heads that a rank computes.

    backend: a sparse ``Backend``, or None for dense. window: number of keys that a token sees, including its own; 0:
    all. num_shared: number of leading heads that every token uses. causal: whether a token sees only itself and earlier
    tokens. own_keys: whether a routed head sees only the tokens that select it.
    """

    def __init__(self, backend=None, window=0, num_shared=0, causal=True, own_keys=False):
        super().__init__()
        self.backend, self.window, self.num_shared = backend, window, num_shared
        self.causal, self.own_keys = causal, own_keys

    @property
    def flag(self):
        return "--attention-backend triton" if self.backend is not None and self.backend is TRITON else None

    @property
    def reads_selection(self):
        """Whether training needs the selection itself, because gates of 0 do not reveal it."""
        return self.own_keys or self.backend is not None

    def forward(self, query, key, value, gates=None, selected=None, mask=None):
        """Compute g_i H_i, [s, b, h, e]. query: [s, b, h, e]. key, value: [s, b, kv, e]. gates, selected: [s, b, h], or
        None; see ``gated_attention``. mask: ``AttentionMask`` of the documents, or None."""
        mask = self.visible(query, key, mask)
        own_keys = self.own_keys and selected is not None
        return gated_attention(
            query, key, value, gates, selected, self.num_shared, mask, self.backend, self.causal, own_keys
        )

    def visible(self, query, key, mask):
        """Return the ``AttentionMask`` of documents and window, or None if queries see all keys."""
        return apply_window(mask, self.window, query, masked=self.backend is None)

    def compare(self, query, key, value, gates=None, selected=None, mask=None):
        """See ``Compared``. Dense attention computes only the first positions, which see no later ones, in fp32 and in
        the dtype of the run."""
        if needs_no_kernel(self.visible(query, key, mask), selected, self.num_shared, query.shape[2]):
            return None
        first, dense, wide = slice(COMPARED_TOKENS), copy(self), torch.promote_types(query.dtype, torch.float32)
        dense.backend = None
        given = query, key, value, *([] if gates is None else [gates])
        inputs = leaves(*given)
        outputs, gradients = results([self.forward(*inputs, selected=selected, mask=mask)[first]], inputs)
        selected, mask = None if selected is None else selected[first], mask and mask.first(COMPARED_TOKENS)
        exact, plain = (leaves(*(part[first].to(dtype or part.dtype) for part in given)) for dtype in (wide, None))
        exact, plain = (results([dense.forward(*each, selected=selected, mask=mask)], each) for each in (exact, plain))
        found = outputs, [gradient[first] for gradient in gradients]
        return differences(found, exact, plain=plain, dtype=query.dtype)

    def added_to_cache(self, query, keys, lengths):
        """Return what is added to the scores of queries on a cache, [b, h, T], or None; see ``decode_attention``."""
        return None

    def set_window(self, window):
        self.window = window
