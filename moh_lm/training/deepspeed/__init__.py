"""The only folder that imports DeepSpeed, and that uses private names of DeepSpeed and of torch.distributed.

These names are valid for the versions that tests/training/test_deepspeed.py lists; compare a newer DeepSpeed with this
folder. DeepSpeed's logger reports only errors here: moh_lm reports what matters among its warnings.
"""

import logging

PACKAGE = "deepspeed"
logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
