"""The one place that holds the version (a source tree on PYTHONPATH has no package metadata)."""

__version__ = "0.1.0"
