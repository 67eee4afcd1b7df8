"""What needs what: imports run one way, and torch alone is enough to plan and to step."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.glob("distmuon/**/*.py")}
#: What lies in a folder may import what lies in those it names, and what lies in no folder.
FOLDERS = {
    "newton_schulz": set(),
    "planning": {"newton_schulz"},
    "workloads": {"newton_schulz", "planning"},
    "modelling": {"planning"},
    "counting": {"newton_schulz", "planning", "workloads", "modelling"},
    "traces": set(),
    "profiling": {"newton_schulz", "planning", "workloads", "counting", "traces"},
    "studies": {"newton_schulz", "planning", "workloads", "modelling", "counting", "traces", "profiling"},
    "reporting": set(),
}


def imported(path: Path) -> set[str]:
    """The modules of the package that a module imports, anywhere in it; a package by its ``__init__``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "distmuon":
            for name in node.names:
                paths = (f"{node.module}.{name.name}", node.module, f"{node.module}.__init__")
                found.add(next(path for path in paths if path in MODULES))
    return found


def test_no_two_modules_need_one_another() -> None:
    assert len(list(TopologicalSorter({name: imported(path) for name, path in MODULES.items()}).static_order())) > 100


def folder(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 2 else None


def test_folders_import_what_lies_below_them() -> None:
    assert {folder(module) for module in MODULES} == {None, *FOLDERS}
    for name, path in MODULES.items():
        if folder(name):
            others = {folder(module) for module in imported(path)} - {None, folder(name)}
            assert others <= FOLDERS[folder(name)], name


def test_what_lies_in_no_folder_needs_no_profiling() -> None:
    for name, path in MODULES.items():
        if folder(name) is None and name != "distmuon.__init__":
            assert {folder(module) for module in imported(path)} <= {None, "newton_schulz", "planning"}, name


def test_no_module_has_more_than_400_lines() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert {name: many for name, many in lines.items() if many > 400} == {}


WITHOUT = '''
import sys

OTHERS = {"numpy", "pandas", "matplotlib", "seaborn", "pyarrow", "yaml", "jinja2", "IPython"}

class Without:
    """Finds what there is, but for these."""

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in OTHERS:
            return self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
import warnings
warnings.filterwarnings("ignore", message=".*NumPy")
import torch
import distmuon
from distmuon.planning.totals import step_totals

plan = distmuon.plan_for("tiny", ranks=4, ep=2)
assert len({row["rank"] for row in plan.report()}) == 4 and str(plan)
totals = step_totals(plan.parameters, plan.options)
assert int(totals.sent_bytes().sum()) == sum(row["sent_bytes"] for row in plan.report())
assert "4 ranks" in str(totals)

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
optimizer = distmuon.muon_with_adamw(model, lr=0.1)
before = model[0].weight.detach().clone()
model(torch.ones(2, 8)).sum().backward()
distmuon.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
assert not torch.equal(before, model[0].weight)
optimizer.load_state_dict(optimizer.state_dict())
from distmuon import checkpoint
assert "numpy" not in sys.modules
print("stepped")
'''


@pytest.mark.slow
def test_torch_alone_plans_and_steps():
    ended = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "stepped\n", ended.stderr
