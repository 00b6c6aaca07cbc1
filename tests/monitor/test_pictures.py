"""The pictures of a run's page: their axes, marks, colours and names are legible for any run."""

import xml.etree.ElementTree as xml
from types import SimpleNamespace

import numpy as np
import pytest

from moh_lm.monitor.report import page, pictures


def test_the_axis_leaves_out_what_was_before_the_training():
    steps, values = np.arange(0, 101, 10), np.array([9.0, *np.linspace(4, 3, 10)])
    curves = {"training": (steps, values, {}), "held out": (steps[:1], values[:1], {})}
    (axis,) = pictures.lines(curves, "loss").axes
    assert axis.get_ylim() == pytest.approx((2.95, 4.05))
    (axis,) = pictures.lines({"held out": curves["held out"]}, "loss").axes  # a run that has only just begun
    assert axis.get_ylim()[0] < 9 < axis.get_ylim()[1]


def test_a_logarithmic_axis_has_more_than_one_label():
    steps = np.arange(100)
    for values, scale in ((np.linspace(0.5, 2, 100), "linear"), (np.geomspace(0.3, 9, 100), "log")):
        figure = pictures.lines({"norm": (steps, values, {})}, "norm", logarithmic=True)
        figure.draw_without_rendering()
        (axis,) = figure.axes
        low, high = axis.get_ylim()
        inside = [tick for tick in axis.get_yticks() if low <= tick <= high]
        assert axis.get_yscale() == scale and len(inside) >= 3


def test_of_many_layers_a_few_are_named():
    of_layers = {layer: (np.arange(3), np.full(3, layer)) for layer in range(24)}
    (axis,) = pictures.lines(page.layer_lines(of_layers), "load").axes
    named = [line.get_label() for line in axis.lines if not line.get_label().startswith("_")]
    assert len(axis.lines) == 24 and len(named) == 8 and {named[0], named[-1]} == {"layer 0", "layer 23"}


def test_the_map_of_loads_has_each_interval_at_its_steps():
    steps, values = np.array([60, 80, 100, 400]), np.array([[0.1], [0.2], [0.3], [0.4]])  # after a dense warm-up
    axis, *_ = pictures.load_map({0: (steps, values)}).axes
    (image,) = axis.images
    left, right, *_ = image.get_extent()
    row = np.ma.filled(image.get_array(), np.nan)[0]
    places = left + (np.arange(len(row)) + 0.5) * (right - left) / len(row)
    assert (left, right) == (0, 400)
    for step, load in ((20, np.nan), (50, 0.1), (70, 0.2), (90, 0.3), (110, 0.4), (250, 0.4), (390, 0.4)):
        np.testing.assert_equal(row[np.abs(places - step).argmin()], load)


def test_events_of_a_kind_are_one_line_of_a_picture_however_many():
    marks = {kind: range(30_000) for kind in ("skipped", "alarm")}
    curve = {"loss": (np.arange(1, 30_001), np.ones(30_000), {})}
    (axis,) = pictures.lines(curve, "loss", marks).axes
    assert [line.get_label() for line in axis.lines] == ["loss", "skipped (30000)", "alarm (30000)"]
    places = axis.lines[1].get_xdata()
    assert 700 < len(set(places)) <= pictures.COLUMNS and places.min() == 0 and places.max() > 29_900


def test_many_sources_have_their_own_colours_and_leave_room_for_the_curves():
    heights = []
    for count in (2, 30):
        names = [f"dolma-common-crawl-{number:02d}" for number in range(count)]
        curves = {f"loss/{name}": (np.arange(3), np.ones(3)) for name in names}
        curves |= {"held/" + name: (np.arange(3), np.ones(3)) for name in [*names, "of-the-decay"]}
        series = page.by_source(SimpleNamespace(curves=curves), "loss/", "held/")
        figure = pictures.lines(series, "loss")
        (axis,) = figure.axes
        labels = [line.get_label() for line in axis.lines if line.get_label() != "_"]
        assert labels == [*names, "of-the-decay, held out"]
        assert len({str(line.get_color()) for line in axis.lines}) == count + 1
        figure.draw_without_rendering()
        heights.append(axis.get_position().height * figure.get_figheight())
    assert heights[1] > 0.8 * heights[0]


def test_a_name_with_bytes_that_are_no_text_has_a_picture():
    assert "a? run" in pictures.svg(pictures.lines({"a\udc80 run": (np.arange(3), np.ones(3), {})}, "loss"), "loss")


@pytest.mark.parametrize("name", ["_hidden", "a$b$c", "cost_$5", "x^2", r"\frac{1}{2}", "$\\nosuch$", "100%", "<&>"])
def test_the_name_of_a_source_is_text(name):
    series = {name: (np.arange(3), np.ones(3), {}), f"{name}, held out": (np.arange(3), np.ones(3), {})}
    root = xml.fromstring(pictures.svg(pictures.lines(series, "loss"), "loss").replace("xlink:href", "href"))
    texts = ["".join(element.itertext()).strip() for element in root.iter() if element.tag.endswith("text")]
    assert name in [text.lstrip("\u200b") for text in texts]


def test_a_name_in_a_script_that_the_font_lacks_warns_of_nothing(recwarn):
    curves = {"標準語": (np.arange(3), np.ones(3), {})}
    assert "標準語" in pictures.svg(pictures.lines(curves, "loss"), "loss")
    pictures.png(pictures.lines(curves, "loss"))
    assert not [str(warning.message) for warning in recwarn]
