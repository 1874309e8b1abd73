"""Choosing and setting up what runs the collectives of a mesh axis: nccl, host or oneshot.

`request` reads what was asked for, `eligibility` says what oneshot may carry, `oneshot` carries it, `agreement` makes
all ranks decide alike, `self_test` compares a backend with the host's, `choice` takes the first or fastest that passes.
"""
