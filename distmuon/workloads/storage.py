"""Where a workload's Muon parameters lie on any number of ranks, without a rank or a weight: for planning and counting.

The same placements come out of :func:`distmuon.workloads.parallel.parallelize`, which a test holds against these.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from distmuon.checks import check_whole
from distmuon.names import choose
from distmuon.planning.matrices import matrix_rows
from distmuon.planning.options import Patterns, PlanOptions
from distmuon.planning.placement import ParameterSpec, Storage
from distmuon.planning.plan import Plan, plan_step
from distmuon.routing import split_parameters
from distmuon.variants import Variant, get_variant
from distmuon.workloads.config import WORKLOADS, Workload, get_workload
from distmuon.workloads.model import build_model

#: The buckets of the published profile, and of the same scheme on the other workloads.
PUBLISHED_BUCKETS = {name: workload.published_buckets for name, workload in WORKLOADS.items()}

BUCKETS = ("published", "auto")


def get_buckets(workload: Workload, buckets: str | Patterns) -> Patterns | None:
    """Bucket patterns by name: "published", or "auto" (None: the plan chooses); patterns are returned as they are.

    Raises:
        ValueError: an unknown name; the message gives the nearest.
    """
    if not isinstance(buckets, str):
        return buckets
    return workload.published_buckets if choose("buckets", buckets, BUCKETS) == "published" else None


def muon_parameters(workload: Workload, *, ranks: int, ep: int, replicas: int = 1) -> list[ParameterSpec]:
    """Describe the Muon parameters of a workload as they lie on ``ranks`` ranks.

    Args:
        workload: whose parameters.
        ranks: of the job.
        ep: expert-parallel degree.
        replicas: copies of the model (HSDP), each over as many neighbouring ranks.

    Raises:
        ValueError: the numbers do not divide the ranks, or ``ep`` not the experts.
    """
    layout = workload.layout(ranks, ep, replicas)

    def store(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> Storage:
        if replicas > 1:
            mesh_shape, placements = (replicas, *mesh_shape), (Replicate(), *placements)
        return Storage(mesh_shape, tuple(range(ranks)), placements)

    dense = store((layout.shards,), (Shard(0),))
    strided = layout.expert_shard_dim == 0 and ep > 1  # efsdp cuts what ep has cut before
    shard = _StridedShard(0, split_factor=ep) if strided else Shard(layout.expert_shard_dim)
    expert = store((layout.efsdp, ep), (shard, Shard(0)))
    (group,) = split_parameters(build_model(workload, "meta"), row_blocks=workload.row_blocks).muon
    return [
        ParameterSpec(
            name,
            tuple(parameter.shape),
            torch.float32,
            matrix_rows(name, tuple(parameter.shape), group["row_blocks"]),
            None if ranks == 1 else expert if parameter.ndim == 3 else dense,
        )
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    ]


def plan_for(
    workload: str | Workload,
    *,
    ranks: int | None = None,
    ep: int | None = None,
    replicas: int = 1,
    rank: int = 0,
    buckets: str | Patterns = "published",
    variant: str | Variant = "fused",
    ns_algorithm: str = "standard",
    share_replicas: bool | None = None,
) -> Plan:
    """The plan of one rank of a workload, made with no process and no process group.

    Args:
        workload: a name ("kimi-debug", ...) or a :class:`~distmuon.workloads.Workload`.
        ranks: of the job; default the workload's own.
        ep: expert-parallel degree; default the workload's own.
        replicas: copies of the model (HSDP).
        rank: whose plan.
        buckets: "published", "auto", or patterns.
        variant: of the step.
        ns_algorithm: arithmetic of Newton-Schulz, as DistMuon takes it.
        share_replicas: whether replicas split the work, as DistMuon takes it.

    Raises:
        ValueError: an unknown name, or numbers that don't fit; with what would.
        TypeError: what should be a number or a name is none.
    """
    workload = workload if isinstance(workload, Workload) else get_workload(workload)
    ranks = workload.default_ranks if ranks is None else ranks
    ep = workload.default_ep if ep is None else ep
    workload.layout(ranks, ep, replicas)
    check_whole("rank", rank, 0, ranks - 1)
    options = PlanOptions(
        get_buckets(workload, buckets),
        get_variant(variant),
        ns_algorithm=ns_algorithm,
        share_replicas=share_replicas,
    )
    return plan_step(muon_parameters(workload, ranks=ranks, ep=ep, replicas=replicas), rank, options)
