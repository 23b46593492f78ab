"""A decoder block of MiniMind, once, for every mesh: RMSNorm, rotary positions, attention, feed-forward.

Shape letters are those of ``model.py``. Who holds which part of the weights, and who talks at the border of a region, is the affair
of the seams and of ``attend``.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minimind_tron.config import ModelConfig
from minimind_tron.layout import Layout, Storage, live, parameter, wider
from minimind_tron.mesh import Axis
from minimind_tron.parallel import tensor
from minimind_tron.parallel.linear import ColumnLinear, RowLinear, Seams
from minimind_tron.parallel.vocab import wide

# Queries, keys and values of this rank's tokens -> what the queries see. Shapes: [c, B, n, H], [c, B, k, H] twice -> [c, B, n, H].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
# Drops elements of hidden states [s, B, D].
Drop = Callable[[Tensor], Tensor]


class RMSNorm(nn.Module):
    """x / root mean square of x, times a weight; the division runs in the wider of float32 and x's dtype.

    ``parts`` are the axes whose ranks normalise different tokens or heads with this weight.
    """

    def __init__(self, size: int, eps: float, parts: tuple[Axis, ...], storage: Storage) -> None:
        super().__init__()
        self.weight = parameter(Layout((size,), "ones", partial=parts), storage)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(wide(x), (x.shape[-1],), eps=self.eps).to(x.dtype)


def rotary_angles(positions_S: Tensor, width: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position and channel pair; angles in the wider of float32 and the dtype.

    Shapes: positions [S] -> two of [S, 1, 1, H], both halves of H alike.
    """
    angle_dtype = wider(dtype)
    channels = torch.arange(0, width, 2, dtype=angle_dtype, device=positions_S.device)
    angles = torch.outer(positions_S.to(angle_dtype), 1.0 / theta ** (channels / width))
    angles = torch.cat((angles, angles), -1)[:, None, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_SBnH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the channel pairs (i, i + H/2) by the angles of their positions."""
    first, second = x_SBnH.chunk(2, -1)
    return x_SBnH * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    """Grouped-query attention with per-head q/k norms before rotary positions; heads are cut over tp, tokens over cp."""

    def __init__(self, config: ModelConfig, seams: Seams, attend: Attend, storage: Storage) -> None:
        super().__init__()
        D, H, axis = config.hidden_size, config.head_width, seams.axis
        column = partial(ColumnLinear, bias=config.attention_bias, storage=storage)
        row = partial(RowLinear, bias=config.attention_bias, storage=storage)
        kv_parts = tensor.kv_parts(config, axis)
        self.q_proj = column(D, config.num_attention_heads * H, axis)
        self.k_proj = column(D, config.num_key_value_heads * H, axis, parts=kv_parts)
        self.v_proj = column(D, config.num_key_value_heads * H, axis, parts=kv_parts)
        self.o_proj = row(config.num_attention_heads * H, D, axis, outside=seams.outside)
        # Each rank normalises its own heads only, so these gradients are parts under TP as well as under SP.
        self.q_norm = RMSNorm(H, config.rms_norm_eps, live(axis), storage)
        self.k_norm = RMSNorm(H, config.rms_norm_eps, live(axis), storage)
        self.seams, self.attend, self.head_width = seams, attend, H

    def forward(self, x_sBD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        projected = self.seams.columns(x_sBD, (self.q_proj, self.k_proj, self.v_proj), self.seams.axis)
        q_cBnH, k_cBkH, v_cBkH = (y.unflatten(-1, (-1, self.head_width)) for y in projected)
        q_cBnH = rotate(self.q_norm(q_cBnH), cos, sin)
        k_cBkH = rotate(self.k_norm(k_cBkH), cos, sin)
        return self.seams.row(self.attend(q_cBnH, k_cBkH, v_cBkH).flatten(-2), self.o_proj)


class FeedForward(nn.Module):
    """SwiGLU; its width is cut over tp."""

    def __init__(self, config: ModelConfig, seams: Seams, storage: Storage) -> None:
        super().__init__()
        D, width, axis = config.hidden_size, config.ffn_size, seams.axis
        self.gate_proj = ColumnLinear(D, width, axis, storage=storage)
        self.up_proj = ColumnLinear(D, width, axis, storage=storage)
        self.down_proj = RowLinear(width, D, axis, outside=seams.outside, storage=storage)
        self.seams = seams

    def forward(self, x_sBD: Tensor) -> Tensor:
        gate_cBf, up_cBf = self.seams.columns(x_sBD, (self.gate_proj, self.up_proj), self.seams.axis)
        return self.seams.row(F.silu(gate_cBf) * up_cBf, self.down_proj)


class Block(nn.Module):
    """A decoder block: attention and feed-forward, each behind a norm and beside a residual; what attention adds may be dropped."""

    def __init__(self, config: ModelConfig, seams: Seams, attend: Attend, storage: Storage) -> None:
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(D, eps, seams.outside, storage)
        self.self_attn = Attention(config, seams, attend, storage)
        self.post_attention_layernorm = RMSNorm(D, eps, seams.outside, storage)
        self.mlp = FeedForward(config, seams, storage)

    def forward(self, x_sBD: Tensor, cos: Tensor, sin: Tensor, drop: Drop) -> Tensor:
        x_sBD = x_sBD + drop(self.self_attn(self.input_layernorm(x_sBD), cos, sin))
        return x_sBD + self.mlp(self.post_attention_layernorm(x_sBD))
