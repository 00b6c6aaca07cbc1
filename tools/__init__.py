"""Commands for checkpoints, data, exports, plans and reports, one file each."""
