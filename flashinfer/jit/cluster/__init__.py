"""Builds on the workers of a Dask scheduler (extra ``cluster``). Only ``aot --cluster`` imports it.

``client`` sends modules to workers and publishes their results. ``job`` defines the messages. ``tasks`` run
inside Dask's workers. ``child`` builds one module there in a process of its own, by the graph that every
build uses.
"""
