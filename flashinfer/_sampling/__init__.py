"""Shared parts of the functions of :mod:`flashinfer.sampling`."""
