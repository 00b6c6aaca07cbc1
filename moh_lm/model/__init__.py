"""The model: router, attention, transformer."""
