"""The workloads: the sizes of each model, what its matrices are, its buckets, its storage and its recipe.

Everything here is plain data and arithmetic; no tensor is made. ``kimi-debug`` is the model of the published profile,
``tiny`` the same code at a size that steps in a fraction of a second, ``moonlight-16b`` and ``kimi-k2`` are counted and
planned: decoders with multi-head latent attention and a mixture of experts, as DeepSeek-V3 has them. ``qwen3-8b`` is a
dense decoder with grouped-query attention.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from distmuon.checks import check_whole
from distmuon.names import choose

#: What the recipe hands to DistMuon and to AdamW beside the learning rate. Parameters and gradients are fp32.
LEARNING_RATE = 8e-4
MUON_RECIPE: Mapping[str, Any] = MappingProxyType(
    {"weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust_lr_fn": "match_rms_adamw"}
)
ADAMW_RECIPE: Mapping[str, Any] = MappingProxyType({"weight_decay": 0.1, "betas": (0.9, 0.95)})
MAX_GRAD_NORM = 1.0

#: Sizes that are numbers of features.
_FEATURES = ("width", "dense_hidden", "expert_hidden", "vocabulary")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding with YaRN scaling (Peng et al. 2023, arXiv:2309.00071); ``factor`` 1 is plain RoPE.

    Attributes:
        theta: base of the wavelengths.
        factor: how much longer than ``original_context`` the context shall be.
        original_context: tokens of context before scaling.
        beta_fast: dimensions that turn more often than this over the original context keep their frequency.
        beta_slow: those that turn less often than this are slowed by the whole ``factor``.
    """

    theta: float = 10_000.0
    factor: float = 40.0
    original_context: int = 4_096
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        if self.theta <= 1 or self.factor < 1 or self.original_context < 1 or self.beta_fast < self.beta_slow:
            raise ValueError(f"theta > 1, factor >= 1, context >= 1 and beta_fast >= beta_slow are needed, not {self}")

    @property
    def attention_factor(self) -> float:
        """What YaRN multiplies queries and keys by: ``0.1 ln(factor) + 1``."""
        return 0.1 * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), in features.

    Attributes:
        kv_lora: rank of the joint key and value projection.
        qk_nope: of a head's queries and keys, without position.
        qk_rope: of a head's queries and keys, rotated by position; the key's is shared by all heads.
        v_head: of a head's values.
        q_lora: rank of the query projection; 0 for one plain ``wq``.
    """

    kv_lora: int
    qk_nope: int
    qk_rope: int
    v_head: int
    q_lora: int = 0

    def __post_init__(self) -> None:
        _check_sizes(self, "attention", may_be_0=("q_lora",))
        if self.qk_rope % 2:
            raise ValueError(f"attention: qk_rope is rotated in pairs and must be even, not {self.qk_rope}")

    @property
    def rotated(self) -> int:
        """Features of a head that are rotated by position."""
        return self.qk_rope

    @property
    def row_blocks(self) -> dict[str, int]:
        """Rows of each matrix by parameter name: query and key-value projections are a matrix a head."""
        query = "*.wq_b.weight" if self.q_lora else "*.wq.weight"
        return {query: self.qk_nope + self.qk_rope, "*.wkv_b.weight": self.qk_nope + self.v_head}


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Sizes of grouped-query attention (arXiv:2305.13245) with normalised queries and keys, as Qwen3 has it.

    Attributes:
        kv_heads: heads of keys and values, each for equally many of the queries' heads.
        head: features of a head.
    """

    kv_heads: int
    head: int

    def __post_init__(self) -> None:
        _check_sizes(self, "attention")
        if self.head % 2:
            raise ValueError(f"attention: a head is rotated in pairs and must be even, not {self.head}")

    @property
    def rotated(self) -> int:
        """Features of a head that are rotated by position."""
        return self.head

    @property
    def row_blocks(self) -> dict[str, int]:
        """None: each projection is one matrix."""
        return {}


Attention = LatentAttention | GroupedQueryAttention


def _check_sizes(sizes: Any, where: str, may_be_0: Collection[str] = ()) -> None:
    for field in fields(sizes):
        value, least = getattr(sizes, field.name), 0 if field.name in may_be_0 else 1
        if field.type == "int":
            check_whole(f"{where}: {field.name}", value, least)


