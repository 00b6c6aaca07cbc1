"""The run: its program, loop, state, and resumption."""
