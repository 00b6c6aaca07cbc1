"""MoH-ViT and MoH-DiT: image classification and generation by models whose attention layers route their heads."""
