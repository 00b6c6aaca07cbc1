"""A picture of the load of every head for TensorBoard: a row for each layer, a column for each head, the scale below.

Colours go from 0 to 100% of the tokens, so that pictures of all steps and sources can be compared. They are the colours
of the run report (matplotlib's cividis). Heads that no router chooses are grey.
"""

import numpy as np
from PIL import Image, ImageDraw, ImageFont

CIVIDIS = ((0, 34, 78), (67, 78, 108), (125, 124, 120), (188, 174, 108), (254, 232, 56))  # colours at 0, 25, ... 100%
ALWAYS = (204, 204, 204)
CELL, LEFT, TOP = 18, 56, 18  # pixels for a head, and for the names of layers and heads
SCALE = "share of tokens: 0%", "100%", "always on"


def head_map(layers, loads, num_layers, num_heads):
    """Draw the map, uint8 [height, width, 3]. layers: ``RoutedLayer``s. loads: [[E] of each], shares of the tokens."""
    cells = np.full((num_layers, num_heads, 3), ALWAYS, dtype=np.uint8)
    for layer, load in zip(layers, loads, strict=True):
        cells[layer.index, layer.num_shared + layer.num_routed :] = 255  # columns that only layers with more heads have
        cells[layer.index, layer.routed_numbers] = colours(np.asarray(load))
    bottom = TOP + num_layers * CELL
    picture = np.full((bottom + 2 * CELL, max(LEFT + num_heads * CELL, 330), 3), 255, dtype=np.uint8)
    picture[TOP:bottom, LEFT : LEFT + num_heads * CELL] = cells.repeat(CELL, 0).repeat(CELL, 1)
    bar = slice(bottom + CELL // 2, bottom + CELL * 3 // 2)
    picture[bar, 120:220], picture[bar, 260:270] = colours(np.arange(100) / 99), ALWAYS
    image = Image.fromarray(picture)
    draw = ImageDraw.Draw(image)
    draw.font = ImageFont.load_default(11)
    for layer in range(num_layers):
        draw.text((LEFT - 6, TOP + (layer + 0.5) * CELL), f"layer {layer}", "black", anchor="rm")
    for head in range(num_heads):
        draw.text((LEFT + (head + 0.5) * CELL, TOP - 3), str(head), "black", anchor="mb")
    for place, text, anchor in zip((114, 224, 274), SCALE, ("rm", "lm", "lm"), strict=True):
        draw.text((place, bottom + CELL), text, "black", anchor=anchor)
    return np.asarray(image)


def colours(loads):
    """Map loads to colours, uint8 [..., 3]."""
    found = [np.interp(loads, np.linspace(0, 1, len(CIVIDIS)), values) for values in zip(*CIVIDIS, strict=True)]
    return np.stack(found, axis=-1).round().astype(np.uint8)
