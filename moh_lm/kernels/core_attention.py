"""The one seam of the attention layer: g_i H_i of every head, from queries, keys, values and gates.

Behind it stand dense and head-sparse attention (gated_attention.py), context parallelism
(moh_lm/parallel/ulysses.py) and positions that change scores (moh_lm/extras/cope.py). It is a module, so forward hooks
see what each layer asks and answers: attention sinks, entropies and the head report are measured by them.
"""

from torch import nn

from moh_lm.kernels.gated_attention import gated_attention
from moh_lm.kernels.masks import apply_window


class CoreAttention(nn.Module):
    """Attention of the heads that a rank computes.

    backend: a ``Backend`` that computes the selected heads only, or None for dense. window: number of keys that a token
    sees, its own included; 0 for the whole sequence. num_shared: number of heads at the front that every token uses.
    causal: whether a token sees only itself and earlier tokens. own_keys: whether a routed head sees only the tokens
    that select it.
    """

    def __init__(self, backend=None, window=0, num_shared=0, causal=True, own_keys=False):
        super().__init__()
        self.backend, self.window, self.num_shared = backend, window, num_shared
        self.causal, self.own_keys = causal, own_keys

    @property
    def reads_selection(self):
        """Whether training needs to hear which heads are selected, where gates of 0 would say as much."""
        return self.own_keys or self.backend is not None

    def forward(self, query, key, value, gates=None, selected=None, mask=None):
        """query: [s, b, h, e]; key, value: [s, b, kv, e]; gates, selected: [s, b, h], or None; see ``gated_attention``.

        mask: ``AttentionMask`` of the documents, or None. Returns [s, b, h, e].
        """
        mask = self.visible(query, key, mask)
        own_keys = self.own_keys and selected is not None
        return gated_attention(
            query, key, value, gates, selected, self.num_shared, mask, self.backend, self.causal, own_keys
        )

    def visible(self, query, key, mask):
        """What queries see of the keys: the ``AttentionMask`` of their documents in the window, or None for all."""
        return apply_window(mask, self.window, query, masked=self.backend is None)

    def added_to_cache(self, query, keys, lengths):
        """What is added to the scores of tokens that ask a cache, [b, h, T], or None; see ``decode_attention``."""
        return None

    def set_window(self, window):
        self.window = window
