"""Using a trained encoder: load, export, embed, find neighbors."""
