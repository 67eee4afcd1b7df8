"""One process that stands for one rank of a job: its real optimizer, under torch's fake process group."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from distmuon.optimizer import DistMuon
from distmuon.planning.placement import ParameterSpec
from distmuon.workloads.config import MUON_RECIPE


@contextmanager
def stand_for(rank: int, ranks: int) -> Iterator[None]:
    """Let this process be ``rank`` of ``ranks``: its collectives end at once, without the others.

    Raises:
        RuntimeError: a process group exists already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    if dist.is_initialized():
        raise RuntimeError("a process group exists already: stand for a rank in a process without one")
    # DTensor keeps results with their mesh; this rank's mesh may be equal to another's, but its groups are others.
    _forget_sharding()
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _forget_sharding() -> None:
    """As ``torch.distributed.tensor.debug`` does, which can't be imported without NumPy."""
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    # Not every version that is supported need have the second cache.
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


@contextmanager
def exchanges_move_nothing() -> Iterator[None]:
    """All-to-alls end at once, and bring ones: nothing that a denormal number would slow down.

    What arrives depends on neither the packing nor the dtype on the wire. On a GPU it is one kernel an exchange, inside
    the operator ``c10d::alltoall_base_``. The fake process group copies what it sends over and over into what it
    receives instead, which takes time, and refuses where a rank sends nothing.
    """
    from torch._C._distributed_c10d import FakeWork

    def arrive(output: torch.Tensor, *_: Any, **__: Any) -> Any:
        output.fill_(1)
        return FakeWork().boxed()

    with torch.library._scoped_library("c10d", "IMPL") as library, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for key in ("CPU", "CUDA"):  # the second is a ROCm device's, too
            library.impl("alltoall_base_", arrive, key, allow_override=True)
        yield


def make_optimizer(specs: Sequence[ParameterSpec], rank: int, device: str, **options: Any) -> DistMuon:
    """The optimizer of that rank, with the recipe's settings and a gradient for each parameter: all ones.

    Args:
        specs: the parameters, as planned.
        rank: for which :func:`stand_for` is entered.
        device: "meta" for shapes and strides without memory, "cpu" or "cuda" to compute.
        options: of :class:`~distmuon.optimizer.DistMuon`.
    """
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    named = [(spec.name, nn.Parameter(_ones(spec, rank, device, meshes))) for spec in specs]
    group = {"params": named, "row_blocks": {spec.name: spec.matrix_rows for spec in specs}}
    optimizer = DistMuon([group], **MUON_RECIPE, **options)
    for spec, (_, parameter) in zip(specs, named, strict=True):
        parameter.grad = _ones(spec, rank, device, meshes)
    return optimizer


def _ones(spec: ParameterSpec, rank: int, device: str, meshes: dict[tuple[int, ...], DeviceMesh]) -> torch.Tensor:
    """A tensor like the parameter; where that is spread, a DTensor with its local part."""
    local = torch.ones(spec.local_shape(rank), dtype=spec.dtype, device=device)
    storage = spec.storage
    if storage is None:
        return local
    if storage.mesh_shape not in meshes:
        of = "cpu" if device == "meta" else device
        meshes[storage.mesh_shape] = DeviceMesh(of, torch.tensor(storage.ranks).view(storage.mesh_shape))
    shape = torch.Size(spec.shape)
    stride = torch.empty(shape, device="meta").stride()
    mesh = meshes[storage.mesh_shape]
    return DTensor.from_local(local, mesh, storage.placements, run_check=False, shape=shape, stride=stride)
