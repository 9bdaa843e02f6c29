"""Kernel events: the buffer that they are written to, traces, and pages for a browser."""
