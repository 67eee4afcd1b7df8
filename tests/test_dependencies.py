"""torch alone is enough to plan and to step; what else there is belongs to profiling and to the notebooks."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
