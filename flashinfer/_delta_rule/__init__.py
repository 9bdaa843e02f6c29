"""Shared parts of the delta rule's functions."""
