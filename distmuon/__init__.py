"""DistMuon: the Muon optimizer over sharded weight matrices, its batched packing, and a counter of what a step
launches.
"""

from distmuon.clipping import clip_grad_norm_
from distmuon.combined import muon_with_adamw
from distmuon.optimizer import DistMuon
from distmuon.packing import batched_copy_
from distmuon.planning.matrices import matrix_rows
from distmuon.planning.plan import Plan
from distmuon.routing import split_parameters
from distmuon.variants import VARIANTS, Variant
from distmuon.workloads.storage import PUBLISHED_BUCKETS, plan_for

__all__ = [
    "PUBLISHED_BUCKETS",
    "VARIANTS",
    "DistMuon",
    "Plan",
    "Variant",
    "batched_copy_",
    "clip_grad_norm_",
    "matrix_rows",
    "muon_with_adamw",
    "plan_for",
    "split_parameters",
]
