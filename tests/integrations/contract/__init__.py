"""The contract with serving engines: facts as data, and tests that import, bind and ask all of them on the CPU."""
