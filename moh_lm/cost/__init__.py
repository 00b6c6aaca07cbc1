"""What a run costs: FLOPs, memory, and the summary that is printed before it starts."""
