"""The course's pictures, all in one look: colours that colour-blind readers can tell apart, and that print in grey.

The palette is Okabe and Ito's. Where colours stand for different kinds of thing, hatches or labels say it too.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from tinyengine.graphs.arena import MIB, Address, Arena

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
HATCHES = ("", "//", "..", "xx", "\\\\", "oo", "--", "++")
INK, PALE = "#222222", "#E8E8E8"

mpl.rcParams.update(
    {
        "figure.dpi": 90,
        "figure.constrained_layout.use": True,
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": INK,
        "axes.prop_cycle": mpl.cycler(color=COLOURS[:6]) + mpl.cycler(marker=["o", "s", "^", "D", "v", "P"]),
        "hatch.linewidth": 0.6,
        "legend.frameon": False,
        "lines.markersize": 5,
    }
)


def colour(number: int) -> str:
    """The same colour for the same sequence, graph or part everywhere."""
    return COLOURS[number % len(COLOURS)]


def axes(title: str, width: float = 7.5, height: float = 3.0) -> Axes:
    """Axes of a figure of their own, in inches."""
    _, ax = plt.subplots(figsize=(width, height))
    ax.set_title(title)
    return ax


def lines(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    title: str,
    xlabel: str,
    ylabel: str,
    log: str = "",
) -> Axes:
    """One line for each series over the same x; log: `x`, `y` or `xy` for logarithmic axes."""
    ax = axes(title)
    for label, y in series.items():
        ax.plot(x, y, label=label)
    if "x" in log:
        ax.set_xscale("log", base=2)
        ax.set_xticks(list(x), [f"{value:g}" for value in x])
        ax.minorticks_off()
    if "y" in log:
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.legend()
    return ax


def stacks(rows: Sequence[str], parts: Mapping[str, Sequence[float]], title: str, xlabel: str, unit: str = "") -> Axes:
    """A horizontal bar for each row, made of parts, with its sum at the end."""
    ax = axes(title, height=0.8 + 0.34 * len(rows))
    left = np.zeros(len(rows))
    for i, (label, values) in enumerate(parts.items()):
        ax.barh(rows, values, left=left, label=label, color=colour(i), hatch=HATCHES[i], edgecolor="white")
        left += np.array(values, float)
    for row, total in zip(rows, left, strict=True):
        ax.text(total, row, f" {total:,.3g}{unit}" if total < 1000 else f" {total:,.0f}{unit}", va="center")
    ax.invert_yaxis()
    ax.set(xlabel=xlabel, xlim=(0, 1.15 * left.max()))
    if len(parts) > 1:
        ax.legend(ncols=len(parts), loc="lower left", bbox_to_anchor=(0, 1.0), fontsize=8)
        ax.set_title(title, pad=22)
    return ax


def heat(matrix: Any, rows: Sequence[str], columns: Sequence[str], title: str) -> Axes:
    """A matrix as shades, dark for large, with a label for each row and column."""
    ax = axes(title, width=5.5, height=4.6)
    image = ax.imshow(np.asarray(matrix), cmap="Blues", aspect="equal")
    ax.set_xticks(range(len(columns)), columns, rotation=90, fontsize=8)
    ax.set_yticks(range(len(rows)), rows, fontsize=8)
    ax.figure.colorbar(image, ax=ax, shrink=0.8)
    return ax


def block_grid(blocks: Sequence[Sequence[int | None]], title: str, names: Mapping[int, str], columns: int = 16) -> Axes:
    """The KV cache as rows of blocks; a slot has the colour and the number of the sequence that is in it.

    blocks: for each block the owner of each slot, None where it is empty.
    """
    rows, size = -(-len(blocks) // columns), max(map(len, blocks))
    ax = axes(title, height=0.6 + 0.95 * rows)
    for number, slots in enumerate(blocks):
        x, y = number % columns, -(number // columns) * 1.5
        start = 0
        for owner, run in itertools.groupby(slots):
            height = len(list(run)) / size
            face = PALE if owner is None else colour(owner)
            ax.add_patch(Rectangle((x + 0.05, y - start - height), 0.9, height, fc=face, ec="white", lw=0.5))
            if owner is not None:
                ax.text(x + 0.5, y - start - height / 2, str(owner), ha="center", va="center", fontsize=7)
            start += height
        ax.text(x + 0.5, y + 0.06, str(number), ha="center", va="bottom", fontsize=7)
    ax.set(xlim=(0, columns), ylim=(-1.5 * rows + 0.3, 0.5))
    ax.set_axis_off()
    patches = [Patch(fc=colour(n), label=f"{n}: {name}") for n, name in names.items()]
    handles = [*patches, Patch(fc=PALE, label="empty")]
    ax.legend(handles=handles, ncols=5, loc="upper left", bbox_to_anchor=(0, 0.02), fontsize=8)
    return ax


def pool_map(arena: Arena, owners: Mapping[Address, int], title: str, names: Mapping[int, str]) -> Axes:
    """A pool's segments as bars, as long as they are, and in them the live blocks with the colour of their owner."""
    segments = arena.segments
    ax = axes(title, height=1.0 + 0.36 * len(segments))
    for row, segment in enumerate(segments):
        ax.barh(row, segment.nbytes / MIB, color=PALE, height=0.7)
    for address, nbytes in arena.live.items():
        n = owners[address]
        ax.barh(
            address.segment,
            nbytes / MIB,
            left=address.offset / MIB,
            color=colour(n),
            hatch=HATCHES[n % len(HATCHES)],
            edgecolor="white",
            linewidth=0.5,
            height=0.7,
        )
    ax.set_yticks(range(len(segments)), [f"segment {i}" for i in range(len(segments))])
    ax.invert_yaxis()
    ax.set_xlabel("MiB")
    patches = [
        Patch(fc=colour(n), hatch=HATCHES[n % len(HATCHES)], ec="white", label=name) for n, name in names.items()
    ]
    handles = [*patches, Patch(fc=PALE, label="free")]
    ax.legend(handles=handles, ncols=6, loc="lower left", bbox_to_anchor=(0, 1.0), fontsize=8)
    ax.set_title(title, pad=8 + 14 * -(-len(handles) // 6))
    return ax


def timeline(steps: Sequence[Mapping[str, str]], title: str, kinds: Sequence[str]) -> Axes:
    """Who ran in each step: a row for each name, a cell for each step, coloured by what was done (one of `kinds`)."""
    names = list(dict.fromkeys(name for step in steps for name in step))
    ax = axes(title, height=0.9 + 0.28 * len(names))
    for x, step in enumerate(steps):
        for name, kind in step.items():
            n = kinds.index(kind)
            cell = Rectangle(
                (x, names.index(name) - 0.4), 0.92, 0.8, fc=colour(n), hatch=HATCHES[n], ec="white", lw=0.3
            )
            ax.add_patch(cell)
    ax.set_yticks(range(len(names)), names)
    ax.set(xlim=(0, len(steps)), ylim=(len(names) - 0.4, -0.6), xlabel="step")
    patches = [Patch(fc=colour(i), hatch=HATCHES[i], ec="white", label=kind) for i, kind in enumerate(kinds)]
    ax.legend(handles=patches, ncols=len(kinds), loc="lower left", bbox_to_anchor=(0, 1.0), fontsize=8)
    ax.set_title(title, pad=22)
    return ax
