"""The program that runs before each compiler, as ``python -I -S``: a few files that need little of the standard library and nothing else."""
