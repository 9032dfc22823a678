"""Images: their sources, their partition among clients, and batches of them."""