def check_ranks(ranks: int, ep: int, replicas: int = 1) -> None:
    """Refuse degrees that do not divide the ranks.

    Raises:
        ValueError: they do not; the message gives those that do.
        TypeError: one is no whole number.
    """
    for name, value in (("ranks", ranks), ("ep", ep), ("replicas", replicas)):
        check_whole(name, value, 1)
    if ranks % replicas:
        raise ValueError(f"ranks={ranks} is not divisible by replicas={replicas}: choose among {_divisors(ranks)}")
    if ranks // replicas % ep:
        each = f"ranks={ranks}" if replicas == 1 else f"ranks={ranks} in replicas={replicas}, {ranks // replicas} each,"
        raise ValueError(f"{each} is not divisible by ep={ep}: choose an ep among {_divisors(ranks // replicas)}")


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@dataclass(frozen=True)
class Layout:
    """How a workload lies on its ranks.

    Attributes:
        ranks: ranks of the job.
        ep: ranks over which the experts are split.
        experts: routed experts of a layer; 0 without any.
        replicas: how many copies of the model there are (HSDP), each over as many neighbouring ranks.
    """

    ranks: int
    ep: int
    experts: int
    replicas: int = 1

    def __post_init__(self) -> None:
        check_ranks(self.ranks, self.ep, self.replicas)
        if self.ep > 1 and not self.experts:
            raise ValueError(f"there are no experts to split: ep must be 1, not {self.ep}")
        if self.experts % self.ep:
            raise ValueError(
                f"experts={self.experts} is not divisible by ep={self.ep}: "
                f"choose an ep among {_divisors(math.gcd(self.shards, self.experts))}"
            )

    @property
    def shards(self) -> int:
        """Ranks of a replica; dense parameters are ``Shard(0)`` over all of them."""
        return self.ranks // self.replicas

    @property
    def efsdp(self) -> int:
        """Ranks over which FSDP shards each expert-parallel slice."""
        return self.shards // self.ep

    @property
    def expert_shard_dim(self) -> int:
        """Dimension of the (E, rows, cols) experts that efsdp shards: 0 while there is an expert for each, else 1."""
        return 0 if self.efsdp <= self.experts // self.ep else 1


