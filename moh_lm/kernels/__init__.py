"""Attention whose heads are weighted per token."""
