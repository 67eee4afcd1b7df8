"""What the equality tests share: the same parameters and gradients for ``torch.optim.Muon`` on whole matrices and for
DistMuon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from distmuon import DistMuon, matrix_rows


@dataclass(frozen=True)
class Case:
    """Parameters by name, where they lie, and the settings of both optimizers.

    Attributes:
        shapes: global shape of each parameter.
        mesh: shape of the mesh; None for plain tensors.
        placements: one for each mesh axis.
        row_blocks: as DistMuon takes it.
        settings: of ``torch.optim.Muon`` and DistMuon alike.
        dtype: of parameters and gradients.
        steps: optimizer steps.
        scale: of the gradients.
        order: global ranks of the mesh, row-major; None: in order.
        axes: names of the mesh axes; None: unnamed.
    """

    shapes: dict[str, tuple[int, ...]]
    mesh: tuple[int, ...] | None = None
    placements: tuple[Placement, ...] = ()
    row_blocks: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    steps: int = 3
    scale: float = 1.0
    order: tuple[int, ...] | None = None
    axes: tuple[str, ...] | None = None


def values(case: Case, step: int) -> dict[str, Tensor]:
    """Parameters (step -1) or gradients of a step, whole: the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    scale = case.scale if step >= 0 else 1.0
    return {
        name: (torch.randn(shape, generator=generator) * scale).to(case.dtype) for name, shape in case.shapes.items()
    }


def matrices_of(case: Case, name: str, tensor: Tensor) -> list[Tensor]:
    """The matrices of a whole parameter, in order."""
    rows = matrix_rows(name, case.shapes[name], case.row_blocks)
    slices = tensor.unsqueeze(0) if tensor.ndim == 2 else tensor
    return [matrix for matrix_slice in slices for matrix in matrix_slice.split(rows)]


def muon_on_whole_matrices(case: Case) -> dict[str, Tensor]:
    """The truth: ``torch.optim.Muon`` with one parameter for each matrix."""
    whole = {
        name: [nn.Parameter(matrix.clone()) for matrix in matrices_of(case, name, tensor)]
        for name, tensor in values(case, -1).items()
    }
    optimizer = torch.optim.Muon([matrix for matrices in whole.values() for matrix in matrices], **case.settings)
    for step in range(case.steps):
        for name, gradient in values(case, step).items():
            for parameter, matrix in zip(whole[name], matrices_of(case, name, gradient), strict=True):
                parameter.grad = matrix.clone()
        optimizer.step()
    return {
        name: torch.cat([matrix.detach() for matrix in matrices]).view(case.shapes[name])
        for name, matrices in whole.items()
    }


def place(case: Case, tensor: Tensor, mesh: Any) -> Tensor:
    """A whole tensor as the case stores it."""
    return distribute_tensor(tensor, mesh, case.placements, src_data_rank=None) if mesh else tensor.clone()


def make_mesh(case: Case) -> DeviceMesh | None:
    """The mesh of a case, over the ranks of the default group."""
    if case.mesh is None:
        return None
    ranks = torch.arange(math.prod(case.mesh)) if case.order is None else torch.tensor(case.order)
    return DeviceMesh("cpu", ranks.view(case.mesh), mesh_dim_names=case.axes)


def stepped(case: Case, **options: Any) -> dict[str, Tensor]:
    """The same steps with DistMuon, over the ranks of the default group; the parameters as they lie at the end."""
    mesh = make_mesh(case)
    parameters = {name: nn.Parameter(place(case, tensor, mesh)) for name, tensor in values(case, -1).items()}
    optimizer = DistMuon(parameters.items(), **case.settings, **{"row_blocks": case.row_blocks or None, **options})
    for step in range(case.steps):
        for name, gradient in values(case, step).items():
            parameters[name].grad = place(case, gradient, mesh)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def distmuon(case: Case, **options: Any) -> dict[str, Tensor]:
    """Whole parameters after the same steps with DistMuon."""
    return {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        for name, parameter in stepped(case, **options).items()
    }


def differing(case: Case, ours: dict[str, Tensor], truth: dict[str, Tensor]) -> list[str]:
    """Names of the parameters that are not equal to the last bit."""
    return [name for name in case.shapes if not torch.equal(ours[name], truth[name])]


def differing_on_rank(rank: int, ranks: int, cases: Sequence[Case], options: dict[str, Any]) -> list[str]:
    """On one rank: what differs from ``torch.optim.Muon`` in any of the cases."""
    return [
        f"{case.settings} {name}"
        for case in cases
        for name in differing(case, distmuon(case, **options), muon_on_whole_matrices(case))
    ]


def differing_shards(rank: int, ranks: int, cases: Sequence[Case], options: dict[str, Any]) -> list[str]:
    """On one rank: whose local shard differs from that of ``torch.optim.Muon``'s whole parameter, in any of the cases.

    Compares what lies where, with nothing put together.
    """
    found = []
    for case in cases:
        ours, mesh = stepped(case, **options), make_mesh(case)
        for name, truth in muon_on_whole_matrices(case).items():
            if not torch.equal(local(ours[name]), local(place(case, truth, mesh))):
                found.append(f"{case.placements} {name}")
    return found


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
