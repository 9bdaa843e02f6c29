"""How a Python function becomes an operator."""
