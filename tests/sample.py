"""A notebook with something of all that a page can show, for tests of runs and pages."""

from __future__ import annotations

PARAMETERS = """
workload: str = "tiny"  # what to train
ranks: int = 4  # processes
lr: float = 8e-4
nesterov: bool = True
variants: list[str] = ["baseline", "batched"]
limit: int | None = None
out: str | None = None
"""

SAMPLE = [
    ("markdown", "# A sample\n\nWhat this page is about."),
    ("code", PARAMETERS, "parameters"),
    ("code", "import sys\nimport matplotlib.pyplot as plt\nimport pandas as pd\nfrom distmuon import reporting"),
    ("markdown", "## Table"),
    (
        "code",
        "for step in range(3):\n"
        "    print(f'PROGRESS {step}', file=sys.stderr, flush=True)\n"
        "    print(f'\\rREWRITTEN {step}', end='', flush=True)\n"
        "print('\\rSETTLED    ')\n"
        "frame = pd.DataFrame({'metric': ['copies', 'span (ms)'], 'ours': [1421.5, None], 'change': [-0.142, 0.0]})\n"
        "reporting.table(frame, 'Per rank & step', formats={'change': '{:+.1%}'})",
    ),
    ("markdown", "## Figures"),
    (
        "code",
        "fig, ax = plt.subplots(figsize=(9, 3), facecolor='#336699')\n"
        "reporting.figure(fig, alt='Blue <all over>', caption='A blue figure')\n"
        "plt.plot([1, 2]);",
    ),
    ("code", "from IPython.display import HTML, display\ndisplay(HTML('<script>alert(1)</script>'))\nout, ranks"),
    ("code", "print('REMOVED')", "remove"),
    ("markdown", "## Conclusion"),
    (
        "code",
        "figures = {'copies': frame['ours'][0]}\n"
        "reporting.complete('Fewer copies.', headline=frame, figures=figures, seed=7, tokens_digest='ab12')",
    ),
]
