"""Documents hold: links lead somewhere, the citation is that of this version, public names have docstrings."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "data/README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert missing == []


def test_every_module_that_the_design_names_is_there() -> None:
    text = (ROOT / "docs/design.md").read_text()
    picture = text.split("```")[1]
    modules = {"matrices", "placement", "options", "buckets", "drafts", "assignment", "layout", "plan", "schedule"}
    modules |= {"totals", "optimizer", "step", "exchange", "packing", "buffers"}
    for module in modules:
        assert module in picture
        assert any((ROOT / "distmuon" / folder / f"{module}.py").exists() for folder in (".", "planning")), module


def test_citation_is_of_this_version_and_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in project["authors"]]


def test_public_names_of_the_package_have_docstrings(tmp_path: Path) -> None:
    check = [sys.executable, "-m", "ruff", "check", "--no-cache", "--config", str(ROOT / "pyproject.toml")]
    check += ["--select", "D1", "--ignore", "D105,D107"]  # as in pyproject.toml, whatever else that ignores

    def found(*paths: Path) -> str:
        return subprocess.run([*check, *map(str, paths)], capture_output=True, text=True).stdout

    assert found(ROOT / "distmuon", ROOT / "scripts") == "All checks passed!\n"
    bare = tmp_path / "bare.py"
    bare.write_text('"""A module."""\n\n\ndef public() -> None:\n    return None\n')
    assert "D103" in found(bare)
