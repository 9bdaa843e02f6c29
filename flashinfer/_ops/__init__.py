"""Operators: declaration, dispatch and loading of their modules."""
