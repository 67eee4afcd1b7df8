"""A step that a CUDA graph can hold: everything it writes to exists before it, and nothing is read to the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from muon_cases import Case, differing, distmuon, place, values
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distmuon import DistMuon

SHAPES = {
    "wide": (32, 64),
    "tall": (160, 96),
    "again": (160, 96),
    "uneven": (18, 64),
    "few": (3, 7),
    "experts": (6, 24, 20),
}
SETTINGS: list[dict[str, Any]] = [
    {"nesterov": True, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.1},
    {"nesterov": False, "adjust_lr_fn": None, "weight_decay": 0.0},
]


class Watch(TorchDispatchMode):
    """Operators that make storage of their own, and those that read a value to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.allocating: list[str] = []
        self.reading: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.numel()]
        if any(tensor.untyped_storage().data_ptr() not in given for tensor in made):
            self.allocating.append(str(func))
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
            self.reading.append(str(func))
        return result


def case(ranks: int, settings: dict[str, Any], **changes: Any) -> Case:
    return Case(SHAPES, (ranks,) if ranks else None, (Shard(0),), settings=settings, row_blocks={"tall": 40}, **changes)


def watched_steps(
    rank: int, ranks: int, settings: dict[str, Any], options: dict[str, Any]
) -> tuple[list[str], list[str]]:
    mesh = init_device_mesh("cpu", (ranks,))
    asked = case(ranks, settings)
    parameters = {name: nn.Parameter(place(asked, tensor, mesh)) for name, tensor in values(asked, -1).items()}
    optimizer = DistMuon(
        parameters.items(), lr=torch.tensor(0.02), capturable=True, row_blocks=asked.row_blocks, **settings, **options
    )
    for step in range(2):
        for name, gradient in values(asked, step).items():
            parameters[name].grad = place(asked, gradient, mesh)
        with Watch() as watch:
            optimizer.step()
    return watch.allocating, watch.reading


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("ns_algorithm", ["standard", "copy_free", "gram"])
def test_a_second_step_allocates_nothing_and_reads_nothing(pool, settings, ns_algorithm):
    assert pool.run(3, watched_steps, settings, {"ns_algorithm": ns_algorithm}) == [([], [])] * 3


def test_the_watch_sees_what_an_ordinary_step_does():
    weight = nn.Parameter(torch.zeros(32, 32))
    optimizer = DistMuon([weight], lr=torch.tensor(0.1))
    for _ in range(2):
        weight.grad = torch.eye(32)
        with Watch() as watch:
            optimizer.step()
    assert "aten.mm.default" in watch.allocating
    assert watch.reading


def differing_from_plain(rank: int, ranks: int, settings: dict[str, Any], options: dict[str, Any]) -> list[str]:
    asked = case(ranks, settings)
    captured = distmuon(asked, lr=torch.tensor(0.02, dtype=torch.float64), capturable=True, **options)
    return differing(asked, captured, distmuon(asked, lr=0.02, **options))


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("ns_algorithm", ["standard", "copy_free", "gram"])
def test_static_buffers_change_no_bit(pool, settings, ns_algorithm):
    assert pool.run(4, differing_from_plain, settings, {"ns_algorithm": ns_algorithm}) == [[]] * 4


def test_a_changed_learning_rate_is_seen():
    weight = nn.Parameter(torch.zeros(32, 32))
    lr = torch.tensor(0.1)
    optimizer = DistMuon([weight], lr=lr, capturable=True)
    sizes = []
    for value in (0.1, 0.0, 0.2):
        lr.fill_(value)
        before = weight.detach().clone()
        weight.grad = torch.eye(32)
        optimizer.step()
        sizes.append((weight.detach() - before).abs().max().item())
    assert sizes[1] == 0.0
    assert sizes[0] > 0
    assert sizes[2] > sizes[0]


def test_the_learning_rate_must_be_a_tensor():
    with pytest.raises(ValueError, match=r"capturable=True reads no number on the host: lr is 0\.1, give a tensor"):
        DistMuon([nn.Parameter(torch.zeros(4, 4))], lr=0.1, capturable=True)


def test_only_the_fused_variant_is_capturable():
    with pytest.raises(ValueError, match="capturable=True needs a variant with elementwise='bucket'"):
        DistMuon([nn.Parameter(torch.zeros(4, 4))], lr=torch.tensor(0.1), capturable=True, variant="baseline")


def plain_parameters(device: str) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(tensor.to(device)) for name, tensor in values(case(0, {}), -1).items()}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU to capture a CUDA graph on")
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("ns_algorithm", ["standard", "copy_free", "gram"])
def test_a_cuda_graph_holds_a_step(settings, ns_algorithm):
    """Captured once, replayed with other gradients and another learning rate, against steps that are run eagerly."""
    asked = case(0, settings)
    eager, captured = plain_parameters("cuda"), plain_parameters("cuda")
    rates = [torch.tensor(0.02, device="cuda") for _ in range(2)]
    optimizers = [
        DistMuon(
            parameters.items(),
            lr=lr,
            capturable=True,
            row_blocks=asked.row_blocks,
            ns_algorithm=ns_algorithm,
            **settings,
        )
        for parameters, lr in zip((eager, captured), rates, strict=True)
    ]
    for parameters in (eager, captured):  # that stay where they are: a graph reads the memory that it was captured with
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)

    def set_inputs(step: int) -> None:
        for name, gradient in values(asked, step).items():
            for parameters in (eager, captured):
                grad = parameters[name].grad
                assert grad is not None
                grad.copy_(gradient)
        for lr in rates:
            lr.fill_(0.02 / (step + 1))

    # Warm up beside the default stream, as capturing wants: static buffers, and cuBLAS's workspace of the stream.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(3):
            set_inputs(step)
            for optimizer in optimizers:
                optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # records, and steps nothing
        optimizers[1].step()
    for step in range(3, 6):
        set_inputs(step)
        optimizers[0].step()
        graph.replay()
        torch.cuda.synchronize()
        differing = [name for name in eager if not torch.equal(eager[name], captured[name])]
        assert differing == []
        momenta = [
            [optimizer.state[parameter]["momentum_buffer"] for parameter in parameters.values()]
            for optimizer, parameters in zip(optimizers, (eager, captured), strict=True)
        ]
        assert all(map(torch.equal, *momenta))
