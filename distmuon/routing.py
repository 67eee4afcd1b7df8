"""Which parameters go to Muon and which to AdamW, decided by what their modules are, and shown as a table.

Muon takes matrices that map features to features: weights of linear layers, routers, stacks of experts. Embeddings and
output heads look like matrices but map between features and words, and norms and biases are none: AdamW has those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from distmuon.checks import check_patterns, check_row_blocks
from distmuon.planning.matrices import RowBlocks, clean_name, matrix_rows, refuse_unmatched
from distmuon.richtext import counted, html_table

MUON, ADAMW, NEITHER = "Muon", "AdamW", "-"

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Route:
    """Where one parameter goes.

    Attributes:
        name: with the prefixes of wrappers taken off; of a tied parameter the first.
        shape: global.
        matrices: that Muon orthogonalises; 0 unless it is Muon's.
        optimizer: "Muon", "AdamW", or "-" for a frozen parameter, which is given to neither.
        reason: why.
    """

    name: str
    shape: tuple[int, ...]
    matrices: int
    optimizer: str
    reason: str


@dataclass(frozen=True)
class RoutingTable:
    """A row a parameter, in the model's order. Prints aligned in a terminal and as a table in a notebook."""

    rows: tuple[Route, ...]

    def __iter__(self) -> Iterator[Route]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> Route:
        """The row of that parameter.

        Raises:
            KeyError: there is none.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    @property
    def summary(self) -> str:
        """One line: parameters of each optimizer, and the matrices that Muon orthogonalises."""
        count = {to: sum(row.optimizer == to for row in self.rows) for to in (MUON, ADAMW, NEITHER)}
        frozen = f", {count[NEITHER]:,} frozen" if count[NEITHER] else ""
        muon, adamw = (counted(count[to], "parameter", "parameters") for to in (MUON, ADAMW))
        matrices = counted(sum(row.matrices for row in self.rows), "matrix", "matrices")
        return f"Muon: {muon}, {matrices}; AdamW: {adamw}{frozen}"

    def __str__(self) -> str:
        header, *cells = self._cells()
        widths = [max(len(row[column]) for row in (header, *cells)) for column in range(len(header))]
        right = header.index("matrices")
        lines = []
        for row in (header, ["-" * width for width in widths], *cells):
            padded = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
            padded[right] = row[right].rjust(widths[right])
            lines.append("  ".join(padded).rstrip())
        return "\n".join([*lines, self.summary])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        header, *cells = self._cells()
        return html_table(header, cells, [name == "matrices" for name in header], caption=self.summary)

    def _cells(self) -> list[tuple[str, ...]]:
        rows = [
            (row.name, " x ".join(map(str, row.shape)) or "scalar", str(row.matrices or "-"), row.optimizer, row.reason)
            for row in self.rows
        ]
        return [tuple(field.name for field in fields(Route)), *rows]


@dataclass(frozen=True, repr=False)
class Split:
    """Parameter groups for the two optimizers, and why each parameter is where it is. Prints as its table's summary.

    Attributes:
        muon: for ``DistMuon``: one group with ``params``, ``param_names`` and ``row_blocks``; empty if it gets nothing.
        adamw: for ``torch.optim.AdamW``: one group with ``params`` and ``param_names``; empty if it gets nothing.
        table: a row a parameter.
    """

    muon: list[dict[str, Any]]
    adamw: list[dict[str, Any]]
    table: RoutingTable

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.table.summary}>"

    def _repr_html_(self) -> str:
        return self.table._repr_html_()


def split_parameters(
    model: nn.Module, *, row_blocks: RowBlocks | None = None, muon: Sequence[str] = (), adamw: Sequence[str] = ()
) -> Split:
    """Split a model's parameters between Muon and AdamW by what their modules are.

    To AdamW go embeddings, output heads (what ``get_output_embeddings()`` returns, a weight tied to an embedding, a
    matrix with as many rows as an embedding has, or as the one that ``get_input_embeddings()`` returns), kernels of
    convolutions, and all that is no matrix. To Muon go the matrices of linear layers, routers and other modules, and
    3-D stacks of experts. Frozen parameters go to neither. The model may be wrapped, sharded (DTensors) or on "meta".

    Args:
        model: whose parameters to split.
        row_blocks: pattern -> rows of each matrix, as ``DistMuon`` takes it; kept in the Muon group.
        muon: patterns (``fnmatchcase``) of names that go to Muon whatever their module is, frozen or not.
        adamw: patterns of names that go to AdamW whatever their module is, frozen or not.

    Raises:
        TypeError: the model, patterns, or ``row_blocks``, are not what they should be.
        ValueError: a pattern matches nothing, or one parameter both ways; a pattern sends to Muon what is no matrix;
            ``row_blocks`` names a parameter that is not Muon's, or does not add up; nothing at all goes to Muon.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: give the module whose parameters to split")
    for kind, patterns in (("muon", muon), ("adamw", adamw)):
        check_patterns(kind, patterns)
    check_row_blocks({} if row_blocks is None else row_blocks)
    found = _find_parameters(model)
    every_name = [name for parameter in found for name in parameter.names]
    refuse_unmatched("muon", muon, every_name)
    refuse_unmatched("adamw", adamw, every_name)
    heads = _Heads(model)
    groups: dict[str, dict[str, Any]] = {to: {"params": [], "param_names": []} for to in (MUON, ADAMW, NEITHER)}
    rows = []
    for parameter in found:
        optimizer, reason = _by_pattern(parameter, muon, adamw) or _by_module(parameter, heads)
        shape = tuple(parameter.tensor.shape)
        matrices = 0
        if optimizer == MUON:
            blocks = matrix_rows(parameter.name, shape, row_blocks)
            matrices = len(blocks) * (shape[0] if len(shape) == 3 else 1)
            if len(blocks) > 1:
                reason += f", cut into {_rows_text(blocks)}"
        groups[optimizer]["params"].append(parameter.tensor)
        groups[optimizer]["param_names"].append(parameter.name)
        rows.append(Route(parameter.name, shape, matrices, optimizer, reason))
    table = RoutingTable(tuple(rows))
    _refuse_row_blocks_elsewhere(row_blocks or {}, table)
    if not groups[MUON]["params"] and not adamw:
        raise ValueError(f"nothing in the model is a matrix for Muon; has a wrapper flattened its parameters?\n{table}")
    groups[MUON]["row_blocks"] = dict(row_blocks or {})
    to_muon, to_adamw = ([groups[to]] if groups[to]["params"] else [] for to in (MUON, ADAMW))
    return Split(to_muon, to_adamw, table)


