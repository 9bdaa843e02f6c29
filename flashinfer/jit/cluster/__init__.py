"""Builds modules on the workers of a Dask scheduler (extra ``cluster``); imported by ``aot --cluster`` alone.

``client`` gives modules to workers and publishes what comes back, ``job`` is what travels, ``tasks`` run inside of
Dask's workers, ``child`` builds one module in a process of its own there, by the same graph as everywhere.
"""
