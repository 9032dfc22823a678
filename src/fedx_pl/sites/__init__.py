"""A federation of real sites, over Flower. Only `link`, `node` and `superlink` know Flower."""