def _refuse_row_blocks_elsewhere(row_blocks: RowBlocks, table: RoutingTable) -> None:
    """Refuse a row_blocks pattern that matches no parameter, or none of Muon's."""
    refuse_unmatched("row_blocks", row_blocks, (row.name for row in table))
    for pattern in row_blocks:
        matched = [row for row in table if fnmatchcase(row.name, pattern)]
        if not any(row.optimizer == MUON for row in matched):
            row = matched[0]
            raise ValueError(
                f"row_blocks pattern {pattern!r} matches {row.name!r}, which Muon does not get "
                f"({row.reason}): drop the pattern, or send the parameter to Muon with muon=[{row.name!r}]"
            )


@dataclass(frozen=True)
class _Found:
    """A parameter, every name it has in the model, and the modules that hold it under those names."""

    tensor: nn.Parameter
    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]

    @property
    def name(self) -> str:
        return self.names[0]


def _find_parameters(model: nn.Module) -> list[_Found]:
    """Each parameter once, in the model's order; a tied one with all its names and modules."""
    names: dict[int, list[str]] = {}
    modules: dict[int, list[nn.Module]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, tensor in module.named_parameters(recurse=False):
            tensors[id(tensor)] = tensor
            names.setdefault(id(tensor), []).append(clean_name(f"{prefix}.{leaf}" if prefix else leaf))
            modules.setdefault(id(tensor), []).append(module)
    return [_Found(tensor, tuple(names[key]), tuple(modules[key])) for key, tensor in tensors.items()]


class _Heads:
    """What is known of a model's output heads: which parameters it declares, and how many words there are."""

    def __init__(self, model: nn.Module) -> None:
        modules = {clean_name(name): module for name, module in model.named_modules()}
        self.declared = {key for module in modules.values() for key in _declared(module, "get_output_embeddings")}
        # A model that declares its input embeddings also has others, of positions say, whose rows are no words.
        declaring = [module for module in modules.values() if _declared(module, "get_input_embeddings")]
        words = {key for module in declaring for key in _declared(module, "get_input_embeddings")}
        others = {id(parameter) for module in declaring for parameter in module.parameters()} - words
        self.vocabularies = {  # rows -> name of the embedding
            module.num_embeddings: name
            for name, module in modules.items()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and id(module.weight) not in others
        }

    def reason(self, parameter: _Found) -> str | None:
        """Why the parameter is a head's, or None."""
        if id(parameter.tensor) in self.declared:
            return "output head: get_output_embeddings()"
        outputs = parameter.tensor.shape[0]
        if parameter.tensor.ndim == 2 and outputs in self.vocabularies:
            return f"output head: {outputs} outputs, as many as {self.vocabularies[outputs]} has rows"
        return None


def _declared(module: nn.Module, method: str) -> set[int]:
    """Ids of the parameters of the module that ``method`` returns, wrapped or not; none without such an answer."""
    asked = getattr(module, method, None)
    try:
        answer = asked() if callable(asked) else None
    except NotImplementedError:  # a base class that leaves it to its subclasses
        return set()
    return {id(parameter) for parameter in answer.parameters()} if isinstance(answer, nn.Module) else set()


def _kind(module: nn.Module) -> str:
    """Name of a module's class; ``fully_shard`` has put FSDP before it."""
    return type(module).__name__.removeprefix("FSDP")


def _by_pattern(parameter: _Found, muon: Sequence[str], adamw: Sequence[str]) -> tuple[str, str] | None:
    """The optimizer that the user's patterns name, and which pattern."""
    hits = [
        (optimizer, pattern)
        for optimizer, patterns in ((MUON, muon), (ADAMW, adamw))
        for pattern in patterns
        if any(fnmatchcase(name, pattern) for name in parameter.names)
    ]
    if len({optimizer for optimizer, _ in hits}) > 1:
        both = " and ".join(f"{optimizer.lower()} pattern {pattern!r}" for optimizer, pattern in hits)
        raise ValueError(f"parameter {parameter.name!r} is matched both ways, by {both}")
    return (hits[0][0], f"asked for by {hits[0][1]!r}") if hits else None


def _by_module(parameter: _Found, heads: _Heads) -> tuple[str, str]:
    """The optimizer that the parameter's own modules call for, and why."""
    tensor, leaf = parameter.tensor, parameter.name.rpartition(".")[2]
    kinds = [_kind(module) for module in parameter.modules]
    tied = f", tied to {', '.join(parameter.names[1:])}" if len(parameter.names) > 1 else ""
    if not tensor.requires_grad:
        return NEITHER, "frozen: requires_grad is False"
    if tensor.ndim < 2:
        return ADAMW, f"{tensor.ndim}-D: no matrix{tied}"
    if any("Embedding" in kind for kind in kinds):
        return ADAMW, f"embedding{tied}"
    if head := heads.reason(parameter):
        return ADAMW, head + tied
    if any(isinstance(module, _CONVOLUTIONS) for module in parameter.modules):
        return ADAMW, f"kernel of {kinds[0]}{tied}"
    if tensor.ndim > 3:
        return ADAMW, f"{tensor.ndim}-D: no stack of matrices{tied}"
    if leaf.endswith("bias") or any("Norm" in kind for kind in kinds):  # one for each expert or head, stacked
        return ADAMW, f"stack of {'biases' if leaf.endswith('bias') else 'norms'}{tied}"
    if any(isinstance(module, nn.Linear) for module in parameter.modules):
        return MUON, f"linear layer{tied}"
    if 1 in tensor.shape:  # class tokens, learned positions, gains
        return ADAMW, f"a vector: one side is 1{tied}"
    return MUON, f"{'matrix' if tensor.ndim == 2 else f'stack of {tensor.shape[0]} matrices'} of {kinds[0]}{tied}"


def _rows_text(blocks: tuple[int, ...]) -> str:
    if len(set(blocks)) == 1:
        return f"{len(blocks)} of {blocks[0]} rows"
    return f"{len(blocks)} of {', '.join(map(str, blocks))} rows"
