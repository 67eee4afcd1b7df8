"""State dicts: what they hold for each parameter of an optimizer, by name where both sides have names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from distmuon.parameters import Group, names_of
from distmuon.planning.matrices import clean_name, matrix_rows

_SHOWN = 4  # names in a message


class Matched(NamedTuple):
    """A state dict in the order of an optimizer.

    Attributes:
        groups: the optimizer's groups with the settings that were saved.
        momenta: what was saved for each of their parameters, None where nothing was.
    """

    groups: list[Group]
    momenta: list[Tensor | None]


def match(groups: Sequence[Group], state_dict: Mapping[str, Any]) -> Matched:
    """Find what a state dict holds for each parameter.

    Args:
        groups: of the optimizer.
        state_dict: of DistMuon or ``torch.optim.Muon``. Where the parameters of both sides have names they are matched
            by name, whatever their order and groups; else by position.

    Raises:
        ValueError: it is of other parameters (says what is missing and what is extra), shapes or matrices, or of
            another optimizer; or the parameters of one group were saved with several settings.
    """
    named = [list(zip(names_of(number, group), group["params"], strict=True)) for number, group in enumerate(groups)]
    own = [each for of_group in named for each in of_group]
    theirs = state_dict["param_groups"]
    by_name = _have_names(groups) and _have_names(theirs)
    sources = _by_name([name for name, _ in own], theirs) if by_name else _by_position(groups, theirs)
    momenta: list[Tensor | None] = []
    for (name, parameter), (_, key) in zip(own, sources, strict=True):
        state = state_dict["state"].get(key) or {}
        momentum = state.get("momentum_buffer")
        if state and momentum is None:
            raise ValueError(f"parameter {name!r} has {sorted(state)} in the state dict, not Muon's momentum_buffer")
        if momentum is not None and momentum.shape != parameter.shape:
            shapes = f"{tuple(momentum.shape)}, but the parameter has {tuple(parameter.shape)}"
            raise ValueError(f"the momentum of parameter {name!r} in the state dict has shape {shapes}")
        momenta.append(momentum)
    source = iter(sources)
    return Matched(
        [
            _with_settings(of_group, group, [next(source)[0] for _ in of_group])
            for of_group, group in zip(named, groups, strict=True)
        ],
        momenta,
    )


@contextmanager
def loading(optimizer: Optimizer) -> Iterator[None]:
    """While entered, ``Optimizer.load_state_dict`` loads what matches, and momenta in place and in their own dtype.

    By itself it goes by position and casts state to the dtype of the parameter.
    """
    state = dict(optimizer.state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    # The last of the hooks before and the first of those after: the others see all of a state dict, all of a state.
    def take(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        groups, momenta = match(optimizer.param_groups, state_dict)
        own = [state[parameter]["momentum_buffer"] for parameter in parameters]
        placed = [None if m is None else placed_like(m, like) for m, like in zip(momenta, own, strict=True)]
        for parameter, momentum, value in zip(parameters, own, placed, strict=True):
            if value is not None:
                momentum.copy_(value)
            elif parameter.requires_grad:
                momentum.zero_()
        return {"state": {}, "param_groups": [group | {"params": range(len(group["params"]))} for group in groups]}

    def keep(_: Optimizer) -> None:
        optimizer.state.update(state)

    handles = [
        optimizer.register_load_state_dict_pre_hook(take),
        optimizer.register_load_state_dict_post_hook(keep, prepend=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def placed_like(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, or a DTensor on the same mesh, as another tensor is placed."""
    if not isinstance(like, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    if isinstance(value, DTensor):
        return value.redistribute(like.device_mesh, like.placements)
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _have_names(groups: Iterable[Group]) -> bool:
    # torch.distributed.checkpoint has done the matching, and numbers parameters by strings: the names beside them are
    # in the order in which they were saved.
    return all("param_names" in group and not any(isinstance(p, str) for p in group["params"]) for group in groups)


def _by_name(own: Sequence[str], theirs: Sequence[Group]) -> list[tuple[Group, Any]]:
    """For each name the group that it was saved in, and its key in the state."""
    saved = {
        clean_name(name): (group, key)
        for group in theirs
        for name, key in zip(group["param_names"], group["params"], strict=True)
    }
    missing = [name for name in own if name not in saved]
    extra = [name for name in saved if name not in own]
    if missing or extra:
        raise ValueError(other_parameters("the state dict", missing, extra))
    return [saved[name] for name in own]


def _by_position(groups: Sequence[Group], theirs: Sequence[Group]) -> list[tuple[Group, Any]]:
    own_sizes, sizes = ([len(group["params"]) for group in each] for each in (groups, theirs))
    if own_sizes != sizes:
        raise ValueError(
            f"the state dict has groups of {sizes} parameters, this optimizer of {own_sizes}. Give both named "
            "parameters, as from model.named_parameters(), to have them matched by name"
        )
    return [(group, key) for group in theirs for key in group["params"]]


def _with_settings(own: Sequence[tuple[str, Tensor]], group: Group, sources: Sequence[Group]) -> Group:
    """A group with the settings of those that its parameters were saved in. What its matrices are stays."""
    settings = [{k: v for k, v in source.items() if k not in ("params", "param_names")} for source in sources]
    different = next((name for (name, _), each in zip(own, settings, strict=True) if each != settings[0]), None)
    if different:
        raise ValueError(
            f"parameters {own[0][0]!r} and {different!r} are in one group, but were saved with different settings: "
            "make groups as they were"
        )
    saved = settings[0] if settings else {}
    for name, parameter in own if "row_blocks" in saved else ():
        refuse_other_matrices(name, tuple(parameter.shape), group["row_blocks"], saved["row_blocks"])
    return {**group, **saved, "row_blocks": group["row_blocks"]}


def refuse_other_matrices(name: str, shape: tuple[int, ...], own: Any, saved: Any) -> None:
    """Refuse to go on with other matrices than a parameter was trained as.

    Args:
        name: of the parameter.
        shape: of it, global.
        own: ``row_blocks`` of its group, a dict or as :func:`opaque` makes them.
        saved: likewise, those that were saved.

    Raises:
        ValueError: they cut it otherwise; names both cuts.
    """
    here, there = (matrix_rows(name, shape, None if each is None else dict(each)) for each in (own, saved))
    if here != there:
        raise ValueError(
            f"parameter {name!r} is matrices of {here} rows, but was saved as matrices of {there}: give the "
            "row_blocks that it was trained with, or take row_blocks out of the state dict's groups"
        )


def opaque(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict, changed in place, whose ``row_blocks`` are tuples of pairs.

    ``torch.distributed.checkpoint`` goes into a dict: it would look for the same patterns in what was saved, and write
    what it finds into the group's own dict.
    """
    for group in state_dict["param_groups"]:
        if group.get("row_blocks") is not None:
            group["row_blocks"] = tuple(group["row_blocks"].items())
    return state_dict


def other_parameters(what: str, missing: Sequence[str], extra: Sequence[str]) -> str:
    """The message for a state or checkpoint of another set of parameters."""

    def shown(names: Sequence[str]) -> str:
        return f"{len(names)} ({', '.join(names[:_SHOWN])}{', ...' * (len(names) > _SHOWN)})" if names else "none"

    return f"{what} is of other parameters: {shown(missing)} missing in it, {shown(extra)} extra in it"
