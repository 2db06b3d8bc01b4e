"""Errors of a measurement, as sentences for the operator."""


class BenchError(Exception):
    """Measuring cannot go on: what was found, what was expected, what to do."""
