"""What ties `dsv4.reference` and `dsv4.fast` together, and holds anybody's kernel to the same contract.

A contract (`contracts`, one table a component in `components/`) says for each output of a function how much must agree, on which inputs,
and why. The engine draws inputs, runs reference and candidate, and compares; what it finds it shrinks. `pytest --pyargs dsv4.parity`
runs all of it. Importing this package imports neither torch nor Hypothesis.
"""
