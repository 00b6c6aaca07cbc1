"""MoH-LM: pretraining of Mixture-of-Head language models (arXiv 2410.11842)."""
