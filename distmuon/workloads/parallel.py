"""A model over ranks: two meshes, experts split over ``ep`` with their tokens sent to them, FSDP over the rest.

Dense parameters lie ``Shard(0)`` on the mesh ("dp_shard",). Experts lie on ("efsdp", "ep"): whole experts over ``ep``,
and FSDP shards what each ``ep`` rank has over ``efsdp``. With replicas (HSDP) both meshes have an axis "replicate"
before these. Gradients are summed over ranks, never averaged: the loss of a rank is its share of the mean over all
tokens (see ``training``), so the sum is the gradient of that mean, whichever ranks an expert's tokens came from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from distmuon.workloads.config import Workload, check_ranks
from distmuon.workloads.model import Decoder, Experts, MoE


@dataclass(frozen=True)
class Meshes:
    """The meshes of a job, both over all its ranks: ``dense`` is ("dp_shard",), ``expert`` is ("efsdp", "ep"), or these
    after "replicate".
    """

    dense: DeviceMesh
    expert: DeviceMesh

    def __post_init__(self) -> None:
        if self.dense.size() != self.expert.size():
            raise ValueError(f"both meshes must hold all ranks, not {self.dense.size()} and {self.expert.size()}")

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return self.dense.shape[0] if self.dense.ndim > 1 else 1

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """The mesh over which FSDP shards, and replicates, the experts of an ``ep`` rank."""
        return self.expert["replicate", "efsdp"] if self.replicas > 1 else self.expert["efsdp"]


def make_meshes(ranks: int, ep: int, device_type: str, replicas: int = 1) -> Meshes | None:
    """The meshes over the default process group; None for one rank, which needs neither mesh nor process group.

    Raises:
        ValueError: ``replicas`` does not divide ``ranks``, or ``ep`` not what is left.
    """
    check_ranks(ranks, ep, replicas)
    if ranks == 1:
        return None

    def mesh(**axes: int) -> DeviceMesh:
        axes = {"replicate": replicas, **axes} if replicas > 1 else axes
        return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    shards = ranks // replicas
    return Meshes(dense=mesh(dp_shard=shards), expert=mesh(efsdp=shards // ep, ep=ep))


def parallelize(model: Decoder, workload: Workload, meshes: Meshes | None) -> None:
    """Split ``model`` in place: experts over ``ep``, then everything with ``fully_shard``. None leaves it whole.

    Every rank must hold the same full weights; each keeps its part of them and nothing is sent.

    Raises:
        ValueError: the ranks do not fit the workload's experts.
    """
    if meshes is None:
        return
    layout = workload.layout(meshes.dense.size(), meshes.expert["ep"].size(), meshes.replicas)

    def place(stack: nn.Parameter) -> Shard:
        return Shard(layout.expert_shard_dim)

    for moe in [module for module in model.modules() if isinstance(module, MoE)]:
        split_experts(moe, meshes.expert["ep"])
        fully_shard(moe.experts, mesh=meshes.expert_fsdp, shard_placement_fn=place)
    for layer in model.layers:
        fully_shard(layer, mesh=meshes.dense)
    fully_shard(model, mesh=meshes.dense)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that also multiplies


def split_experts(moe: MoE, mesh: DeviceMesh) -> None:
    """Keep this rank's experts of each stack, and have the tokens sent over ``mesh`` ("ep",)."""
    for name, stack in list(moe.experts.named_parameters()):
        mine = stack.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()  # the clone lets go of the whole stack
        split = DTensor.from_local(mine, mesh, [Shard(0)], shape=stack.shape, stride=stack.stride(), run_check=False)
        setattr(moe.experts, name, nn.Parameter(split))
    moe.dispatch = Dispatch(mesh.get_group())


class Dispatch:
    """Tokens to the ranks of their experts, through them, and back: one all-to-all of counts, then one each way.

    Args:
        group: ranks in the order in which they hold the experts, equally many each.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, experts: Experts, tokens: Tensor, counts: Tensor) -> Tensor:
        """(N, D) tokens sorted by expert, ``counts`` (E,) of each, through ``experts``; (N, D) in the same order."""
        sent = counts.view(self.group.size(), -1)  # (ep, experts of a rank): a row for each destination
        received = torch.empty_like(sent)  # a row for each source
        dist.all_to_all_single(received, sent, group=self.group)
        sent_splits, received_splits = sent.sum(1).tolist(), received.sum(1).tolist()
        arrived = all_to_all_single_autograd(tokens, received_splits, sent_splits, self.group)
        # They arrive by source and then by expert. A stable sort makes that by expert and then by source.
        expert = torch.arange(sent.shape[1], device=tokens.device).repeat(self.group.size())
        order = expert.repeat_interleave(received.flatten()).argsort(stable=True)
        done = experts(arrived.index_select(0, order), received.sum(0)).index_select(0, order.argsort())
        return all_to_all_single_autograd(done, sent_splits, received_splits, self.group)
