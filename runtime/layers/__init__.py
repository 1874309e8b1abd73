"""The layers that models are written in. Collectives stay in here and in runtime/parallel: a model reads as if for one
device.

Shapes: T tokens, H hidden, D head dimension, q and kv the query and key/value heads of this rank, V vocabulary.
"""
