"""Jobs that hypothesis makes up: parameters of any shape, cut into any matrices, on any mesh."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from distmuon.planning.placement import ParameterSpec, Storage


@st.composite
def jobs(draw: st.DrawFn, parts: bool = False) -> tuple[list[ParameterSpec], int]:
    """Parameters and the number of ranks; with ``parts`` each on a mesh of some of the ranks, else all on one."""
    if parts:
        ranks = draw(st.integers(2, 6))
        everyone = range(ranks)
        specs = []
        for number in range(draw(st.integers(1, 6))):
            members = tuple(draw(st.permutations(everyone)))[: draw(st.integers(1, ranks))]
            storage = Storage((len(members),), members, (draw(st.sampled_from([Shard(0), Shard(1), Replicate()])),))
            shape = draw(st.sampled_from([(6, 4), (4, 6), (12, 4), (5, 3)]))
            specs.append(ParameterSpec(f"p{number}", shape, torch.float32, (shape[0],), storage))
        return specs, ranks
    mesh = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (3, 2), (2, 3), (2, 2, 2), (2, 1, 3), (2, 2, 1, 2)]))
    ranks = math.prod(mesh)
    order = draw(st.permutations(range(ranks)))
    specs = []
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 13), min_size=2, max_size=3)))
        placements = []
        for axis in range(len(mesh)):
            dim = draw(st.integers(0, len(shape) - 1))
            kind = draw(st.sampled_from(["shard", "shard", "replicate", "strided"]))
            if kind == "strided" and axis + 1 < len(mesh):
                placements.append(_StridedShard(dim, split_factor=mesh[axis + 1]))
            else:
                placements.append(Replicate() if kind == "replicate" else Shard(dim))
        cuts = sorted(draw(st.sets(st.integers(1, max(shape[-2] - 1, 1)), max_size=3)) - {shape[-2]})
        rows = tuple(b - a for a, b in itertools.pairwise([0, *cuts, shape[-2]]))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
        specs.append(ParameterSpec(f"p{number}", shape, dtype, rows, Storage(mesh, tuple(order), tuple(placements))))
    return specs, ranks
