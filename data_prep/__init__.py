"""Raw corpora become token shards: tokenize.py and its parts."""
