"""Parameters of notebooks: what is given becomes the declared type, or is refused by name before a kernel starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from called import call
from nbformat.v4 import new_code_cell, new_notebook
from pages import write_notebook
from sample import PARAMETERS, SAMPLE

from distmuon.reporting.parameters import as_written, declared_parameters, load_parameters, resolve
from distmuon.reporting.request import Request


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("workload", "12e3456", "12e3456"),
        ("workload", "on", "on"),
        ("workload", "007", "007"),
        ("ranks", "8", 8),
        ("ranks", 8, 8),
        ("lr", "1e-3", 1e-3),
        ("lr", 1, 1.0),
        ("nesterov", "off", False),
        ("variants", "baseline, fused", ["baseline", "fused"]),
        ("variants", "[baseline, 007]", ["baseline", "007"]),
        ("variants", "baseline", ["baseline"]),
        ("limit", "3", 3),
        ("limit", "none", None),
        ("limit", None, None),
    ],
)
def test_parameter_becomes_its_declared_type(name: str, given: object, value: object) -> None:
    notebook = new_notebook(cells=[new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})])
    (read,) = resolve(declared_parameters(notebook), {name: given}).values()
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("ranks", "four"),
        ("ranks", "1e3"),
        ("ranks", 4.0),
        ("ranks", True),
        ("ranks", None),
        ("lr", "fast"),
        ("nesterov", "2"),
        ("workload", 7),
        ("workload", ["tiny"]),
        ("variants", {"a": "b"}),
        ("limit", "many"),
    ],
)
def test_value_of_another_type_is_refused_by_name(name: str, given: object) -> None:
    notebook = new_notebook(cells=[new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})])
    with pytest.raises(ValueError, match=f"parameter '{name}' is declared as "):
        resolve(declared_parameters(notebook), {name: given})


def test_yaml_that_gives_a_name_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "given.yaml"
    file.write_text("ranks: 2\nlr: 1e-3\nranks: 4\n")
    with pytest.raises(ValueError, match="'ranks' is given twice"):
        load_parameters(file)


def test_value_that_the_notebook_refuses_starts_no_kernel(tmp_path: Path) -> None:
    check = "from distmuon.workloads import get_workload\nget_workload(workload).layout(ranks, 1)"
    notebook = write_notebook(tmp_path / "n.ipynb", [("code", PARAMETERS, "parameters"), ("code", check, "check")])
    assert Request.of(notebook).parameters["ranks"] == 4
    with pytest.raises(ValueError, match=r"n\.ipynb refuses its parameters: unknown workload 'kimi'; did you mean"):
        Request.of(notebook, {"workload": "kimi"})
    ended = call("run_notebook", notebook, "--out", tmp_path / "run", "-p", "ranks", "0")
    assert ended.code == 2
    assert "refuses its parameters: ranks" in ended.errors
    assert not (tmp_path / "run").exists()


def test_yaml_values_are_kept_as_written(tmp_path: Path) -> None:
    file = tmp_path / "given.yaml"
    file.write_text("tag: 12e3456\nlr: 1e-3\nflag: on\nnumber: 007\nday: 2026-01-02\nlist: [1.0, no]\nnothing: null\n")
    assert load_parameters(file) == {
        "tag": "12e3456",
        "lr": "1e-3",
        "flag": "on",
        "number": "007",
        "day": "2026-01-02",
        "list": ["1.0", "no"],
        "nothing": None,
    }
    assert as_written("~") is None


def test_yaml_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "given.yaml"
    file.write_text("- ranks\n")
    with pytest.raises(ValueError, match="must map parameter names to values"):
        load_parameters(file)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("ranks: int = 2 + 2 * n", "needs a literal default"),
        ("ranks: dict = {}", "a type 'dict' cannot be given from outside"),
        ("ranks: int = 'four'", "declared as int, which 'four' is not"),
        ("print(4)", "holds assignments"),
        ("ranks = = 4", "is not Python"),
    ],
)
def test_parameters_cell_that_cannot_be_read_is_refused(source: str, complaint: str) -> None:
    notebook = new_notebook(cells=[new_code_cell(source, metadata={"tags": ["parameters"]})])
    with pytest.raises(ValueError, match=re.escape(complaint)):
        declared_parameters(notebook)


def test_unknown_parameter_is_refused_before_anything_starts(tmp_path: Path) -> None:
    notebook = write_notebook(tmp_path / "n.ipynb", SAMPLE)
    with pytest.raises(ValueError, match="unknown parameter 'rnaks'; did you mean 'ranks'"):
        Request.of(notebook, {"rnaks": "2"})
