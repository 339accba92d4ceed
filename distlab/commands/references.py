"""``distlab references``: list the reference runs, or compare two of them side by side."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..host.terminal import say, short
from ..reference import shelf
from ..reference.shelf import Kept

MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="two, such as cuda/tiny_gpt")
    parser.add_argument("--folder", type=Path, help="default: references")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="with two: draw their curves")


def main(options: argparse.Namespace, out: Console) -> int:
    """List all records, or compare two; returns 1 if a hash does not match."""
    records = shelf.every(options.folder)
    if options.names:
        if len(options.names) != 2:
            raise ValueError(f"two names are compared, not {len(options.names)}")
        first, second = (shelf.find(name, records) for name in options.names)
        return compare(first, second, options.plot, out)
    if options.plot:
        raise ValueError("--plot needs the names of two records")
    if not records:
        raise ValueError("there is no reference run: distlab record makes some")
    out.print(_list([record for record in records if not record.problem]))
    for record in records:
        if record.problem:
            print(f"distlab: {record.problem}", file=sys.stderr)
    return int(any(record.problem for record in records))


def _list(records: Sequence[Kept]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("reference", no_wrap=True)
    for name in ("ranks", "last loss", "samples/s", "MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("recorded")
    for record in records:
        data = record.data
        told = ("", "", "", "")
        if record.is_training:
            told = (str(record.ranks), f"{data['losses'][-1]:.4f}", *_speed(data))
        table.add_row(record.name, *told, Text(where(data), "dim"))
    return table


def _speed(data: dict[str, Any]) -> tuple[str, str]:
    return f"{data['samples_per_second']:,.0f}", f"{data['peak_memory_bytes'] / MIB:,.0f}"


def where(data: dict[str, Any]) -> str:
    """The device, the versions and the date of a record."""
    device = data.get("device_name") or f"{len(data['gpus'])} x {data['gpus'][0]}"
    driver = f", driver {data['driver']}" if data.get("driver") else ""
    return f"{device}{driver}, torch {data['torch']}, {data['date']}"


def compare(first: Kept, second: Kept, plot: Path | None, out: Console) -> int:
    """Two trainings of one workload side by side: losses, speed, memory."""
    a, b = first.data, second.data
    if a["configuration_hash"] != b["configuration_hash"]:
        names = [data["configuration"]["name"] for data in (a, b)]
        raise ValueError(f"{first.name} and {second.name} trained other things: {names}")
    if a["data_hash"] != b["data_hash"]:
        text = f"{first.name} and {second.name} trained on other data (Python {a['python']}, "
        raise ValueError(f"{text}{b['python']}): their losses can't be compared")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, head in enumerate(("", first.name, second.name, "second : first")):
        table.add_column(head, justify="right" if number else "left")
    last = len(a["losses"]) - 1
    for step in sorted({0, last // 4, last // 2, 3 * last // 4, last}):
        one, two = a["losses"][step], b["losses"][step]
        table.add_row(f"loss of step {step + 1}", f"{one:.5f}", f"{two:.5f}", f"{two - one:+.1e}")
    for label, key, unit in (
        ("samples per second", "samples_per_second", 1),
        ("peak memory, MiB", "peak_memory_bytes", MIB),
    ):
        one, two = a[key] / unit, b[key] / unit
        table.add_row(label, f"{one:,.0f}", f"{two:,.0f}", f"{two / one:.2f} x")
    for label, key in (("precision", "dtype"), ("ranks", "ranks")):
        table.add_row(label, str(a.get(key, 1)), str(b.get(key, 1)), "")
    out.print(table)
    apart = [abs(y - x) for x, y in zip(a["losses"], b["losses"], strict=True)]
    worst = max(range(len(apart)), key=apart.__getitem__)
    say(out, f"furthest apart at step {worst + 1}: {apart[worst]:.1e}")
    for record in (first, second):
        say(out, f"{record.name}: {where(record.data)}", "dim")
    if plot:
        _draw(first, second, plot)
        say(out, f"{short(plot)}  (curves)")
    return 0


def _draw(first: Kept, second: Kept, path: Path) -> None:
    """Both losses, and below them their difference."""
    # start-up time: only this command draws
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    steps = range(1, len(first.data["losses"]) + 1)
    for record, style in ((first, "-"), (second, "--")):
        above.plot(steps, record.data["losses"], style, label=record.name, linewidth=1.2)
    above.set_ylabel("loss")
    above.legend()
    pairs = zip(first.data["losses"], second.data["losses"], strict=True)
    below.plot(
        steps, [abs(y - x) or float("nan") for x, y in pairs], ".", color="0.3", markersize=4
    )
    below.set_yscale("log")
    below.set_ylabel("difference\n(equal: no dot)")
    below.set_xlabel("optimizer step")
    figure.suptitle(f"{first.data['configuration']['name']}: {first.name} and {second.name}")
    figure.savefig(path, dpi=110)
