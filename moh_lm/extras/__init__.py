"""Experimental options that an ordinary model does not need. Only moh_lm/build.py and the engine import them."""
