"""Token shards, the mixture of sources, and the loader that turns both into micro-batches."""
