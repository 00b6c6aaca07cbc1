"""Tensor and sequence parallelism: process groups, conjugate collectives, parallel layers, cross-entropy."""
