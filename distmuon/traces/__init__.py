"""Traces: any trace of the PyTorch profiler, of any program, read, merged and compared. Needs nothing but the files.

``tracefile`` reads a file or refuses it, ``trace`` finds what a range caused and where its time went, ``ranks`` has the
traces of one run on a common clock, ``merge`` writes them as one, ``comparison`` measures two beside each other.
"""
