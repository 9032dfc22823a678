"""The code that a run was trained with: what is not ours, its hash, and edits since."""
