"""Every plot, from records that runs wrote."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Smoothed over this share of the curve: wide enough to calm single batches, short enough to keep the shape.
SMOOTHED_SHARE = 0.08


@dataclass
class Curve:
    """What a metrics file says about losses, all in nats a byte: (step, loss) points and horizontal references by name."""

    training: list[tuple[int, float]] = field(default_factory=list)
    heldout: list[tuple[int, float]] = field(default_factory=list)
    references: dict[str, float] = field(default_factory=dict)


def read_curve(metrics: Path) -> Curve:
    """The losses in a metrics file; training losses, which are per token, are divided by the held-out text's bytes a token."""
    curve, bytes_per_token = Curve(), 1.0
    for line in metrics.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "bytes_per_token" in record:
            bytes_per_token = record["bytes_per_token"]
            curve.references = {"uniform": record["uniform"], "byte frequencies alone": record["byte_unigram"]}
        elif "heldout_nats_per_byte" in record:
            curve.heldout.append((record["step"], record["heldout_nats_per_byte"]))
        elif "loss" in record:
            curve.training.append((record["step"], record["loss"] / bytes_per_token))
    return curve


def smoothed(values: Sequence[float], share: float = SMOOTHED_SHARE) -> list[float]:
    """Centred moving average; at both ends the window shrinks evenly, so that neither end is pulled up or down."""
    reach = max(1, round(len(values) * share / 2))
    averages = []
    for i in range(len(values)):
        near = min(reach, i, len(values) - 1 - i)
        window = values[i - near : i + near + 1]
        averages.append(sum(window) / len(window))
    return averages


def loss_curve(metrics: Path, png: Path) -> None:
    """Draw training and held-out loss over optimizer steps, with what a model without knowledge has.

    Told apart by lightness, markers and words, not by hue: the picture survives a black-and-white printer.
    """
    from matplotlib.figure import Figure

    curve = read_curve(metrics)
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.add_subplot()
    _draw_references(axes, curve)
    _draw_losses(axes, curve)
    last = max((step for step, _ in curve.training + curve.heldout), default=1)
    axes.set_xlim(0, last * 1.02)
    axes.set_ylim(0, 1.06 * max([*curve.references.values(), *(loss for _, loss in curve.training + curve.heldout)], default=1.0))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per byte)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 0.9))
    figure.savefig(png, dpi=160)


def _draw_references(axes: Any, curve: Curve) -> None:
    for name, value in curve.references.items():
        axes.axhline(value, color="0.45", linewidth=1.0, linestyle=(0, (1, 2)))
        place = {"xy": (1, value), "xycoords": ("axes fraction", "data"), "xytext": (-2, 3), "textcoords": "offset points"}
        axes.annotate(f"{name} {value:.2f}", **place, ha="right", va="bottom", color="0.35", fontsize=9)


def _draw_losses(axes: Any, curve: Curve) -> None:
    if curve.training:
        steps, losses = zip(*curve.training, strict=True)
        axes.plot(steps, losses, color="0.78", linewidth=0.9, label="training, single batches")
        axes.plot(steps, smoothed(losses), color="black", linewidth=1.6, label="training, smoothed")
    if curve.heldout:
        steps, losses = zip(*curve.heldout, strict=True)
        style = {"marker": "o", "markersize": 6, "markerfacecolor": "white", "markeredgewidth": 1.6, "linestyle": "--"}
        axes.plot(steps, losses, color="#c0392b", linewidth=1.2, label="held out", **style)
        place = {"xy": (steps[-1], losses[-1]), "xytext": (4, 12), "textcoords": "offset points"}
        axes.annotate(f"{losses[-1]:.2f}", **place, ha="right", va="bottom", color="#c0392b", fontsize=10, fontweight="bold")
