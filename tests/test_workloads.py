"""The workloads on one process: sizes, names, layouts, the decoder against plain references, and the text."""

from __future__ import annotations

import math
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch
import torch.nn.functional as F

from distmuon.routing import split_parameters
from distmuon.workloads import WORKLOADS, get_workload
from distmuon.workloads.attention import (
    GroupedQueryAttention,
    LatentAttention,
    make_attention,
    rotary_frequencies,
    rotary_table,
    rotate,
)
from distmuon.workloads.config import Rope
from distmuon.workloads.model import MoE, build_model, initialize
from distmuon.workloads.parallel import make_meshes
from distmuon.workloads.storage import plan_for
from distmuon.workloads.text import standard_library

TINY = get_workload("tiny")
GROUPED = get_workload("qwen3-8b/32")

ATTENTION = {
    "attention.wq.weight": (3072, 256),
    "attention.wkv_a.weight": (576, 256),
    "attention.wkv_b.weight": (4096, 512),
    "attention.wo.weight": (256, 2048),
}
DENSE = {
    "feed_forward.w1.weight": (1024, 256),
    "feed_forward.w2.weight": (256, 1024),
    "feed_forward.w3.weight": (1024, 256),
}
EXPERTS = {
    "moe.experts.w1": (8, 256, 256),
    "moe.experts.w2": (8, 256, 256),
    "moe.experts.w3": (8, 256, 256),
    "moe.router.gate.weight": (8, 256),
    "moe.shared_experts.w1.weight": (512, 256),
    "moe.shared_experts.w2.weight": (256, 512),
    "moe.shared_experts.w3.weight": (512, 256),
}


def routed(name: str) -> dict[str, tuple[tuple[int, ...], int]]:
    """Shape and matrices of each of a workload's Muon parameters."""
    workload = get_workload(name)
    table = split_parameters(build_model(workload, "meta"), row_blocks=workload.row_blocks).table
    return {row.name: (row.shape, row.matrices) for row in table if row.optimizer == "Muon"}


def test_kimi_debug_has_the_published_matrices():
    expected = {}
    for layer in range(6):
        for name, shape in (ATTENTION | (EXPERTS if layer else DENSE)).items():
            matrices = (
                16 if name in ("attention.wq.weight", "attention.wkv_b.weight") else 8 if ".experts." in name else 1
            )
            expected[f"layers.{layer}.{name}"] = (shape, matrices)
    assert routed("kimi-debug") == expected


def test_moonlight_gathers_161_matrices():
    assert sum(matrices == 1 for _, matrices in routed("moonlight-16b").values()) == 161


