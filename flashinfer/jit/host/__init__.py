"""State that the processes of a host share: locks, the history of builds and their progress."""
