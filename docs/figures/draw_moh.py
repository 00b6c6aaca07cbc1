"""The picture of README: a token, its router and its heads. Writes moh_light.svg and moh_dark.svg beside this file.

    python docs/figures/draw_moh.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

THEMES = {
    "light": dict(ink="#1f2328", faint="#8c959f", shared="#0969da", routed="#8250df", off="#d0d7de", text="#ffffff"),
    "dark": dict(ink="#e6edf3", faint="#7d8590", shared="#1f6feb", routed="#8957e5", off="#30363d", text="#ffffff"),
}
SHARED, SELECTED = (0, 1), (3, 6)  # of eight heads; the other four are left out
GATES = {0: 1.1, 1: 0.9, 3: 1.4, 6: 0.7}


def draw(ink, faint, shared, routed, off, text):
    plt.rcParams.update({"font.family": "sans-serif", "font.size": 12, "svg.fonttype": "none", "svg.hashsalt": "moh"})
    figure, axes = plt.subplots(figsize=(9, 3.6))
    axes.set_xlim(0, 18)
    axes.set_ylim(0, 7.2)
    axes.axis("off")

    def box(x, y, width, height, face, edge, label, color, style="solid"):
        shape = "round,pad=0,rounding_size=0.18"
        patch = FancyBboxPatch((x, y), width, height, shape, fc=face, ec=edge, ls=style, lw=1.4)
        axes.add_patch(patch)
        axes.text(x + width / 2, y + height / 2, label, ha="center", va="center", color=color)

    def arrow(start, end, color=faint, style="solid"):
        axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=color, ls=style, lw=1.3))

    box(0.2, 2.9, 2.2, 1.4, "none", ink, "token $x_t$", ink)
    box(3.9, 5.3, 2.6, 1.3, "none", ink, "router", ink)
    arrow((1.3, 4.3), (3.9, 5.9), ink)
    for head in range(8):
        x = 4.0 + 1.25 * head
        kind = shared if head in SHARED else routed if head in SELECTED else None
        label = f"$H_{head + 1}$"
        if kind:
            box(x, 2.2, 1.0, 1.3, kind, kind, label, text)
            axes.text(x + 0.5, 1.75, f"$\\times$ {GATES[head]}", ha="center", va="center", color=kind, fontsize=10.5)
            arrow((5.2, 5.3), (x + 0.5, 3.55), kind)
        else:
            box(x, 2.2, 1.0, 1.3, "none", off, label, faint, "dashed")
    arrow((2.4, 3.3), (3.9, 2.9), ink)
    axes.text(4.9, 0.95, "shared: always on", ha="center", color=shared)
    axes.text(11.2, 0.95, "routed: each token selects 2 of 6", ha="center", color=routed)
    axes.text(7.0, 6.15, "scores every head for this token", ha="left", color=faint)
    arrow((14.0, 2.85), (15.0, 2.85), ink)
    box(15.0, 2.0, 2.8, 1.7, "none", ink, "$\\sum_i g_i\\,H_i\\,W_{O,i}$", ink)
    return figure


def main():
    for name, theme in THEMES.items():
        figure = draw(**theme)
        path = Path(__file__).with_name(f"moh_{name}.svg")
        figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
        print(path)
        plt.close(figure)


if __name__ == "__main__":
    main()
