"""Tests, and what several of them need."""
