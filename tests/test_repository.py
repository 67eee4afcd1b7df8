"""What the repository promises about itself: environments that agree, stripped notebooks, figures that add up."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from distmuon.reporting.parameters import declared_parameters

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base", "seaborn": "seaborn-base"}


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements() -> list[Requirement]:
    """All direct dependencies, those of the extras too."""
    extras = [text for texts in project()["optional-dependencies"].values() for text in texts]
    found = [Requirement(text) for text in [*project()["dependencies"], *extras]]
    return [requirement for requirement in found if requirement.name != "distmuon"]


def test_conda_environment_says_the_same_as_pyproject() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = {r.name: r.specifier for r in (Requirement(d) for d in environment["dependencies"] if isinstance(d, str))}
    assert str(conda.pop("python")) == project()["requires-python"]
    conda.pop("pip")
    assert conda == {CONDA_NAMES.get(r.name, r.name): r.specifier for r in requirements()}
    assert {"pip": ["--editable ."]} in environment["dependencies"]


def test_constraints_pin_every_direct_dependency_within_its_range() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert pins["torch"] == "2.13.0"
    for requirement in requirements():
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


def test_torch_range_is_the_promised_one() -> None:
    assert project()["dependencies"] == ["torch>=2.11,<2.15"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stripped_and_can_be_run_with_parameters(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.cells[0].source.startswith("# ")
    assert declared_parameters(notebook)
    assert "complete(" in code[-1].source


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


def test_published_figures_add_up() -> None:
    published = json.loads((ROOT / "data/published/kimi_debug_mi250.json").read_text())
    metrics = {row["metric"]: row for row in published["metrics"]}
    for variant in ("baseline", "batched"):
        for metric in ("async_copies", "launches"):
            assert sum(row[variant][metric] for row in published["derivation"]) == metrics[metric][variant]
    moonlight = published["moonlight"]
    assert moonlight["calls"] == moonlight["owned_matrices"] * moonlight["phases"] * moonlight["steps"]


@pytest.mark.parametrize("target", ["setup", "report", "batch", "site", "test", "lab", "lint", "format", "clean"])
def test_makefile_has_the_target(target: str) -> None:
    subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, check=True)


def test_ci_script_is_executable_and_parses() -> None:
    script = ROOT / ".ci/run"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(script)], check=True)
