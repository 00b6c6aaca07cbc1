"""Generation: sampling, the key/value caches, and attention of one token to a cache."""
