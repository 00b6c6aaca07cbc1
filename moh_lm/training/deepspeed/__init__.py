"""DeepSpeed: the one folder that imports it, and that touches private names of its and of torch.distributed's.

They hold for the versions that tests/training/test_deepspeed.py names; a newer DeepSpeed is read against this folder.
"""
