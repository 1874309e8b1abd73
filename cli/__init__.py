"""The command line: one module per command; parse, validate, call, present."""
