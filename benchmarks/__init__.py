"""Measurements of a checkout, no part of the wheel.

`dsv4 bench COMPONENT` times the cases of the module of that name; `suite` says how. `real_weights` is a program of its own.
"""
