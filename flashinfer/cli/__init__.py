"""The command line: one file per group of commands, ``main`` to choose among them, ``output`` to show what they say."""
