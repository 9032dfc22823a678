"""Which code a run was trained with: what is not ours, how it is hashed, and whether it was edited since."""
