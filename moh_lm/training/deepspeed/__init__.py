"""DeepSpeed: the only folder that imports it, and that touches private names of its and of torch.distributed's.

They hold for the versions that tests/training/test_deepspeed.py names; read a newer DeepSpeed against this folder. Its
logger reports errors only, from its import on: what it warns about is reported by moh_lm, or is no concern of a user.
"""

import logging

logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
