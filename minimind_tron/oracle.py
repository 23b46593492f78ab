"""Somebody else's dense model as the judge: transformers' Qwen3ForCausalLM, in float64 throughout or as its users run it.

transformers computes RMSNorm, rotary angles and eager softmax in float32 whatever the dtype. For the oracle those islands are
lifted to float64 (unlifted they cost about 4e-8 in the logits); for the noise floor they are left as they are.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minimind_tron.config import ModelConfig, OptimizerConfig
from minimind_tron.dropout import Noise, Place, Tokens, keep_mask
from minimind_tron.interop import hugging_face_config
from minimind_tron.layout import wider
from minimind_tron.parallel.vocab import IGNORED, wide
from minimind_tron.tokens import Batch


class _Norm64(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt())


class _Rotary64(nn.Module):
    def __init__(self, theta: float, width: int) -> None:
        super().__init__()
        self.theta, self.width = theta, width

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, self.width, 2, dtype=torch.float64, device=x.device) / self.width
        angles = position_ids[..., None].double() / self.theta**exponents
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()


def _attention64(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Causal attention written out, so that no fused kernel judges a fused kernel."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * module.scaling
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return (scores.masked_fill(future, -torch.inf).softmax(-1) @ value).transpose(1, 2).contiguous(), None


def _lift(model: Any, config: ModelConfig) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Qwen3RMSNorm):
                setattr(parent, name, _Norm64(child))
    model.model.rotary_emb = _Rotary64(config.rope_theta, config.head_width)


def build_qwen3(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """transformers' Qwen3 with undefined weights; float64 means lifted.

    Cost: the first call imports transformers, some seconds.
    """
    from transformers import AttentionInterface, Qwen3ForCausalLM

    AttentionInterface.register("written_out_float64", _attention64)
    lifted = dtype == torch.float64
    settings = hugging_face_config(config)
    settings._attn_implementation = "written_out_float64" if lifted else "sdpa"
    model: Any = Qwen3ForCausalLM(settings)
    model.to(dtype=dtype, device=device)
    if lifted:
        _lift(model, config)
    return model


def load_qwen3(model: Any, path: Path) -> None:
    """Fill transformers' Qwen3 from a Hugging Face folder or a .pth file, by transformers' own loader where it has one.

    Raises: AssertionError for names that do not match; ``interop`` refuses those first, with a sentence.
    """
    if path.is_dir():
        from transformers import Qwen3ForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        state = Qwen3ForCausalLM.from_pretrained(path, dtype="auto").state_dict()
    else:
        state = torch.load(path, map_location="cpu", weights_only=True)
    wanted = model.state_dict()
    assert wanted.keys() - state.keys() <= {"lm_head.weight"}, f"{path} lacks {sorted(wanted.keys() - state.keys())}"
    model.load_state_dict({name: tensor for name, tensor in state.items() if name in wanted}, strict=False)


class DenseSubject:
    """transformers' model under torch's AdamW: one process, autograd, no code of the parallel side but the bits of dropout.

    The global batch goes through in microbatches, each divided by the global number of valid labels, and their gradients are added
    up in float32 or wider. Updates are made so as well: on ``masters``, which are kept beside the weights, or else read from the
    weights before each update and rounded into them after it. ``shifts`` are added to every element of the named gradients before
    each update: what rounding may do to them, to see what AdamW makes of it.
    """

    def __init__(
        self,
        model: Any,
        optimizer: OptimizerConfig,
        micro_batch_size: int,
        shifts: dict[str, float] | None = None,
        masters: dict[str, Tensor] | None = None,
        dropout: tuple[float, int] = (0.0, 0),
    ) -> None:
        self.shifts = shifts or {}
        self.model, self.micro_batch_size, self.clip_norm = model, micro_batch_size, optimizer.clip_norm
        self.weights: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.mixed = masters is not None
        enough = all(w.dtype == wider(w.dtype) for w in self.weights.values())
        source = {name: w.detach() for name, w in self.weights.items()} if masters is None else masters
        # wide() copies nothing where there is nothing to widen, and then master and weight are one tensor.
        self.masters = self.weights if enough else {name: nn.Parameter(wide(source[name])) for name in self.weights}
        decayed = {"params": [w for w in self.masters.values() if w.dim() >= 2], "weight_decay": optimizer.weight_decay}
        others = {"params": [w for w in self.masters.values() if w.dim() < 2], "weight_decay": 0.0}
        self.adamw = torch.optim.AdamW(
            [decayed, others], lr=optimizer.learning_rate, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.eps
        )
        self.dropout, self.steps_made = dropout, 0
        # While a microbatch is trained on: what is dropped, and which samples it has.
        self.dropping: tuple[Noise, Tokens] | None = None
        if dropout[0]:
            self._drop_after(model.model.embed_tokens, 0, "embedding")
            for number, layer in enumerate(model.model.layers):
                self._drop_after(layer.self_attn.o_proj, number, "attention")

    def _drop_after(self, module: nn.Module, layer: int, place: Place) -> None:
        def dropped(_: Any, __: Any, x_BSD: Tensor) -> Tensor:
            if self.dropping is None:
                return x_BSD
            noise, tokens = self.dropping
            keep_SBD = keep_mask(noise, tokens, layer, place, x_BSD.shape[-1]).to(x_BSD)
            return x_BSD * keep_SBD.transpose(0, 1) / (1 - noise.rate)

        module.register_forward_hook(dropped)

    def _logits(self, ids_BS: Tensor) -> Tensor:
        device = next(iter(self.weights.values())).device
        return self.model(ids_BS.to(device), use_cache=False).logits

    def _shares(self, batch: Batch) -> Iterator[Tensor]:
        """The share of every microbatch in the mean loss."""
        valid = int((batch.labels_BS != IGNORED).sum())
        size = self.micro_batch_size
        pairs = zip(batch.ids_BS.split(size), batch.labels_BS.split(size), strict=True)
        for first, (ids_BS, labels_BS) in zip(range(0, len(batch.ids_BS), size), pairs, strict=True):
            if self.dropping:
                tokens = Tokens(range(ids_BS.shape[1]), range(first, first + len(ids_BS)))
                self.dropping = self.dropping[0], tokens
            logits = wide(self._logits(ids_BS)).flatten(0, 1)
            labels = labels_BS.to(logits.device).flatten()
            yield F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / valid

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """The logits of a batch. Shapes: [B, S, V], on the CPU."""
        return torch.cat([self._logits(ids_BS).cpu() for ids_BS in batch.ids_BS.split(self.micro_batch_size)])

    @torch.no_grad()
    def loss(self, batch: Batch) -> float:
        """The mean loss of a batch."""
        return sum(float(share) for share in self._shares(batch))

    def _backward(self, batch: Batch) -> tuple[dict[str, Tensor], float]:
        """The gradient of every parameter, and the norm of all."""
        self.model.zero_grad()
        sums: dict[str, Tensor] = {}
        rate, seed = self.dropout
        self.dropping = (Noise(rate, seed, self.steps_made), Tokens((), ())) if rate else None
        for share in self._shares(batch):
            share.backward()
            for name, w in self.weights.items():
                if w.grad is not None:
                    sums[name] = sums[name] + w.grad if name in sums else wide(w.grad)
                    w.grad = None
        self.dropping = None
        squares = [gradient.double().square().sum() for gradient in sums.values()]
        return sums, float(torch.stack(squares).sum().sqrt())

    def gradients(self, batch: Batch) -> tuple[dict[str, Tensor], float]:
        """The raw gradient of every parameter, and the norm of all."""
        sums, norm = self._backward(batch)
        return {name: gradient.cpu() for name, gradient in sums.items()}, norm

    @torch.no_grad()
    def step(self, batch: Batch) -> None:
        """One AdamW step, clipped by the global norm."""
        with torch.enable_grad():
            sums, norm = self._backward(batch)
        scale = self.clip_norm / norm if self.clip_norm and norm > self.clip_norm else 1.0
        for name, master in self.masters.items():
            if not self.mixed:
                # To itself, where the weight is wide enough.
                master.copy_(self.weights[name])
            master.grad = (sums[name] + self.shifts.get(name, 0.0)) * scale if name in sums else None
        self.adamw.step()
        self.steps_made += 1
        for name, master in self.masters.items():
            self.weights[name].copy_(master)

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter as it is now."""
        return {name: w.detach().cpu() for name, w in (self.masters if self.mixed else self.weights).items()}
