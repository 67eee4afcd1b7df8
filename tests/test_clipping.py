"""``clip_grad_norm_`` over several meshes is torch's clipping of the whole gradients."""

from __future__ import annotations

import math

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from distmuon.clipping import clip_grad_norm_

SHAPES = [(8, 6), (3, 5), (4, 4), (7,), (2, 3)]


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def clipped_whole(max_norm: float, norm_type: float) -> tuple[Tensor, list[Tensor]]:
    """What torch makes of the same gradients in one process."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for parameter, gradient in zip(parameters, gradients(), strict=True):
        parameter.grad = gradient
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type), [parameter.grad for parameter in parameters]


def clipped_on_meshes(rank: int, ranks: int, max_norm: float, norm_type: float) -> tuple[Tensor, list[Tensor]]:
    """Sharded over one mesh, with empty pieces, over two axes, replicated on one, and plain."""
    line = init_device_mesh("cpu", (ranks,))
    square = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("a", "b"))
    places = [(line, [Shard(0)]), (line, [Shard(0)]), (square, [Shard(0), Shard(1)]), (square, [Replicate(), Shard(0)])]
    tensors = [
        distribute_tensor(gradient, *place) for gradient, place in zip(gradients()[:-1], places, strict=True)
    ] + gradients()[-1:]
    parameters = []
    for tensor in tensors:
        parameters.append(nn.Parameter(torch.zeros_like(tensor)))
        parameters[-1].grad = tensor
    parameters.append(nn.Parameter(torch.zeros(3)))  # without a gradient
    norm = clip_grad_norm_(parameters, max_norm, norm_type)
    return norm, [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1000.0])
def test_meshes_together_are_clipped_as_whole_gradients(pool: Pool, max_norm, norm_type):
    norm, expected = clipped_whole(max_norm, norm_type)
    results = pool.run(4, clipped_on_meshes, max_norm, norm_type)
    for ours, clipped in results:
        assert torch.equal(ours, results[0][0])
        torch.testing.assert_close(ours, norm)
        torch.testing.assert_close(clipped, expected)


def test_no_gradient_has_norm_zero():
    assert clip_grad_norm_([nn.Parameter(torch.zeros(3))], 1.0).item() == 0.0
    assert clip_grad_norm_([], 1.0).item() == 0.0


def test_norm_of_large_gradients_does_not_overflow():
    parameter = nn.Parameter(torch.zeros(4, 4))
    parameter.grad = torch.full((4, 4), 1e30)
    assert clip_grad_norm_(parameter, 1.0).item() == pytest.approx(4e30)
    torch.testing.assert_close(parameter.grad, torch.full((4, 4), 0.25))


def test_a_norm_that_is_not_finite_can_be_an_error():
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, torch.nan, 2.0])
    with pytest.raises(RuntimeError, match="the norm of the gradients is nan: they are not scaled"):
        clip_grad_norm_(parameter, 1.0, error_if_nonfinite=True)
    assert parameter.grad[0] == 1.0


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_max_norm_that_bounds_nothing_is_refused(max_norm):
    with pytest.raises(ValueError, match="max_norm is"):
        clip_grad_norm_(nn.Parameter(torch.zeros(3)), max_norm)


def test_pairs_of_names_and_parameters_are_refused():
    with pytest.raises(TypeError, match="parameters has a tuple"):
        clip_grad_norm_(nn.Linear(2, 2).named_parameters(), 1.0)


def test_norm_type_below_zero_is_refused():
    with pytest.raises(ValueError, match="norm_type must be above 0, not -1"):
        clip_grad_norm_(nn.Parameter(torch.zeros(3)), 1.0, norm_type=-1.0)


def unsummed(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(3), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with pytest.raises(ValueError, match="still to be summed"):
        clip_grad_norm_(parameter, 1.0)


def test_gradient_still_to_be_summed_is_refused(pool: Pool):
    pool.run(2, unsummed)
