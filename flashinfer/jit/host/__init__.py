"""What the processes of a host share: locks, what builds took before, how far they are."""
