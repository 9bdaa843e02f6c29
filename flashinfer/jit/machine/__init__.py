"""What this machine is: its tools, what is built for, whom it trusts, where the cache lies."""