def test_kimi_k2_has_a_trillion_parameters_and_allocates_none():
    model = build_model(get_workload("kimi-k2"), "meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(1.026e12, rel=1e-3)
    muon = routed("kimi-k2")
    assert sum(matrices for _, matrices in muon.values()) == 77_354
    assert muon["layers.0.attention.wq_a.weight"] == ((1536, 7168), 1)
    assert muon["layers.60.attention.wq_b.weight"] == ((12288, 1536), 64)


def test_qwen3_8b_has_whole_matrices_and_no_experts():
    model = build_model(get_workload("qwen3-8b"), "meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(8.19e9, rel=1e-3)
    layer = {
        "attention.wq.weight": (4096, 4096),
        "attention.wk.weight": (1024, 4096),
        "attention.wv.weight": (1024, 4096),
        "attention.wo.weight": (4096, 4096),
        "feed_forward.w1.weight": (12288, 4096),
        "feed_forward.w2.weight": (4096, 12288),
        "feed_forward.w3.weight": (12288, 4096),
    }
    expected = {f"layers.{n}.{name}": (shape, 1) for n in range(36) for name, shape in layer.items()}
    assert routed("qwen3-8b") == expected


@pytest.mark.parametrize("ranks", [8, 64])
def test_qwen3_8b_is_planned_without_experts(ranks):
    plan = plan_for("qwen3-8b", ranks=ranks, rank=ranks - 1)
    assert [stage.name for stage in plan.stages] == [f"{n} layers.{2 * n}.* +1" for n in range(18)]
    assert sum(len(stage.exchange.matrices) for stage in plan.stages) == 36 * 7
    with pytest.raises(ValueError, match="there are no experts to split: ep must be 1, not 2"):
        plan_for("qwen3-8b", ranks=ranks, ep=2)


@pytest.mark.parametrize("name", WORKLOADS)
def test_published_buckets_take_layers_in_order_and_experts_apart(name):
    buckets = get_workload(name).published_buckets
    members = [[] for _ in buckets]
    for parameter in routed(name):
        members[next(n for n, bucket in enumerate(buckets) if any(fnmatchcase(parameter, p) for p in bucket))].append(
            parameter
        )
    assert all(members)
    for bucket in members:
        assert len({".moe.experts." in parameter for parameter in bucket}) == 1
        assert name != "qwen3-8b" or len({parameter.split(".")[1] for parameter in bucket}) == 2
    layers = [sorted({int(parameter.split(".")[1]) for parameter in bucket}) for bucket in members]
    assert layers == sorted(layers)
    if name == "kimi-debug":
        assert layers == [[0], [1, 2], [1, 2], [3, 4], [3, 4], [5], [5]]


def test_unknown_workload_names_the_nearest():
    with pytest.raises(ValueError, match="unknown workload 'kimi-debgu'; did you mean 'kimi-debug'"):
        get_workload("kimi-debgu")


def test_sizes_that_do_not_fit_are_refused():
    for changes, message in (
        ({"width": 0}, "width is 0: give a whole number of at least 1"),
        ({"dense_layers": 9}, "9 dense layers of 3"),
        ({"experts": 0}, "1 dense layers of 3, with 0 experts"),
        ({"top_k": 5}, "top 5 of only 4 experts"),
        ({"shared_experts": 0}, "shared_experts is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(TINY, **changes)
    for attention, changes, message in (
        (TINY.attention, {"qk_rope": 7}, "even, not 7"),
        (TINY.attention, {"kv_lora": 0}, "kv_lora is 0: give a whole number of at least 1"),
        (GROUPED.attention, {"head": 3}, "even, not 3"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(attention, **changes)
    with pytest.raises(ValueError, match="32 heads can't share 7 of keys and values"):
        replace(GROUPED, attention=replace(GROUPED.attention, kv_heads=7))
    with pytest.raises(ValueError, match="factor >= 1"):
        Rope(factor=0.5)


def test_ranks_not_divisible_by_ep_are_refused():
    with pytest.raises(ValueError, match=r"ranks=6 is not divisible by ep=4: choose an ep among \[1, 2, 3, 6\]"):
        get_workload("kimi-debug").layout(6, 4)
    with pytest.raises(ValueError, match="ranks=3 is not divisible by ep=2"):
        make_meshes(3, 2, "cpu")
    with pytest.raises(ValueError, match="at least 1"):
        make_meshes(2, 0, "cpu")
    with pytest.raises(ValueError, match=r"ranks=6 is not divisible by replicas=4: choose among \[1, 2, 3, 6\]"):
        get_workload("kimi-debug").layout(6, 1, 4)
    with pytest.raises(ValueError, match=r"ranks=8 in replicas=4, 2 each, is not divisible by ep=4: .* \[1, 2\]"):
        get_workload("kimi-debug").layout(8, 4, 4)


def test_experts_not_divisible_by_ep_are_refused():
    with pytest.raises(ValueError, match=r"experts=8 is not divisible by ep=3: choose an ep among \[1, 2\]"):
        get_workload("kimi-debug").layout(6, 3)


def test_a_workload_may_be_divided():
    half, whole = get_workload("kimi-debug/2"), get_workload("kimi-debug")
    shapes = [
        {name: parameter.shape for name, parameter in build_model(workload, "meta").named_parameters()}
        for workload in (half, whole)
    ]
    for name, shape in shapes[1].items():
        counted = "gate" in name or "experts.w" in name  # one side is a number of experts
        assert shapes[0][name][-1] * 2 == shape[-1]
        assert shapes[0][name][0] * (1 if counted and "shared" not in name else 2) == shape[0]
    assert half.published_buckets == whole.published_buckets
    with pytest.raises(ValueError, match="'kimi-debug' can't be divided by 3: width=256"):
        get_workload("kimi-debug/3")
    with pytest.raises(ValueError, match="write a whole number after the stroke, as in kimi-debug/2"):
        get_workload("kimi-debug/half")
    with pytest.raises(ValueError, match="did you mean 'kimi-debug'"):
        get_workload("kimi-debgu/2")


@pytest.mark.parametrize(
    ("name", "ranks", "ep", "dim"),
    [
        ("kimi-debug", 4, 2, 0),
        ("kimi-debug", 8, 2, 0),
        ("kimi-debug", 16, 2, 1),
        ("kimi-k2", 1024, 64, 1),
        ("tiny", 4, 4, 0),
    ],
)
def test_efsdp_shards_experts_while_it_has_one_each(name, ranks, ep, dim):
    assert get_workload(name).layout(ranks, ep).expert_shard_dim == dim


def test_weights_come_from_the_seed_alone():
    first, again, other = (build_model(TINY, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["output.weight"], other["output.weight"])
    assert {name: tuple(weight.shape) for name, weight in first.items()} == {
        name: tuple(weight.shape) for name, weight in build_model(TINY, "meta").state_dict().items()
    }


@pytest.mark.parametrize(
    "workload",
    [TINY, replace(TINY, attention=replace(TINY.attention, q_lora=24)), replace(GROUPED, layers=2, dense_layers=2)],
    ids=["latent", "latent with q_lora", "grouped queries"],
)
def test_every_parameter_has_a_gradient_and_no_token_sees_a_later_one(workload):
    model = build_model(workload)
    tokens = torch.arange(24).view(2, 12)
    logits = model(tokens)
    assert logits.shape == (2, 12, workload.vocabulary)
    changed = tokens.clone()
    changed[:, 8:] += 100
    torch.testing.assert_close(model(changed)[:, :8], logits[:, :8], rtol=0, atol=1e-6)
    assert not torch.allclose(model(changed)[:, 8:], logits[:, 8:])
    F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@torch.no_grad()
def test_attention_is_latent_attention_head_by_head():
    attention, sizes = make_attention(TINY), TINY.attention
    assert isinstance(attention, LatentAttention)
    initialize(attention, 0)
    x = torch.randn(1, 10, TINY.width, generator=torch.Generator().manual_seed(0))
    table = rotary_table(TINY.rope, sizes.rotated, 10, x.device)
    nope, rope, v = sizes.qk_nope, sizes.qk_rope, sizes.v_head
    latent, key_position = (x[0] @ attention.wkv_a.weight.T).split([sizes.kv_lora, rope], dim=-1)
    queries = (x[0] @ attention.wq.weight.T).split(nope + rope, dim=-1)
    keys_values = (attention.kv_norm(latent) @ attention.wkv_b.weight.T).split(nope + v, dim=-1)
    heads = []
    for query, key_value in zip(queries, keys_values, strict=True):
        scores = query[:, :nope] @ key_value[:, :nope].T
        scores += rotate(query[:, nope:], table) @ rotate(key_position, table).T
        scores *= (0.1 * math.log(40) + 1) ** 2 / math.sqrt(nope + rope)
        scores = scores.masked_fill(torch.ones(10, 10).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ key_value[:, nope:])
    torch.testing.assert_close(attention(x, table)[0], torch.cat(heads, dim=-1) @ attention.wo.weight.T)


@torch.no_grad()
def test_grouped_queries_share_keys_and_values_head_by_head():
    attention, sizes = make_attention(GROUPED), GROUPED.attention
    assert isinstance(attention, GroupedQueryAttention)
    initialize(attention, 0)
    x = torch.randn(1, 10, GROUPED.width, generator=torch.Generator().manual_seed(0))
    table = rotary_table(GROUPED.rope, sizes.rotated, 10, x.device)
    queries, keys, values = ((x[0] @ w.weight.T).split(4, dim=-1) for w in (attention.wq, attention.wk, attention.wv))
    assert (len(queries), len(keys), len(values)) == (32, 8, 8)
    heads = []
    for number, query in enumerate(queries):
        shared = number // 4
        query, key = rotate(attention.q_norm(query), table), rotate(attention.k_norm(keys[shared]), table)
        scores = (query @ key.T / math.sqrt(4)).masked_fill(torch.ones(10, 10).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ values[shared])
    torch.testing.assert_close(attention(x, table)[0], torch.cat(heads, dim=-1) @ attention.wo.weight.T)


@torch.no_grad()
def test_experts_are_a_weighted_sum_of_the_top_k_a_token():
    moe = MoE(TINY)
    initialize(moe, 0)
    x = torch.randn(2, 9, TINY.width, generator=torch.Generator().manual_seed(0))
    expected = []
    for token in x.flatten(0, 1):
        scores = (moe.router.gate.weight @ token).softmax(0)
        best = sorted(range(TINY.experts), key=lambda expert: -scores[expert])[: TINY.top_k]
        w1, w2, w3 = moe.experts.w1, moe.experts.w2, moe.experts.w3
        routed = sum(scores[e] * (w2[e] @ (F.silu(w1[e] @ token) * (w3[e] @ token))) for e in best)
        expected.append(routed + moe.shared_experts(token))
    torch.testing.assert_close(moe(x), torch.stack(expected).view_as(x))


def test_yarn_slows_slow_pairs_and_leaves_fast_ones():
    plain = rotary_frequencies(Rope(factor=1.0), 64)
    assert plain == pytest.approx([10_000 ** (-pair / 32) for pair in range(32)])
    ratios = [fast / slowed for fast, slowed in zip(plain, rotary_frequencies(Rope(factor=40.0), 64), strict=True)]
    assert ratios[0] == 1.0
    assert ratios[-1] == pytest.approx(40.0)
    assert ratios == sorted(ratios)
    # A pair that turns over 32 times in the original context is fast, one that turns less than once is slow.
    for ratio, frequency in zip(ratios, plain, strict=True):
        turns = 4_096 * frequency / (2 * math.pi)
        assert turns < 40 or ratio == 1.0
        assert turns > 0.7 or ratio == pytest.approx(40.0)


def test_rotation_depends_on_distance_alone():
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 8, generator=generator)
    table = rotary_table(TINY.rope, 8, 20, torch.device("cpu"))
    queries, keys = rotate(query.expand(20, 8), table), rotate(key.expand(20, 8), table)
    products = queries @ keys.T
    torch.testing.assert_close(queries.norm(dim=-1), query.norm().expand(20))
    torch.testing.assert_close(products[5:, 2:17].diagonal(), products[3, 0].expand(15))


def test_text_is_the_standard_library_cut_alike_for_any_ranks():
    text = standard_library()
    assert len(text.digest) == 64
    assert text.tokens.numel() > 1_000_000
    inputs, targets = text.batch(3, range(4), 4, 50)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert inputs.min() >= 0
    assert inputs.max() < 256
    for rank in range(4):
        assert torch.equal(text.batch(3, range(rank, rank + 1), 4, 50)[0], inputs[rank : rank + 1])
    assert not torch.equal(text.batch(4, range(4), 4, 50)[0], inputs)
    assert bytes(inputs[0].tolist()).isascii()


def test_text_too_short_for_a_sequence_is_refused():
    text = standard_library()
    for length in (0, text.tokens.numel()):
        with pytest.raises(ValueError, match=f"not {length}"):
            text.batch(0, range(1), 1, length)
