"""Integrations into other libraries.

Each module is imported only on request, and imports its library on use.
"""
