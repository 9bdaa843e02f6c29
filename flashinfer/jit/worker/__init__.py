"""The program that runs before each compiler, as ``python -I -S``.

It imports little, so that it starts fast.
"""
