"""Where a step's matrices are: who holds which part of them, and who orthogonalises them. As tables and as a figure."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from distmuon.names import choose
from distmuon.planning.assignment import group_matrices
from distmuon.planning.matrices import Matrix
from distmuon.planning.plan import Plan, plan_step
from distmuon.planning.runs import regions
from distmuon.richtext import NBSP, counted
from distmuon.studies.style import WIDTH

# Rank by rank, from dark to light and back, so that neighbours differ in grey as well; with the ink to write on them.
_RANKS = (
    ("#0B3C5D", "white"),
    ("#F1A340", "black"),
    ("#3F88C5", "white"),
    ("#D9D9D9", "black"),
    ("#7F3B08", "white"),
    ("#A6CEE3", "black"),
    ("#009E73", "white"),
    ("#FEE0B6", "black"),
)


def regions_table(plan: Plan) -> pd.DataFrame:
    """Every region of every matrix of a plan.

    Returns:
        A row a region: ``parameter``, ``matrix`` (its number within the parameter), ``rows`` and ``cols`` of the
        matrix, ``rank`` that holds the region, ``owner`` that orthogonalises the matrix; ``row``, ``col`` where the
        region begins in the matrix, ``region_rows``, ``region_cols`` and ``numel``.

    Raises:
        ValueError: a parameter without a mesh, which no other rank holds a part of.
    """
    owners = _owners(plan)
    rows = []
    for index, spec in enumerate(plan.parameters):
        if spec.storage is None:
            raise ValueError(f"parameter {spec.name!r} is a plain tensor: it has no regions on other ranks")
        matrices = list(_matrices(plan, index))
        numbers = {matrix: number for number, matrix in enumerate(matrices)}
        for rank in spec.storage.ranks:
            runs = spec.runs(rank)
            for matrix in matrices:
                for _, region in regions(matrix, runs):
                    rows.append(
                        {
                            "parameter": spec.name,
                            "matrix": numbers[matrix],
                            "rows": matrix.rows,
                            "cols": matrix.cols,
                            "rank": rank,
                            "owner": owners[matrix],
                            "row": region.row,
                            "col": region.col,
                            "region_rows": region.rows,
                            "region_cols": region.cols,
                            "numel": region.numel,
                        }
                    )
    return pd.DataFrame(rows).sort_values(["parameter", "matrix", "row", "col", "rank"], ignore_index=True)


def of_parameter(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """The rows of one parameter, with the columns that a reader needs.

    Raises:
        ValueError: there is none of that name; the message gives the nearest.
    """
    rows = table[table["parameter"] == choose("parameter", name, dict.fromkeys(table["parameter"]))]
    return pd.DataFrame(
        {
            "matrix": rows["matrix"],
            "its size": rows["rows"].astype(str) + f"{NBSP}x{NBSP}" + rows["cols"].astype(str),
            "held by rank": rows["rank"],
            "rows from": rows["row"],
            "to": rows["row"] + rows["region_rows"],
            "columns from": rows["col"],
            "to ": rows["col"] + rows["region_cols"],
            "region (bytes of fp32)": 4 * rows["numel"],
            "orthogonalised by rank": rows["owner"],
        }
    )


def regions_finding(table: pd.DataFrame, name: str) -> str:
    """How many matrices and regions a parameter consists of, and how many of them travel."""
    rows = table[table["parameter"] == name]
    matrices = rows["matrix"].nunique()
    away = rows[rows["rank"] != rows["owner"]]
    held = (
        f"{name} is {counted(matrices, 'matrix', 'matrices')}, held in {counted(len(rows), 'region', 'regions')} by "
        f"{counted(rows['rank'].nunique(), 'rank', 'ranks')}"
    )
    if away.empty:
        return f"{held}. Each lies on the rank that orthogonalises its matrix, so nothing travels."
    return (
        f"{held}. {len(away)} of the regions lie on another rank than the one that orthogonalises their matrix: they "
        "travel there, and their part of the result travels back."
    )


def ownership_finding(table: pd.DataFrame) -> str:
    """How much of the model must travel, and how evenly the work is spread."""
    owned = table.drop_duplicates(["parameter", "matrix"])["owner"].value_counts()
    whole = (table.groupby(["parameter", "matrix"])["rank"].nunique() == 1).sum()
    return (
        f"Of {owned.sum()} matrices, {whole} lie whole on one rank; {travelling_share(table):.0%} of all elements lie "
        "on another rank than the one that orthogonalises their matrix, and a rank orthogonalises "
        f"{owned.min()} to {owned.max()}."
    )


def travelling_share(table: pd.DataFrame) -> float:
    """The share of all elements that lie on another rank than the one that orthogonalises their matrix."""
    return float(table.loc[table["rank"] != table["owner"], "numel"].sum() / table["numel"].sum())


def ownership(table: pd.DataFrame) -> Figure:
    """A bar a parameter: left who holds it, matrix by matrix, right who orthogonalises each of its matrices.

    Args:
        table: of :func:`regions_table`.
    """
    names = list(dict.fromkeys(table["parameter"]))
    figure = Figure(figsize=(WIDTH, 1.1 + 0.24 * len(names)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for position, name in enumerate(names):
        rows = table[table["parameter"] == name]
        _bar(left, position, rows, "rank", rows["numel"])
        matrices = rows.drop_duplicates("matrix")
        _bar(right, position, matrices, "owner", matrices["rows"] * matrices["cols"])
    for axis, title in ((left, "who holds what"), (right, "who computes what")):
        axis.set(xlim=(0, 1), ylim=(len(names) - 0.4, -0.6), xticks=[], title=title)
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.tick_params(length=0)
        for side in axis.spines.values():
            side.set_visible(False)
    ranks = sorted(set(table["rank"]) | set(table["owner"]))
    handles = [Patch(color=_RANKS[rank % len(_RANKS)][0], label=f"rank {rank}") for rank in ranks[: len(_RANKS)]]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8.5)
    return figure


def _bar(axis: Axes, position: int, rows: pd.DataFrame, who: str, numel: pd.Series) -> None:
    """One parameter: parts of one matrix touch, matrices stand apart, the rank is written where there is room."""
    total, start, before = numel.sum(), 0.0, None
    for matrix, rank, size in zip(rows["matrix"], rows[who], numel, strict=True):
        width = size / total
        colour, ink = _RANKS[rank % len(_RANKS)]
        axis.add_patch(Rectangle((start, position - 0.38), width, 0.76, facecolor=colour, linewidth=0))
        if before is not None and matrix != before:
            axis.plot([start, start], [position - 0.42, position + 0.42], color="white", linewidth=1.6)
        if width > 0.03:
            axis.text(start + width / 2, position, str(rank), ha="center", va="center", color=ink, fontsize=7)
        start, before = start + width, matrix


def _owners(plan: Plan) -> dict[Matrix, int]:
    """Who orthogonalises each matrix; of replicas that all do, the first."""
    owners: dict[Matrix, int] = {}
    for rank in plan.ranks():
        mine = plan if rank == plan.rank else plan_step(plan.parameters, rank, plan.options)
        for stage in mine.stages:
            if stage.exchange:
                pairs = zip(stage.exchange.matrices, stage.exchange.owners, strict=True)
                owners |= {matrix: stage.exchange.ranks[owner] for matrix, owner in pairs}
        for index, spec in enumerate(plan.parameters):
            whole = [not exchanged for exchanged in plan.options.exchanged(spec)]
            if spec.storage and rank in spec.storage.members:
                for matrix, _ in group_matrices(spec, index, spec.runs(rank), whole):
                    owners.setdefault(matrix, rank)
    return owners


def _matrices(plan: Plan, index: int) -> Iterator[Matrix]:
    spec = plan.parameters[index]
    for batch in range(spec.shape[0] if len(spec.shape) == 3 else 1):
        for row, rows in zip(spec.matrix_starts, spec.matrix_rows, strict=True):
            yield Matrix(index, batch, row, rows, spec.cols)
