"""Scripts that train, and the programs that they call."""
