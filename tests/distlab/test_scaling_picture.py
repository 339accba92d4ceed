"""The pictures of docs/scaling.md: every recorded row is in one panel, few lines in each."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from benchmarks import scaling, scaling_picture
from benchmarks.scaling_page import by_numbers


def test_every_row_is_in_one_family_of_few() -> None:
    names = [name for family in scaling_picture.FAMILIES.values() for name in family]
    assert sorted(names) == sorted(row.name for row in scaling.ROWS)
    most = max(map(len, scaling_picture.FAMILIES.values()))
    assert most <= len(scaling_picture.STYLES) <= 4


def test_a_panel_shows_its_family_and_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, drawn = "gpt-7b", []
    monkeypatch.setattr(plt, "close", drawn.append)
    cells = by_numbers(scaling.load(model))
    errors = dict.fromkeys(scaling.CLUSTERS[model], 0.09)
    scaling_picture.draw(cells, scaling.COUNTS, tmp_path / "it.png", "a title", errors)
    (figure,) = drawn
    rows = 1 + len(scaling.CLUSTERS[model])
    panels = figure.axes
    assert len(panels) == rows * len(scaling_picture.FAMILIES)
    for number, family in enumerate(scaling_picture.FAMILIES.values()):
        for panel in panels[number :: len(scaling_picture.FAMILIES)]:
            lines = [line for line in panel.lines if line.get_marker() != "None"]
            assert len(lines) == len(family)
    first = panels[0].lines[1]
    cluster = scaling.CLUSTERS[model][0]
    cell = cells[cluster, "all-reduce, nothing hidden", 1]
    assert (first.get_xdata()[0], first.get_ydata()[0]) == (1, cell["rate"])
    monkeypatch.undo()
    plt.close(figure)
