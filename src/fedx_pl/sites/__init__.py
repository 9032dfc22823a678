"""A federation of real sites, over Flower.

Only `door`, `link`, `node`, `records` and `superlink` import Flower.
"""
