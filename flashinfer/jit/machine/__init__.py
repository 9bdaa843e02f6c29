"""This machine: its tools, what is built for it, whom it trusts, where its cache lies."""
