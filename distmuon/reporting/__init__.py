"""From a notebook to a page that can be passed on.

A notebook calls three functions, which are all that is imported here::

    reporting.figure(fig, alt="What the figure shows")  # a figure, inlined, with its alt text
    reporting.table(frame, "Caption with units")        # a table, numbers right-aligned
    reporting.complete("What the numbers say.")         # the completion mark: last call of the last code cell

Progress belongs on stderr: it shows while a cell runs, and a complete page leaves it out. Around the notebook,
:mod:`distmuon.reporting.execution` runs it with checked parameters and :mod:`distmuon.reporting.rendering` makes the
page: one HTML file that needs neither a script nor a network.
"""

from distmuon.reporting.display import complete, figure, table

__all__ = ["complete", "figure", "table"]
