"""One training step: the engine, its optimizer, and what may stop a step."""
