"""Comparisons of many runs: what they train, and their reports."""
