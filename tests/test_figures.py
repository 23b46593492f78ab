"""The loss curve: read right from metrics, smoothed without a bias, drawn as an image."""

import json
from pathlib import Path

import matplotlib.image
import pytest

from minimind_tron.figures import loss_curve, read_curve, smoothed


def write_metrics(path: Path, factor: float = 1.0) -> Path:
    records: list[dict[str, float | str]] = [{"bytes_per_token": 2.0, "uniform": 5.5, "byte_unigram": 3.1}]
    records += [{"step": step, "loss": factor * 10 / step, "gradient_norm": 1.0} for step in range(1, 41)]
    records += [{"step": 7, "skipped": "no valid label"}]
    records += [{"step": step, "heldout_loss": 2.0, "heldout_nats_per_byte": 1.0} for step in (20, 40)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_curve_is_in_nats_a_byte(tmp_path: Path) -> None:
    curve = read_curve(write_metrics(tmp_path / "metrics.jsonl"))
    assert curve.training == [(step, 10 / step / 2.0) for step in range(1, 41)]
    assert curve.heldout == [(20, 1.0), (40, 1.0)]
    assert list(curve.references.values()) == [5.5, 3.1]


def test_png_is_an_image_of_these_metrics(tmp_path: Path) -> None:
    pictures = []
    for factor in (1.0, 0.5):
        png = tmp_path / f"{factor}.png"
        loss_curve(write_metrics(tmp_path / "metrics.jsonl", factor), png)
        pictures.append(matplotlib.image.imread(png, format="png"))
    height, width, _ = pictures[0].shape
    assert height >= 500
    assert width >= 1000
    inked = (pictures[0][..., :3].min(-1) < 0.5).mean()
    assert 0.005 < inked < 0.3, "neither blank nor black"
    assert pictures[0].shape != pictures[1].shape or (pictures[0] != pictures[1]).any(), "other metrics, other picture"


@pytest.mark.parametrize("lines", ["", '{"step": 1, "loss": 2.5}\n'], ids=["empty", "one step"])
def test_png_of_next_to_nothing(tmp_path: Path, lines: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(lines)
    loss_curve(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_smoothing_keeps_a_line_and_calms_noise() -> None:
    line = [3.0 - 0.01 * i for i in range(200)]
    assert smoothed(line) == pytest.approx(line)
    noisy = [value + (0.5 if i % 2 else -0.5) for i, value in enumerate(line)]
    calm = smoothed(noisy)[10:-10]
    assert max(abs(a - b) for a, b in zip(calm, line[10:-10], strict=True)) < 0.1
    assert smoothed([1.0]) == [1.0]
    assert smoothed([]) == []
