"""What the sources name and the ordinary path does not need. Only moh_lm/build.py and the engine import it."""