@dataclass(frozen=True)
class Workload:
    """Sizes of one model. All are numbers of features unless said otherwise.

    Attributes:
        name: the name it is chosen by.
        width: of the residual stream.
        layers: decoder layers, of which the first ``dense_layers`` have a dense feed-forward and the others experts.
        heads: attention heads, of the queries.
        attention: its kind and its sizes.
        dense_hidden: hidden size of the dense feed-forward.
        vocabulary: token ids.
        default_ranks: ranks of the published set-up.
        default_ep: expert-parallel degree of the published set-up.
        experts: routed experts of a layer; 0 if all layers are dense.
        top_k: experts that a token is sent to.
        expert_hidden: hidden size of one routed expert.
        shared_experts: experts that see every token, as one feed-forward of that many times ``expert_hidden``.
        rope: rotary position embedding.
    """

    name: str
    width: int
    layers: int
    heads: int
    attention: Attention
    dense_hidden: int
    vocabulary: int
    default_ranks: int
    default_ep: int = 1
    experts: int = 0
    top_k: int = 0
    expert_hidden: int = 0
    shared_experts: int = 0
    dense_layers: int = 1
    rope: Rope = Rope()

    def __post_init__(self) -> None:
        where = f"workload {self.name!r}"
        of_experts = () if self.experts else ("experts", "top_k", "expert_hidden", "shared_experts")
        _check_sizes(self, where, may_be_0=("dense_layers", *of_experts))
        if self.dense_layers > self.layers or (not self.experts and self.dense_layers < self.layers):
            raise ValueError(f"{where}: {self.dense_layers} dense layers of {self.layers}, with {self.experts} experts")
        if self.top_k > self.experts:
            raise ValueError(f"{where}: top {self.top_k} of only {self.experts} experts")
        if isinstance(self.attention, GroupedQueryAttention) and self.heads % self.attention.kv_heads:
            raise ValueError(f"{where}: {self.heads} heads can't share {self.attention.kv_heads} of keys and values")
        self.layout(self.default_ranks, self.default_ep)

    @property
    def shared_hidden(self) -> int:
        """Hidden size of the one feed-forward that holds the shared experts."""
        return self.shared_experts * self.expert_hidden

    @property
    def row_blocks(self) -> dict[str, int]:
        """Rows of each matrix by parameter name, of those that hold several."""
        return self.attention.row_blocks

    @property
    def published_buckets(self) -> tuple[tuple[str, ...], ...]:
        """Buckets of two layers each, as in the published profile."""
        return self.layer_buckets(2)

    def layer_buckets(self, layers: int) -> tuple[tuple[str, ...], ...]:
        """Buckets as patterns of parameter names, in order; the first that matches takes the parameter.

        The dense layers, then so many layers at a time; the routed experts of each apart from the rest, as they may
        need no exchange. Without experts so many at a time from the start. Embedding, head and the last norm are in
        none: they are not Muon's.

        Raises:
            ValueError: fewer than one layer.
        """
        if layers < 1:
            raise ValueError(f"a bucket of {layers} layers: give at least 1")
        joined = self.dense_layers if self.experts else 0
        buckets = [tuple(f"layers.{layer}.*" for layer in range(joined))] if joined else []
        for first in range(joined, self.layers, layers):
            members = range(first, min(first + layers, self.layers))
            if self.experts:
                buckets.append(tuple(f"layers.{layer}.moe.experts.*" for layer in members))
            buckets.append(tuple(f"layers.{layer}.*" for layer in members))
        return tuple(buckets)

    def divided(self, divisor: int) -> Workload:
        """The same model with every number of features divided, the vocabulary too; heads, layers and experts stay as
        many as they are.

        Raises:
            ValueError: one of these numbers is not divisible.
        """
        of_attention = {name: size for name, size in vars(self.attention).items() if name != "kv_heads"}
        sizes = {name: getattr(self, name) for name in _FEATURES}
        if odd := [f"{name}={size}" for name, size in (sizes | of_attention).items() if size % divisor]:
            raise ValueError(f"workload {self.name!r} can't be divided by {divisor}: {', '.join(odd)}")
        attention = replace(self.attention, **{name: size // divisor for name, size in of_attention.items()})
        divided = {name: size // divisor for name, size in sizes.items()}
        return replace(self, name=f"{self.name}/{divisor}", attention=attention, **divided)

    def layout(self, ranks: int, ep: int, replicas: int = 1) -> Layout:
        """The layout on ``ranks`` ranks.

        Raises:
            ValueError: the numbers do not divide the ranks, or ``ep`` not the experts.
        """
        return Layout(ranks, ep, self.experts, replicas)


#: By name. YaRN as in DeepSeek-V3 for the debug models, as in Kimi K2 for kimi-k2; the others have plain RoPE.
WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        workload.name: workload
        for workload in (
            Workload(
                name="kimi-debug",
                width=256,
                layers=6,
                heads=16,
                attention=LatentAttention(kv_lora=512, qk_nope=128, qk_rope=64, v_head=128),
                dense_hidden=1_024,
                experts=8,
                top_k=3,
                expert_hidden=256,
                shared_experts=2,
                vocabulary=2_048,
                default_ranks=4,
                default_ep=2,
            ),
            Workload(
                name="tiny",
                width=64,
                layers=3,
                heads=4,
                attention=LatentAttention(kv_lora=32, qk_nope=16, qk_rope=8, v_head=16),
                dense_hidden=128,
                experts=4,
                top_k=2,
                expert_hidden=32,
                shared_experts=2,
                vocabulary=256,
                default_ranks=4,
                default_ep=2,
            ),
            Workload(
                name="moonlight-16b",
                width=2_048,
                layers=27,
                heads=16,
                attention=LatentAttention(kv_lora=512, qk_nope=128, qk_rope=64, v_head=128),
                dense_hidden=11_264,
                experts=64,
                top_k=6,
                expert_hidden=1_408,
                shared_experts=2,
                vocabulary=163_840,
                default_ranks=8,
                default_ep=4,
                rope=Rope(theta=50_000.0, factor=1.0, original_context=8_192),
            ),
            Workload(
                name="kimi-k2",
                width=7_168,
                layers=61,
                heads=64,
                attention=LatentAttention(kv_lora=512, qk_nope=128, qk_rope=64, v_head=128, q_lora=1_536),
                dense_hidden=18_432,
                experts=384,
                top_k=8,
                expert_hidden=2_048,
                shared_experts=1,
                vocabulary=163_840,
                default_ranks=1_024,
                default_ep=64,
                rope=Rope(theta=50_000.0, factor=32.0, beta_fast=1.0),
            ),
            Workload(
                name="qwen3-8b",
                width=4_096,
                layers=36,
                heads=32,
                attention=GroupedQueryAttention(kv_heads=8, head=128),
                dense_hidden=12_288,
                vocabulary=151_936,
                default_ranks=8,
                dense_layers=36,
                rope=Rope(theta=1_000_000.0, factor=1.0, original_context=32_768),
            ),
        )
    }
)


def get_workload(name: str) -> Workload:
    """The workload of that name; ``kimi-debug/2`` is ``kimi-debug`` with every number of features halved.

    Raises:
        ValueError: there is none; the message gives the nearest name and all of them. Or it can't be divided so.
    """
    base, divided, divisor = name.partition("/") if isinstance(name, str) else (name, "", "")
    workload = WORKLOADS[choose("workload", base, WORKLOADS)]
    if not divided:
        return workload
    if not divisor.isdecimal() or int(divisor) < 1:
        raise ValueError(f"workload {name!r}: write a whole number after the stroke, as in {base}/2")
    return workload.divided(int(divisor))
