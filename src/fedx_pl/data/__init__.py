"""Where images come from, who owns them, and how they become batches."""
