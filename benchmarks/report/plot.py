"""Draw the last forward benchmark, a roofline and the speed compared with others, and the random calls of `cliffs`.

    python -m benchmarks.report.plot [--results DIR] [--out docs/images]

The SVGs store text as text and follow the reader's color scheme. Viewers without color schemes show dark on a white
card. The colors are from Okabe and Ito, and every contender has a different marker.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import textwrap
from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

from .tables import (
    COLUMNS,
    OURS,
    RESULTS,
    ROOT,
    best_peer,
    load,
    machine,
    timed,
)

IMAGES = ROOT / "docs" / "images"
INK, CARD, GRID = "#1f2328", "#ffffff", "#d1d9e0"
STEP = 1.15  # factor between neighbors of equal intensity
TITLE_COLUMNS = 95  # characters of a title line that fit the width of a figure
# NVIDIA's data sheet: 132 SMs x 4,096 bf16 operations per clock x 1.83 GHz.
PEAK_TFLOPS = {"NVIDIA H200": 989, "NVIDIA H100 80GB HBM3": 989}
DARK = {INK: "#e6edf3", CARD: "#0d1117", GRID: "#3d444d"}
MARKERS = (("#0072b2", "o"), ("#d55e00", "s"), ("#009e73", "^"), ("#cc79a7", "D"), ("#e69f00", "v"))
STYLE = dict(zip(COLUMNS, MARKERS, strict=True))
CALL_COLORS = {"bfloat16": "#0072b2", "float16": "#56b4e9", "float32": "#d55e00", "tf32": "#e69f00"}
CALL_MARKERS = {  # an option that starts with a key has its marker
    "plain": "o",
    "weighted": "p",
    "prefix": "s",
    "holes": "H",
    "argmax": "^",
    "normalize": "D",
    "step": "P",
    "candidates": "v",
    "packed": "<",
    "soft": "h",
    "hidden": "*",
    "": "X",
}
RC = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lik_ops",  # keeps identifiers stable between runs
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "figure.facecolor": CARD,
    "axes.facecolor": CARD,
    "savefig.facecolor": CARD,
}


def digest(results: Path = RESULTS, name: str = "forward.json") -> str:
    """Return an identifier of the result that a picture was drawn from."""
    return f"{name} " + hashlib.sha256((results / name).read_bytes()).hexdigest()[:16]


def save(figure: Figure, path: Path, results: Path, name: str = "forward.json") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Description": digest(results, name)})
    plt.close(figure)
    rules = "".join(
        f'[style*="{kind}: {light}"]{{{kind}:{dark} !important}}'
        for light, dark in DARK.items()
        for kind in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>\n</svg>"
    path.write_text(path.read_text().replace("</svg>", style))
    return path


def drawn(document: dict) -> list[dict]:
    """Return the records of the roofline: the shapes with a goal or with candidates, without variants."""
    records = [r for r in document["records"] if timed(r) and (r["case"]["goal_ms"] or r["case"]["candidates"])]
    return sorted(records, key=lambda r: r["operations"] / r["bytes"])


def spread(intensities: list[float]) -> Iterator[float]:
    """Yield x positions that draw cases of nearly equal intensity next to each other, around their average."""
    groups: list[list[float]] = []
    for x in sorted(intensities):
        if groups and x < groups[-1][0] * STEP:
            groups[-1].append(x)
        else:
            groups.append([x])
    for group in groups:
        yield from (group[0] * STEP ** (i - (len(group) - 1) / 2) for i in range(len(group)))


def widest_gap(xs: list[float]) -> float:
    """Return the middle of the widest gap between neighbors on a logarithmic axis."""
    a, b = max(itertools.pairwise(sorted(xs)), key=lambda pair: pair[1] / pair[0])
    return math.sqrt(a * b)


def draw_rates(axes: Axes, ceilings: dict, gpu: str, xs: list[float]) -> None:
    """Draw the two measured rates and the peak of the GPU's data sheet.

    The rates are references, not bounds, because the matrix product of cuBLAS runs at a different clock. Their labels
    avoid the cases, which are at `xs`.
    """
    left, right = axes.get_xlim()
    ridge = ceilings["tflops"] * 1e3 / ceilings["gbs"]
    axes.plot([left, ridge, right], [left * ceilings["gbs"] / 1e3, ceilings["tflops"], ceilings["tflops"]], color=INK)
    at = widest_gap([ridge, *(x for x in xs if x > ridge), right])
    axes.text(
        at, ceilings["tflops"] / 1.05, f"{ceilings['tflops']:.0f} TFLOP/s, cuBLAS", ha="center", va="top", fontsize=9
    )
    if peak := PEAK_TFLOPS.get(gpu):
        axes.plot([peak * 1e3 / ceilings["gbs"], right], [peak, peak], color=INK, lw=1, ls="--")
        axes.text(at, peak * 1.04, f"{peak} TFLOP/s, data sheet", ha="center", va="bottom", fontsize=9)
    start, end = axes.transData.transform([(x, x * ceilings["gbs"] / 1e3) for x in (left, ridge)])
    angle = math.degrees(math.atan2(end[1] - start[1], end[0] - start[0]))
    at = (math.sqrt(left * ridge), math.sqrt(left * ridge) * ceilings["gbs"] / 1e3 * 1.12)
    style = {"rotation": angle, "rotation_mode": "anchor", "ha": "center", "va": "bottom", "fontsize": 9}
    axes.text(*at, f"{ceilings['gbs']:.0f} GB/s, read", **style)


def draw_case(axes: Axes, record: dict, x: float) -> None:
    """Draw the contenders of a case and the measured rate at its intensity on one line, named below."""
    found = {n: record["contenders"][n]["tflops"] for n in STYLE if n in timed(record)}
    ceiling = record["operations"] / record["floor_ms"] / 1e9
    axes.plot([x, x], [min(found.values()), ceiling], color=GRID, lw=2, zorder=1)
    axes.scatter(x, ceiling, s=90, color=INK, marker="_", zorder=2)
    for name, y in found.items():
        color, marker = STYLE[name]
        axes.scatter(x, y, s=70 if name == OURS else 34, color=color, marker=marker, zorder=3, linewidths=0)
    below = min(found.values()) / 1.12
    axes.text(x, below, record["case"]["name"], rotation=90, ha="center", va="top", fontsize=8)


def roofline(results: Path = RESULTS, out: Path = IMAGES) -> Path:
    """Draw each case next to the rates measured in its run."""
    document = load("forward", results)
    records, ceilings = drawn(document), document["settings"]["ceilings"]
    intensities = [r["operations"] / r["bytes"] for r in records]
    low = min(r["contenders"][n]["tflops"] for r in records for n in timed(r))
    with plt.rc_context(RC):
        figure, axes = plt.subplots(figsize=(9, 5.6), layout="constrained")
        axes.set(xscale="log", yscale="log", xlabel="operations / byte", ylabel="TFLOP/s")
        axes.set(xlim=(min(intensities) / 2, max(intensities) * 1.6), ylim=(low / 2.6, ceilings["tflops"] * 1.6))
        ticks(axes.xaxis, axes.get_xlim())
        ticks(axes.yaxis, axes.get_ylim())
        xs = list(spread(intensities))
        for record, x in zip(records, xs, strict=True):
            draw_case(axes, record, x)
        axes.grid(True, which="major", lw=0.5)
        axes.set_axisbelow(True)
        for name, (color, marker) in STYLE.items():
            if any(name in timed(record) for record in records):
                axes.scatter([], [], color=color, marker=marker, label=name)
        axes.scatter([], [], s=90, color=INK, marker="_", label="measured rate")
        figure.legend(loc="outside lower center", ncols=6, fontsize=9, frameon=False)
        shown = [record["case"]["name"] for record in records]
        draw_title(figure, f"MaxSim forward, {machine(document, cases=shown)}")
        figure.canvas.draw()  # compute the layout, which sets the angle of the slanted roof
        draw_rates(axes, ceilings, document["environment"]["gpus"][0], xs)
        return save(figure, out / "forward-roofline.svg", results)


def draw_title(figure: Figure, text: str) -> None:
    """Draw a title over the whole width of a figure, in as many lines as it needs."""
    figure.suptitle(textwrap.fill(text, TITLE_COLUMNS), fontsize=10)


def ticks(axis: Axis, limits: tuple[float, float]) -> None:
    """Set ticks at 1, 2 and 5 of every decade, in plain notation."""
    decades = range(math.floor(math.log10(limits[0])), math.ceil(math.log10(limits[1])))
    values = [m * 10**e for e in decades for m in (1, 2, 5) if limits[0] <= m * 10**e <= limits[1]]
    axis.set_ticks(values, [f"{v:g}" for v in values])
    axis.set_ticks([], minor=True)


def speed(results: Path = RESULTS, out: Path = IMAGES) -> Path:
    """Draw how many times faster each case is than with the fastest other contender."""
    document = load("forward", results)
    found = [(r["case"]["name"], best_peer(r), timed(r).get(OURS)) for r in document["records"]]
    bars = [(name, peer[0], peer[1] / ours) for name, peer, ours in found if peer and ours]
    with plt.rc_context(RC):
        figure, axes = plt.subplots(figsize=(9, 1.2 + 0.27 * len(bars)), layout="constrained")
        rows = range(len(bars))
        colors = [STYLE[peer][0] for _, peer, _ in bars]
        axes.barh(rows, [ratio - 1 for *_, ratio in bars], left=1, color=colors, height=0.7)
        for row, (_, _, ratio) in enumerate(bars):
            axes.text(max(ratio, 1) * 1.02, row, f"{ratio:.2f}", va="center", fontsize=8)
        axes.axvline(1, color=INK, lw=1)
        ratios = [ratio for *_, ratio in bars]
        ends = (min(0.8, min(ratios) / 1.1), max(ratios) * 1.15)
        marks = [t for t in (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12) if ends[0] <= t <= ends[1]]
        axes.set(xscale="log", xlim=ends, ylim=(len(bars) - 0.4, -0.6))
        axes.set_xticks(marks, [f"{t:g}x" for t in marks])
        axes.set_xticks([], minor=True)
        axes.set_yticks(rows, [name for name, *_ in bars], fontsize=8)
        axes.grid(True, axis="x", lw=0.5)
        axes.set_axisbelow(True)
        for name, (color, _) in itertools.islice(STYLE.items(), 1, None):
            if any(peer == name for _, peer, _ in bars):
                axes.barh(math.nan, math.nan, color=color, label=name)
        legend = {"title": "fastest other contender", "title_fontsize": 9}
        figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False, **legend)
        draw_title(figure, f"lik_ops compared with the fastest other contender, {machine(document)}")
        return save(figure, out / "forward-speed.svg", results)


def cliffs(results: Path = RESULTS, out: Path = IMAGES) -> Path:
    """Draw the time over the floor of each random call."""
    document = load("cliffs", results)
    calls = [call for call in document["calls"] if "ratio" in call]
    groups: dict[tuple[str, str], list[dict]] = {}
    for call in calls:
        option = next(name for name in CALL_MARKERS if call["option"].startswith(name))
        groups.setdefault((option, call["dtype"]), []).append(call)
    with plt.rc_context(RC):
        figure, axes = plt.subplots(figsize=(9, 5.6), layout="constrained")
        for (option, dtype), own in groups.items():
            at = [call["floor_ms"] for call in own], [call["ratio"] for call in own]
            axes.scatter(*at, s=16, color=CALL_COLORS[dtype], marker=CALL_MARKERS[option], alpha=0.7, linewidths=0)
        axes.set(xscale="log", yscale="log", xlabel="floor, ms", ylabel="time / floor")
        axes.axhline(1, color=INK, lw=1)
        ticks(axes.xaxis, axes.get_xlim())
        ticks(axes.yaxis, axes.get_ylim())
        axes.grid(True, which="major", lw=0.5)
        axes.set_axisbelow(True)
        for dtype, color in CALL_COLORS.items():
            axes.scatter([], [], color=color, marker="o", label=dtype)
        for option in dict.fromkeys(option for option, _ in sorted(groups)):
            axes.scatter([], [], color=INK, marker=CALL_MARKERS[option], label=option or "quantized")
        figure.legend(loc="outside lower center", ncols=8, fontsize=9, frameon=False)
        draw_title(figure, f"{len(calls)} random calls, time over floor, {machine(document)}")
        return save(figure, out / "cliffs.svg", results, "cliffs.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of forward.json and cliffs.json")
    parser.add_argument("--out", type=Path, default=IMAGES, help="output folder (default docs/images)")
    args = parser.parse_args()
    pictures = (roofline, speed, cliffs) if (args.results / "cliffs.json").exists() else (roofline, speed)
    for picture in pictures:
        print("wrote", picture(args.results, args.out))


if __name__ == "__main__":
    main()
