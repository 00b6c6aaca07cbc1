"""A run: its program, its loop, its state, and how it resumes."""
