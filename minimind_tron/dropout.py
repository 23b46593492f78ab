"""Dropout whose masks depend on what is masked, not on who draws them or when.

An element's bit is a function of (seed, step, layer, place, sample in the global batch, position in the sample, channel). So every
mesh drops the same elements, a second forward drops what the first one dropped, and so does a run that is resumed. Philox gives
that for nothing: it is a function from a key and a counter to bits. The key is (seed, step); the counter begins with the position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

# Where in a layer. Numbers from 1: the order of samples is drawn from the same function of (seed, epoch), with 0 there.
Place = Literal["embedding", "attention"]
PLACES: dict[Place, int] = {"embedding": 1, "attention": 2}
# A block of Philox is four words of 64 bits: eight elements of 32.
LANES = 8
WORD = 2**64


@dataclass(frozen=True)
class Noise:
    """The dropout of one training step: an element is dropped with probability ``rate``, the others grow by 1 / (1 - rate)."""

    rate: float
    seed: int
    step: int


@dataclass(frozen=True)
class Tokens:
    """Which tokens a rank's hidden states [s, B, D] belong to: positions in their samples, samples in the global batch."""

    positions: Sequence[int]
    samples: Sequence[int]

    def runs(self) -> list[tuple[int, int]]:
        """The positions as ranges without gaps: first and number."""
        starts = [i for i, p in enumerate(self.positions) if i == 0 or p != self.positions[i - 1] + 1]
        return [(self.positions[i], j - i) for i, j in zip(starts, [*starts[1:], len(self.positions)], strict=True)]


def bits(noise: Noise, layer: int, place: Place, sample: int, first: int, count: int, width: int) -> np.ndarray:
    """Uniform 32-bit numbers of some consecutive positions of a sample.

    Shapes: -> [count, width] uint32. Cost: half a word of 64 bits each.
    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011, as numpy has it.
    """
    blocks = -(-width // LANES)
    key = np.array([noise.seed % WORD, noise.step % WORD], np.uint64)
    counter = np.array([first * blocks, sample, layer, PLACES[place]], np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(count * blocks * LANES // 2)
    return words.astype("<u8", copy=False).view("<u4").reshape(count, blocks * LANES)[:, :width]


def keep_mask(noise: Noise, tokens: Tokens, layer: int, place: Place, width: int) -> Tensor:
    """What stays, the same wherever it is drawn.

    Shapes: -> [s, B, width] bool, on the CPU.
    """
    threshold = np.uint64(round(noise.rate * 2**32))
    samples = [
        np.concatenate([bits(noise, layer, place, sample, first, count, width) for first, count in tokens.runs()])
        for sample in tokens.samples
    ]
    return torch.from_numpy(np.stack(samples, 1) >= threshold)


def drop(x_sBD: Tensor, noise: Noise | None, tokens: Tokens, layer: int, place: Place) -> Tensor:
    """Hidden states with some elements dropped; without noise, themselves.

    Shapes: [s, B, D] -> [s, B, D].
    """
    if noise is None or not noise.rate:
        return x_sBD
    dropped = ~keep_mask(noise, tokens, layer, place, x_sBD.shape[-1]).to(x_sBD.device)
    return x_sBD.masked_fill(dropped, 0.0) / (1 - noise.rate)
