"""The cost of a run: FLOPs, memory, and the summary that is printed before it starts."""
