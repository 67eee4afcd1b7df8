"""Notebook parameters with declared types, checked before a kernel starts.

The cell tagged ``parameters`` declares them: assignments of literals, best with an annotation and a comment::

    ranks: int = 4  # processes, one device each
    variants: list[str] = ["baseline", "batched"]  # the first is what others are compared with
    out: str | None = None  # folder for files

What the command line or a YAML file gives is kept as written until the declared type reads it, so a tag ``12e3`` stays
a string and ``1e-3`` becomes a float. An unknown name or a text that the type cannot read is an error.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import yaml

from distmuon.names import choose

#: The parameter for the folder of a notebook's own files; not given, a run fills it with a folder inside its own.
FOLDER_PARAMETER = "out"

_SCALARS: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Parameter:
    """One declared parameter of a notebook.

    Attributes:
        name: the variable's name.
        scalar: its type, or that of a list's items.
        many: it is a list.
        optional: it may be None.
        default: the value in the notebook.
        help: the comment behind the assignment.
    """

    name: str
    scalar: type
    many: bool
    optional: bool
    default: object
    help: str = ""

    @property
    def declared(self) -> str:
        """The declared type, as it is written in a notebook."""
        kind = f"list[{self.scalar.__name__}]" if self.many else self.scalar.__name__
        return f"{kind} | None" if self.optional else kind

    def read(self, given: object) -> object:
        """The value that ``given`` stands for: a text, a list of texts (``[a, b]`` or ``a, b``), or a Python value.

        Raises:
            ValueError: the declared type cannot read it.
        """
        if given is None or (self.optional and isinstance(given, str) and given.lower() in ("none", "null")):
            if not self.optional:
                raise self._unreadable(given)
            return None
        if not self.many:
            return self._read_scalar(given)
        if isinstance(given, str):
            given = as_written(given if given.lstrip().startswith("[") else f"[{given}]")
        if not isinstance(given, list | tuple):
            raise self._unreadable(given)
        return [self._read_scalar(item) for item in given]

    def _read_scalar(self, given: object) -> object:
        try:
            if isinstance(given, str):
                return _BOOLEANS[given.lower()] if self.scalar is bool else self.scalar(given)
        except (ValueError, KeyError):
            raise self._unreadable(given) from None
        if type(given) is self.scalar:
            return given
        if type(given) is int and self.scalar is float:
            return float(given)
        raise self._unreadable(given)

    def _unreadable(self, given: object) -> ValueError:
        return ValueError(f"parameter {self.name!r} is declared as {self.declared}, which {given!r} is not")


def as_written(text: str) -> object:
    """Read YAML with every scalar but null as the text that was written: no ``on`` to True, no ``007`` to 7."""
    return yaml.load(text, Loader=_AsWritten)


def read_yaml(path: Path) -> object:
    """The content of a YAML file, scalars as they were written.

    Raises:
        ValueError: it is not YAML, or gives a name twice.
    """
    try:
        return as_written(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} can't be read as YAML: {error}") from error


def load_parameters(path: Path) -> dict[str, object]:
    """The parameters of a YAML file, as written.

    Raises:
        ValueError: the file can't be read, or does not hold a mapping from names to values.
    """
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} must map parameter names to values, like 'ranks: 4'")
    return content


def resolve(declared: Mapping[str, Parameter], given: Mapping[str, object]) -> dict[str, object]:
    """Read each given parameter by its declared type.

    Raises:
        ValueError: an unknown name (the message gives the nearest one), or a value that its type cannot read.
    """
    return {name: declared[choose("parameter", name, declared)].read(value) for name, value in given.items()}


def declared_parameters(notebook: nbformat.NotebookNode) -> dict[str, Parameter]:
    """The parameters that a notebook declares, in order; empty when it has no cell tagged ``parameters``.

    Raises:
        ValueError: the cell holds something else than assignments of literals, or a type that cannot be given.
    """
    source = tagged_source(notebook, "parameters")
    statements, comments = _statements(source), _comments(source)
    parameters = [_declaration(node, comments.get(node.end_lineno or 0, "")) for node in statements]
    return {parameter.name: parameter for parameter in parameters}


def default_parameters(notebook: nbformat.NotebookNode) -> dict[str, object]:
    """The values that its cell tagged ``parameters`` gives."""
    return {name: parameter.default for name, parameter in declared_parameters(notebook).items()}


def actual_parameters(notebook: nbformat.NotebookNode) -> dict[str, object]:
    """The values that a notebook ran with: its defaults, and over them those that papermill injected."""
    values = default_parameters(notebook)
    for node in _statements(tagged_source(notebook, "injected-parameters")):
        name, _, value = _assignment(node)
        values[name] = _literal(value, name)
    return values


def tagged_source(notebook: nbformat.NotebookNode, tag: str) -> str:
    """The source of the first cell with that tag, or an empty string."""
    return next((cell.source for cell in notebook.cells if tag in cell.metadata.get("tags", [])), "")


class _AsWritten(yaml.SafeLoader):
    """YAML whose scalars stay text, but for null, and whose mappings have each name once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if names.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
        return super().construct_mapping(node, deep)


for _tag in ("bool", "int", "float", "timestamp"):
    _AsWritten.add_constructor(f"tag:yaml.org,2002:{_tag}", yaml.SafeLoader.construct_yaml_str)  # type: ignore[type-var]


def _statements(source: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except SyntaxError as error:
        raise ValueError(f"the parameters cell is not Python: {error}") from None


def _assignment(node: ast.stmt) -> tuple[str, ast.expr | None, ast.expr]:
    """Name, annotation and value of ``name: annotation = value``."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        return node.target.id, node.annotation, node.value
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id, None, node.value
    raise ValueError(f"a parameters cell holds assignments like 'ranks: int = 4', not {ast.unparse(node)!r}")


def _literal(value: ast.expr, name: str) -> object:
    if ast.unparse(value) in ("float('nan')", "float('inf')", "float('-inf')"):  # as papermill writes them
        return float(ast.literal_eval(value.args[0]))  # type: ignore[attr-defined]
    try:
        return ast.literal_eval(value)
    except ValueError:
        raise ValueError(f"parameter {name!r} needs a literal default, not {ast.unparse(value)!r}") from None


def _declaration(node: ast.stmt, comment: str) -> Parameter:
    name, annotation, value = _assignment(node)
    default = _literal(value, name)
    optional = default is None
    if annotation is None:
        sample = next(iter(default), "") if isinstance(default, list | tuple) else default
        many, kind = isinstance(default, list | tuple), type(sample).__name__
    else:
        text = ast.unparse(annotation)
        optional = text.endswith(" | None")
        kind = text.removesuffix(" | None")
        many = kind.startswith("list[")
        kind = kind.removeprefix("list[").removesuffix("]")
    if kind not in _SCALARS:
        raise ValueError(
            f"parameter {name!r}: a type {kind!r} cannot be given from outside;"
            " declare str, int, float, bool or a list of one of them, with '| None' where it may be left out"
        )
    parameter = Parameter(name, _SCALARS[kind], many, optional, default, comment)
    parameter.read(default)  # a default that its own type refuses is the notebook's mistake
    return parameter


def _comments(source: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
