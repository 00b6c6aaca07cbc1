"""Measurements of kernels, steps and generation."""
