"""The algorithm, written once on the tensor protocol of `portadraft.core.ops`.

Nothing in this package knows which array library runs it, which model is the target,
or how text becomes tokens.
"""
