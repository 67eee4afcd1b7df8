"""Agreement: what only the ranks together can see is compared before any exchange, and an error of one is one of all.

Through objects on the host, in a group of all ranks that takes them; never in a step, unless a setting asks for it.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import pickle
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import default_pg_timeout

#: For each mesh, by its global ranks, what this rank is about to do with it: (what, value) items in order.
Claims = Mapping[tuple[int, ...], Sequence[tuple[str, str]]]

#: Made beside a default group that does not serve the CPU, as long as that lives.
_MADE: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def host_group() -> dist.ProcessGroup | None:
    """A group of all ranks that takes host objects: the default group if it serves the CPU, else a gloo group made
    once beside it, with its time-out; None without a default group.

    Raises:
        RuntimeError: a rank has not come here within the time-out.
    """
    world = dist.group.WORLD
    if world is None or "cpu:" in dist.get_backend_config(world):
        return world
    if world not in _MADE:
        limit = time_out(world)
        try:
            _MADE[world] = dist.new_group(backend="gloo", timeout=limit)
        except RuntimeError as error:
            raise _absence(limit, str(error)) from None
    return _MADE[world]


def time_out(group: dist.ProcessGroup) -> timedelta:
    """How long its collectives wait, as ``init_process_group`` or ``new_group`` was told."""
    # Torch has no public way to ask, and asks so itself; a backend without options waits for what is torch's default.
    try:
        return group._get_backend(group._device_types[-1]).options._timeout
    except (AttributeError, RuntimeError):
        return default_pg_timeout


def refuse(error: Exception) -> NoReturn:
    """Raise on every rank what this one has found before it could construct an optimizer, as the others now do.

    Collective, as the construction is that it stands for.

    Raises:
        Exception: ``error``, and on the other ranks a ``ValueError`` that names it.
    """
    group = host_group()
    if group:
        agree({}, error, group)
    raise error


def agree(claims: Claims, error: Exception | None, group: dist.ProcessGroup, *, parameters: bool = True) -> None:
    """Raise on every rank of ``group``, or on none.

    One small collective if all is well, of digests; where ranks differ a second one fetches the claims themselves.

    Args:
        claims: must be equal on the ranks of each mesh.
        error: what this rank found wrong by itself, if anything.
        group: of all ranks.
        parameters: whether this rank has any.

    Raises:
        ValueError: ranks differ, none has parameters, or another rank found an error; names the first difference and
            the ranks.
        RuntimeError: a rank has not come here within the time-out of the group.
        Exception: ``error`` itself, on the rank that found it.
    """
    try:
        _meet(group)
    except RuntimeError as absent:
        raise error or absent from None
    digests = {mesh: hashlib.sha256(repr(tuple(items)).encode()).hexdigest() for mesh, items in claims.items()}
    gathered = gather("compares parameters and settings", (digests, told(error), parameters), group)
    raise_first(error, [message for _, message, _ in gathered], "could not set up DistMuon, so no rank can")
    if not any(has_some for *_, has_some in gathered):
        raise ValueError("there are no parameters on any rank: give at least one")
    meshes = sorted({mesh for theirs, *_ in gathered for mesh in theirs})
    different = [mesh for mesh in meshes if len({gathered[rank][0].get(mesh) for rank in mesh}) > 1]
    if different:
        everything = gather("finds the difference", dict(claims), group)
        mesh = different[0]
        raise ValueError(_first_difference(mesh, {rank: everything[rank].get(mesh, ()) for rank in mesh}))


def _meet(group: dist.ProcessGroup) -> None:
    """Wait until all ranks are here, as far as the backend can say who is not."""
    if dist.get_backend(group) != dist.Backend.GLOO:
        return
    limit = time_out(group)
    try:
        dist.monitored_barrier(group, limit, wait_all_ranks=True)
    except RuntimeError as error:
        # The first rank hears from all of them; the others hear from it alone, or don't.
        first = dist.get_rank(group) == 0
        said = str(error) if first else "Rank 0 is missing, or raised the error that says who is"
        raise _absence(limit, said) from None


def _absence(limit: timedelta, said: str) -> RuntimeError:
    return RuntimeError(
        f"not all ranks set up DistMuon within the time-out, {limit}; where torch.distributed is initialized it takes "
        f"all of them to construct it, to add a group and to copy it, also those with plain tensors. {said}"
    )


def collective_failure(what: str, group: dist.ProcessGroup, error: RuntimeError) -> RuntimeError:
    """What to raise from the error of a collective, so that it says where it happened.

    Args:
        what: the collective, and what it is for.
        group: of the collective.
        error: which becomes the cause.
    """
    ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
    return RuntimeError(
        f"on rank {dist.get_rank()} {what} among ranks {ranks} failed: one of them died, stopped, came too late or "
        f"raised alone ({str(error).splitlines()[0]})"
    )


def told(error: Exception | None) -> str | None:
    """An error as the other ranks are told of it."""
    return None if error is None else f"{type(error).__name__}: {error}"


def raise_first(error: Exception | None, messages: Sequence[str | None], what: str) -> None:
    """Raise where any rank has found an error; on all of them, as all have these messages.

    Args:
        error: of this rank.
        messages: what each rank has :func:`told`, by rank.
        what: the rank with an error does or does not do, and what follows for the others.

    Raises:
        Exception: ``error`` itself, on a rank that has one.
        ValueError: another one has; names the first of them.
    """
    if error:
        raise error
    for rank, message in enumerate(messages):
        if message:
            raise ValueError(f"rank {rank} {what}: {message}")


def gather(what: str, value: object, group: dist.ProcessGroup | None) -> list:
    """The values of all ranks, by rank; without a group that of this rank alone.

    Args:
        what: it is gathered for, as an error names it.
        value: of this rank.
        group: that takes host objects.

    Raises:
        RuntimeError: another rank has gone.
    """
    if group is None:
        return [value]
    # As all_gather_object does it, but that needs NumPy, which torch does not install.
    mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    try:
        dist.all_gather(sizes, torch.tensor([mine.numel()]), group=group)
        longest = max(int(size) for size in sizes)
        gathered = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(gathered, nn.functional.pad(mine, (0, longest - mine.numel())), group=group)
    except RuntimeError as error:
        raise collective_failure(f"the all_gather that {what}", group, error) from error
    return [
        pickle.loads(ctypes.string_at(held.data_ptr(), int(size))) for held, size in zip(gathered, sizes, strict=True)
    ]


def _first_difference(mesh: tuple[int, ...], claims: Mapping[int, Sequence[tuple[str, str]]]) -> str:
    absent = ("nothing", "nothing")
    for items in itertools.zip_longest(*claims.values(), fillvalue=absent):
        if len(set(items)) == 1:
            continue
        ranks_by_value: dict[str, list[int]] = {}
        for rank, (_, value) in zip(claims, items, strict=True):
            ranks_by_value.setdefault(value, []).append(rank)
        what = next(item[0] for item in items if item is not absent)
        said = "; ".join(f"rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}: {v}" for v, r in ranks_by_value.items())
        return f"the ranks of mesh {mesh} disagree on {what}. {said}"
    raise AssertionError("the claims are equal")
