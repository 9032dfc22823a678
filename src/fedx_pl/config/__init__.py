"""The command line's words: all keys, how they are composed, and the objects made of them."""
