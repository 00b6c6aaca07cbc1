"""The models of the paper by name: the values that --preset sets. Budgets are those of the authors' released code.

    ViT    TransNeXt-S and -B, dense, or with about the named percentage of their heads
    DiT    S, B, L and XL, dense, and with 90% and 75%. L and XL with routed heads have other numbers of heads in their
           first, middle and last layers; XL has heads of 72 features, L of 64
"""

SMALL = dict(hidden_sizes=(72, 144, 288, 576), num_attention_heads=(3, 6, 12, 24), depths=(5, 5, 22, 5), drop_path=0.45)
BASE = dict(hidden_sizes=(96, 192, 384, 768), num_attention_heads=(4, 8, 16, 32), depths=(5, 5, 23, 5), drop_path=0.6)
DENSE = dict(head_selection="all")


def budget(shared, routed):
    return dict(num_shared_heads=tuple(shared), num_active_routed_heads=tuple(routed))


VIT = {
    "S": {**SMALL, **DENSE},
    "S-80": {**SMALL, **budget((3, 6, 3, 8), (0, 0, 6, 12))},
    "S-75": {**SMALL, **budget((3, 6, 3, 4), (0, 0, 6, 12))},
    "B": {**BASE, **DENSE},
    "B-75": {**BASE, **budget((4, 8, 4, 5), (0, 0, 8, 16))},
    "B-50": {**BASE, **budget((2, 2, 2, 4), (2, 4, 6, 8))},
}


def runs(*pairs):
    """Repeat each value of pairs (value, number of layers): a value per layer."""
    return tuple(value for value, count in pairs for _ in range(count))


def dit(hidden_size, num_layers, heads, head_dim=None):
    sizes = dict(hidden_size=hidden_size, num_layers=num_layers, num_attention_heads=heads)
    return sizes | (dict(head_dim=head_dim) if head_dim else {})


DIT_S, DIT_B, DIT_L, DIT_XL = dit(384, 12, (6,)), dit(768, 12, (12,)), dit(1024, 24, (16,)), dit(1152, 28, (16,))
MOH_L = dit(1024, 24, runs((8, 8), (16, 8), (24, 8)), 64)
MOH_XL = dit(1152, 28, runs((8, 9), (16, 10), (24, 9)), 72)
DIT = {
    "S": {**DIT_S, **DENSE},
    "S-90": {**DIT_S, **budget(runs((3, 8), (6, 4)), runs((2, 8), (0, 4)))},
    "S-75": {**DIT_S, **budget(runs((2, 2), (3, 8), (6, 2)), runs((1, 6), (2, 4), (0, 2)))},
    "B": {**DIT_B, **DENSE},
    "B-90": {**DIT_B, **budget(runs((6, 5), (7, 5), (12, 2)), runs((4, 10), (0, 2)))},
    "B-75": {**DIT_B, **budget(runs((4, 2), (6, 8), (12, 2)), runs((2, 2), (3, 8), (0, 2)))},
    "L": {**DIT_L, **DENSE},
    "L-90": {**MOH_L, **budget(runs((8, 8), (16, 16)), runs((0, 16), (3, 8)))},
    "L-75": {**MOH_L, **budget(runs((8, 16), (12, 8)), runs((0, 8), (4, 16)))},
    "XL": {**DIT_XL, **DENSE},
    "XL-90": {**MOH_XL, **budget(runs((8, 9), (16, 19)), runs((0, 19), (3, 9)))},
    "XL-75": {**MOH_XL, **budget(runs((8, 9), (10, 10), (14, 9)), runs((0, 9), (2, 19)))},
}
