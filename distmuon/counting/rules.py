"""What each operator launches on a CUDA or HIP device, one rule an operator.

The rules are facts of PyTorch's sources (named by file under ``aten/src/ATen/native/``), so that launches can be
counted by watching the operators a program dispatches, on any device. An operator without a rule is an error, never a
zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten
Arguments = tuple[Any, ...]


class Activity(NamedTuple):
    """Device activity of one operator. A memcpy here is an asynchronous copy on the device; a memset is not one."""

    memcpys: int = 0
    memsets: int = 0
    kernels: int = 0
    collectives: int = 0

    @property
    def launches(self) -> int:
        """All activity that is not a collective."""
        return self.memcpys + self.memsets + self.kernels


KERNEL = Activity(kernels=1)
MEMCPY = Activity(memcpys=1)


@dataclass(frozen=True)
class Toolchain:
    """Limits of one launch of the multi-tensor kernels (``cuda/MultiTensorApply.cuh``).

    Args:
        tensors: most tensors of each list, by number of lists.
        blocks: most thread blocks, of ``CHUNK`` elements of one tensor each.
        warp: threads of a warp.
    """

    tensors: dict[int, int]
    blocks: int
    warp: int


CHUNK = 65_536
TOOLCHAINS = {
    "rocm": Toolchain({1: 110, 2: 64, 3: 48, 4: 36, 5: 30}, 320, 64),
    "cuda12": Toolchain({1: 110, 2: 64, 3: 48, 4: 36, 5: 30}, 320, 32),
    "cuda13": Toolchain({1: 770, 2: 448, 3: 336, 4: 252, 5: 210}, 2_240, 32),
}

#: Activity by part: what it is for.
Parts = tuple[tuple[str, Activity], ...]
Rule = Callable[[Arguments, dict[str, Any], Any, Toolchain], Parts]


def _one(part: str, activity: Activity) -> Rule:
    """The same for every call, but that kernels on tensors without elements are not launched."""

    def rule(arguments: Arguments, keywords: dict[str, Any], result: Any, toolchain: Toolchain) -> Parts:
        return () if activity.kernels and arguments[0].numel() == 0 else ((part, activity),)

    return rule


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie one after another in memory in some order of the dims, with no gap and no overlap."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def _like_strides(first: Tensor, second: Tensor) -> bool:
    """Whether both walk memory alike; the stride of a dim of size 1 means nothing."""
    return all(a == b or size == 1 for a, b, size in zip(first.stride(), second.stride(), first.shape, strict=True))


def copy_activity(destination: Tensor, source: Tensor) -> Activity:
    """One ``copy_`` (``cuda/Copy.cu``): a memcpy if nothing is cast and both sides are dense with the same strides,
    else a kernel.
    """
    if destination.numel() == 0:
        return Activity()
    plain = destination.dtype == source.dtype and destination.shape == source.shape
    return MEMCPY if plain and is_dense(destination) and _like_strides(destination, source) else KERNEL


def foreach_chunks(sizes: Sequence[int], lists: int, toolchain: Toolchain) -> int:
    """Launches of a multi-tensor kernel over tensors of ``sizes`` elements (``cuda/MultiTensorApply.cuh``).

    A launch is full when it holds its limit of tensors, or of blocks; a tensor cut off by the latter goes on in the
    next.
    """
    launches = tensors = blocks = 0
    limit = toolchain.tensors[lists]
    for size in sizes:
        if size == 0:
            continue
        tensors += 1
        chunks = -(-size // CHUNK)
        for chunk in range(chunks):
            blocks += 1
            last = chunk == chunks - 1
            if (last and tensors == limit) or blocks == toolchain.blocks:
                launches += 1
                blocks = 0
                tensors = 0 if last else 1
    return launches + (blocks > 0)


def takes_fused_route(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> bool:
    """Whether ``_foreach_copy_`` is one kernel (``cuda/ForeachBinaryOpList.cu``, ``ForeachUtils.h``).

    It wants one device, one dtype of all destinations and one of all sources, and pairs of equal sizes and raw strides
    that are dense.
    """
    tensors = (*destinations, *sources)
    return (
        len({tensor.device for tensor in tensors}) == 1
        and len({tensor.dtype for tensor in destinations}) == 1
        and len({tensor.dtype for tensor in sources}) == 1
        and all(
            to.shape == source.shape and to.stride() == source.stride() and is_dense(to)
            for to, source in zip(destinations, sources, strict=True)
        )
    )


def reduction_splits(elements: int, outputs: int, warp: int) -> bool:
    """Whether a reduction of ``elements`` for each of ``outputs`` is split over thread blocks (``cuda/Reduce.cuh``).

    A split one counts arrivals in a semaphore, which a memset clears first. 512 threads a block, inner dim reduced, not
    vectorised over outputs; for up to a few hundred outputs, which don't fill the device by themselves.
    """
    threads = 512

    def power_of_two_below(number: int) -> int:
        return 1 << (max(number, 1).bit_length() - 1)

    lanes = min(power_of_two_below(elements), threads)
    height = min(power_of_two_below(outputs), threads // min(lanes, warp))
    width = min(lanes, threads // height)
    values = -(-elements // width)
    if values >= min(16 * height, 256):
        values = -(-values // height)
    return values >= 256


def _copy(arguments: Arguments, keywords: dict[str, Any], result: Any, toolchain: Toolchain) -> Parts:
    destination, source = arguments[0], arguments[1]
    part = "transpose" if destination.dtype == source.dtype and _transposed(destination, source) else "copy"
    return ((part, copy_activity(destination, source)),)


def _transposed(one: Tensor, other: Tensor) -> bool:
    """Whether one is laid out by rows and the other by columns."""
    return one.ndim > 1 and (one.stride(-1) < one.stride(-2)) != (other.stride(-1) < other.stride(-2))


def _to_copy(arguments: Arguments, keywords: dict[str, Any], result: Any, toolchain: Toolchain) -> Parts:
    return (("copy", copy_activity(result, arguments[0])),)


def _foreach_copy(arguments: Arguments, keywords: dict[str, Any], result: Any, toolchain: Toolchain) -> Parts:
    destinations, sources = arguments[0], arguments[1]
    if takes_fused_route(destinations, sources):
        kernels = foreach_chunks([tensor.numel() for tensor in destinations], 2, toolchain)
        return (("copy", Activity(kernels=kernels)),)
    return tuple(("copy", copy_activity(to, source)) for to, source in zip(destinations, sources, strict=True))


def _foreach(part: str, lists: int) -> Rule:
    """An elementwise operator on ``lists`` lists, which all launch by the size of the first (``cuda/Foreach*.cu``).

    The fused route wants one device, one dtype, and equal strides of dense tensors at each position; otherwise it is a
    kernel a tensor.
    """

    def rule(arguments: Arguments, keywords: dict[str, Any], result: Any, toolchain: Toolchain) -> Parts:
        given = [argument for argument in arguments if isinstance(argument, list | tuple)]
        positions = list(zip(*given, strict=True))
        fused = len({(tensor.device, tensor.dtype) for tensors in given for tensor in tensors}) == 1 and all(
            is_dense(tensor) and (tensor.shape, tensor.stride()) == (first.shape, first.stride())
            for first, *others in positions
            for tensor in (first, *others)
        )
        sizes = [tensor.numel() for tensor in given[0]]
        kernels = foreach_chunks(sizes, lists, toolchain) if fused else sum(size > 0 for size in sizes)
        return ((part, Activity(kernels=kernels)),)

    return rule


def _vector_norm(arguments: Arguments, keywords: dict[str, Any], result: Any, toolchain: Toolchain) -> Parts:
    outputs = result.numel()
    splits = reduction_splits(arguments[0].numel() // outputs, outputs, toolchain.warp)
    return (("norm", Activity(kernels=1, memsets=int(splits))),)


def _gemm_with_bias(arguments: Arguments, keywords: dict[str, Any], result: Any, toolchain: Toolchain) -> Parts:
    if keywords.get("beta", 1) == 0:
        return (("gemm", KERNEL),)
    # cuBLAS and hipBLAS add to what is in the result, so the bias is copied there first.
    return (("gemm_bias", copy_activity(result, arguments[0])), ("gemm", KERNEL))


#: Operator -> rule. ``part`` says what the activity is for; with the phase it runs in, it gives the source of a launch.
RULES: dict[Any, Rule] = {
    aten.copy_.default: _copy,  # cuda/Copy.cu
    aten._to_copy.default: _to_copy,  # TensorConversion.cpp: an empty tensor and a copy_
    aten._foreach_copy_.default: _foreach_copy,  # cuda/ForeachBinaryOpList.cu
    aten.lerp_.Scalar: _one("lerp_", KERNEL),  # cuda/Lerp.cu
    aten.lerp.Scalar: _one("lerp", KERNEL),  # cuda/Lerp.cu
    aten.mul_.Tensor: _one("mul_", KERNEL),  # cuda/BinaryMulKernel.cu
    aten.add_.Tensor: _one("add_", KERNEL),  # cuda/CUDALoops.cuh by BinaryOps
    aten.div_.Tensor: _one("norm", KERNEL),  # cuda/BinaryDivTrueKernel.cu
    aten.div.out: _one("norm", KERNEL),  # ... which casts to the result's dtype as it writes
    aten.clamp.default: _one("norm", KERNEL),  # cuda/TensorCompare.cu
    aten.clamp_.default: _one("norm", KERNEL),
    aten.clamp_min.default: _one("norm", KERNEL),  # cuda/TensorCompare.cu
    aten.clamp_min_.default: _one("norm", KERNEL),
    aten.linalg_vector_norm.default: _vector_norm,  # cuda/ReduceNormKernel.cu, cuda/Reduce.cuh
    aten.linalg_vector_norm.out: _vector_norm,
    aten._foreach_lerp_.Scalar: _foreach("lerp_", 2),  # cuda/ForeachTernaryOp.cu
    aten._foreach_lerp.Scalar: _foreach("lerp", 3),  # cuda/ForeachTernaryOp.cu
    aten._foreach_mul_.Tensor: _foreach("mul_", 1),  # cuda/ForeachBinaryOpScalarTensor.cu: a CPU scalar is read
    aten._foreach_add_.List: _foreach("add_", 2),  # cuda/ForeachBinaryOpList.cu
    aten.mm.default: _one("gemm", KERNEL),  # cuda/Blas.cpp
    aten.bmm.default: _one("gemm", KERNEL),  # cuda/Blas.cpp
    aten.mm.out: _one("gemm", KERNEL),
    aten.bmm.out: _one("gemm", KERNEL),
    aten.addmm_.default: _one("gemm", KERNEL),  # cuda/Blas.cpp: copies no bias where it is the result
    aten.baddbmm_.default: _one("gemm", KERNEL),
    aten.eq.Tensor_out: _one("diagonal", KERNEL),  # cuda/CompareEQKernel.cu: casts to the result's dtype as it writes
    aten.add.Tensor: _one("diagonal", KERNEL),  # cuda/CUDALoops.cuh by BinaryOps; identity and a Gram matrix
    aten.add.out: _one("diagonal", KERNEL),
    aten.addcmul_.default: _one("add_", KERNEL),  # cuda/PointwiseOpsKernel.cu
    aten.mul.out: _one("scalar", KERNEL),  # of a learning rate that is a tensor
    aten.add_.Scalar: _one("scalar", KERNEL),
    aten.addmm.default: _gemm_with_bias,  # cuda/Blas.cpp: addmm_out_cuda_impl
    aten.baddbmm.default: _gemm_with_bias,  # cuda/Blas.cpp: baddbmm_out_cuda_impl
    aten.addmm.out: _gemm_with_bias,
    aten.baddbmm.out: _gemm_with_bias,
    torch.ops.c10d.alltoall_base_.default: _one("all_to_all", Activity(collectives=1)),  # one collective kernel
}

#: Operators that only allocate, or make a view without being marked as such: no device activity.
SILENT = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.new_empty.default,
        aten._unsafe_view.default,
    }
)


def activity_of(
    operator: Any, arguments: Arguments, keywords: dict[str, Any], result: Any, toolchain: Toolchain
) -> Parts:
    """The (part, activity) entries of one dispatched operator.

    Raises:
        NotImplementedError: there is no rule for it; it is named.
    """
    if operator in RULES:
        return RULES[operator](arguments, keywords, result, toolchain)
    if operator in SILENT or operator.is_view:
        return ()
    raise NotImplementedError(
        f"no rule says what {operator} launches on a GPU: add one to distmuon.counting.rules.RULES, with its source"
    )
