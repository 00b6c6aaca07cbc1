"""Experimental options that an ordinary model does not need. Only moh_lm/build.py imports them."""
