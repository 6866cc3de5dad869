"""A Llama-style model: RMSNorm, SwiGLU, rotary positions, grouped-query attention, an output layer of its own.

The three projections of attention are one parameter, and so are gate and up of the feed-forward block, as in Megatron:
ALTO's ratio is one for each parameter, so both engines must have the same ones. An export has transformers' Llama, with
each projection by itself (:mod:`.export`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .config.settings import Model

NORM_EPS = 1e-5


class Output(NamedTuple):
    logits: torch.Tensor


class Llama(nn.Module):
    """The whole model."""

    def __init__(self, m: Model, recompute: bool = False) -> None:
        super().__init__()
        self.model = _Decoder(m, recompute)
        self.lm_head = nn.Linear(m.hidden, m.vocabulary, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> Output:
        """Logits of [samples, sequence] token ids.

        Args:
            input_ids: of any integer type.
            attention_mask: [samples, 1, sequence, sequence], True where a token may look; None for all before it.
            position_ids: [samples, sequence]; None to count from 0.
        """
        return Output(self.lm_head(self.model(input_ids, attention_mask, position_ids)))


class _Decoder(nn.Module):
    def __init__(self, m: Model, recompute: bool) -> None:
        super().__init__()
        self._recompute, self._theta, self._head = recompute, m.rope_theta, m.hidden // m.heads
        self.embed_tokens = nn.Embedding(m.vocabulary, m.hidden)
        self.dropout = nn.Dropout(m.dropout)
        self.layers = nn.ModuleList(_Layer(m) for _ in range(m.layers))
        self.norm = nn.RMSNorm(m.hidden, eps=NORM_EPS)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> torch.Tensor:
        x: torch.Tensor = self.dropout(self.embed_tokens(ids))
        if positions is None:
            positions = torch.arange(ids.shape[1], dtype=torch.long, device=ids.device)[None]
        turns = rotations(positions, self._head, self._theta, x.dtype)
        for layer in self.layers:
            if self._recompute and self.training:
                x = checkpoint(layer, x, turns, mask, use_reentrant=False)
            else:
                x = layer(x, turns, mask)
        normed: torch.Tensor = self.norm(x)
        return normed


class _Layer(nn.Module):
    def __init__(self, m: Model) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(m.hidden, eps=NORM_EPS)
        self.self_attn = _Attention(m)
        self.post_attention_layernorm = nn.RMSNorm(m.hidden, eps=NORM_EPS)
        self.mlp = _FeedForward(m)
        self.dropout = nn.Dropout(m.dropout)

    def forward(
        self, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor | None
    ) -> torch.Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), turns, mask))
        after: torch.Tensor = x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return after


class _Attention(nn.Module):
    def __init__(self, m: Model) -> None:
        super().__init__()
        self._head, self._heads, self._kv_heads, self._dropout = m.hidden // m.heads, m.heads, m.groups, m.dropout
        self.qkv_proj = nn.Linear(m.hidden, (m.heads + 2 * m.groups) * self._head, bias=False)
        self.o_proj = nn.Linear(m.hidden, m.hidden, bias=False)

    def forward(
        self, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor | None
    ) -> torch.Tensor:
        by_head = self.qkv_proj(x).unflatten(-1, (-1, self._head)).transpose(1, 2)
        q, k, v = by_head.split((self._heads, self._kv_heads, self._kv_heads), dim=1)
        q, k = rotate(q, *turns), rotate(k, *turns)
        if self._kv_heads != self._heads:
            # Repeated rather than enable_gqa: with a mask, torch has no fused kernel for that.
            k, v = (each.repeat_interleave(self._heads // self._kv_heads, dim=1) for each in (k, v))
        dropout = self._dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None)
        out: torch.Tensor = self.o_proj(seen.transpose(1, 2).flatten(2))
        return out


class _FeedForward(nn.Module):
    def __init__(self, m: Model) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(m.hidden, 2 * m.inner, bias=False)
        self.down_proj = nn.Linear(m.inner, m.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: torch.Tensor = self.down_proj(F.silu(gate) * up)
        return out


def rotations(
    positions: torch.Tensor, head: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of [samples, 1, sequence, head].

    Angles are float32 whatever the model's precision, and are no buffer: engines round those with the weights.
    """
    places = torch.arange(0, head, 2, dtype=torch.float32, device=positions.device)
    angles = positions[:, None, :, None].float() * theta ** (-places / head)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary positions, in the order of transformers and Megatron: the first half of a head pairs with the second."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines
