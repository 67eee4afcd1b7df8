"""Attention of the decoder, in the kinds that the workloads have, and rotary positions with YaRN.

Shapes in comments: B sequences, T tokens, D width, H heads.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distmuon.workloads import config
from distmuon.workloads.config import Rope, Workload


def make_attention(workload: Workload) -> LatentAttention | GroupedQueryAttention:
    """The attention of one layer."""
    sizes = workload.attention
    if isinstance(sizes, config.LatentAttention):
        return LatentAttention(workload.width, workload.heads, sizes, workload.rope)
    return GroupedQueryAttention(workload.width, workload.heads, sizes, workload.rope)


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values come from a small latent vector."""

    def __init__(self, width: int, heads: int, sizes: config.LatentAttention, rope: Rope) -> None:
        super().__init__()
        self.heads, self.sizes, self.rope = heads, sizes, rope
        queries = heads * (sizes.qk_nope + sizes.qk_rope)
        if sizes.q_lora:
            self.wq_a = nn.Linear(width, sizes.q_lora, bias=False)
            self.q_norm = nn.RMSNorm(sizes.q_lora)
            self.wq_b = nn.Linear(sizes.q_lora, queries, bias=False)
        else:
            self.wq = nn.Linear(width, queries, bias=False)
        self.wkv_a = nn.Linear(width, sizes.kv_lora + sizes.qk_rope, bias=False)
        self.kv_norm = nn.RMSNorm(sizes.kv_lora)
        self.wkv_b = nn.Linear(sizes.kv_lora, heads * (sizes.qk_nope + sizes.v_head), bias=False)
        self.wo = nn.Linear(heads * sizes.v_head, width, bias=False)

    def forward(self, hidden: Tensor, rotation: Tensor) -> Tensor:
        """(B, T, D) and the rotary table to (B, T, D); no token sees a later one."""
        sizes = self.sizes
        query = self.wq_b(self.q_norm(self.wq_a(hidden))) if sizes.q_lora else self.wq(hidden)
        query = query.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, nope + rope)
        query_nope, query_rope = query.split([sizes.qk_nope, sizes.qk_rope], dim=-1)
        latent, key_rope = self.wkv_a(hidden).split([sizes.kv_lora, sizes.qk_rope], dim=-1)
        key_value = self.wkv_b(self.kv_norm(latent)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key_nope, value = key_value.split([sizes.qk_nope, sizes.v_head], dim=-1)
        key_rope = rotate(key_rope.unsqueeze(1), rotation).expand(-1, self.heads, -1, -1)  # one for all heads
        query = torch.cat([query_nope, rotate(query_rope, rotation)], dim=-1)
        key = torch.cat([key_nope, key_rope], dim=-1)
        scale = self.rope.attention_factor**2 / math.sqrt(sizes.qk_nope + sizes.qk_rope)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)  # (B, H, T, v)
        return self.wo(mixed.transpose(1, 2).flatten(-2))


class GroupedQueryAttention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245): several heads of queries share one of keys and values.

    Queries and keys are normalised head by head, as in Qwen3 (arXiv:2505.09388).
    """

    def __init__(self, width: int, heads: int, sizes: config.GroupedQueryAttention, rope: Rope) -> None:
        super().__init__()
        self.sizes, self.rope = sizes, rope
        self.wq = nn.Linear(width, heads * sizes.head, bias=False)
        self.wk = nn.Linear(width, sizes.kv_heads * sizes.head, bias=False)
        self.wv = nn.Linear(width, sizes.kv_heads * sizes.head, bias=False)
        self.q_norm = nn.RMSNorm(sizes.head)
        self.k_norm = nn.RMSNorm(sizes.head)
        self.wo = nn.Linear(heads * sizes.head, width, bias=False)

    def forward(self, hidden: Tensor, rotation: Tensor) -> Tensor:
        """(B, T, D) and the rotary table to (B, T, D); no token sees a later one."""
        projected = (project(hidden).unflatten(-1, (-1, self.sizes.head)) for project in (self.wq, self.wk, self.wv))
        query, key, value = projected  # (B, T, heads, head)
        query, key = (rotate(x.transpose(1, 2), rotation) for x in (self.q_norm(query), self.k_norm(key)))
        scale = self.rope.attention_factor**2 / math.sqrt(self.sizes.head)
        mixed = F.scaled_dot_product_attention(
            query, key, value.transpose(1, 2), is_causal=True, scale=scale, enable_gqa=True
        )  # (B, H, T, head)
        return self.wo(mixed.transpose(1, 2).flatten(-2))


def rotary_frequencies(rope: Rope, features: int) -> list[float]:
    """Radians a token by which each of ``features / 2`` pairs turns, slowed as YaRN does.

    Fast pairs keep their frequency, slow ones are divided by ``rope.factor``, and a linear ramp lies between.
    """

    def pair_that_turns(times: float) -> float:
        wavelength = rope.original_context / (times * 2 * math.pi)
        return features * math.log(wavelength) / (2 * math.log(rope.theta))

    first = max(math.floor(pair_that_turns(rope.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(rope.beta_slow)), features - 1)
    frequencies = []
    for pair in range(features // 2):
        frequency = rope.theta ** (-2 * pair / features)
        slowed = min(max((pair - first) / max(last - first, 1e-3), 0.0), 1.0)
        frequencies.append(frequency * (1 - slowed) + frequency / rope.factor * slowed)
    return frequencies


def rotary_table(rope: Rope, features: int, tokens: int, device: torch.device) -> Tensor:
    """(2, tokens, features / 2): cosines and sines of the angle of each pair at each position."""
    frequencies = torch.tensor(rotary_frequencies(rope, features), device=device, dtype=torch.float32)
    angles = torch.arange(tokens, device=device, dtype=torch.float32).outer(frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn the pairs (first half, second half) of the last dimension of ``x`` (..., T, features) by their angles."""
    cosine, sine = rotation.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)
