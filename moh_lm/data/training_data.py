"""The interface between a run and its data, text or images."""


class TrainingData:
    """The data set of a run, whose numbered samples are read in order.

    Subclasses define ``source_names``, the sources that the log distinguishes, and ``state``, ``changes`` and
    ``tokens_read``, like ``Dataset``. Other methods are defaults. tokenizer_path: a file that belongs to every
    checkpoint, or None.
    """

    tokenizer_path = None

    @property
    def shares(self):
        """Return {source: its share of the mix} of sources that a run must keep reading."""
        return {}

    def bytes_per_token(self):
        """Return {source: bytes of text per token, or None if unknown}."""
        return {}

    def continue_from(self, saved, consumed):
        """Return the data set that continues after ``consumed`` samples. saved: ``state`` of a checkpoint."""
        return self
