"""The processes of a host share locks, what builds took before, and how far they are."""
