"""Checkpoints: saving, the files, their manifest, the directory of steps."""
