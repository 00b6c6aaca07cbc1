"""What a run asks of its data, be it text or images."""


class TrainingData:
    """The data set of a run. Samples are numbered; the training reads them in order.

    A subclass has ``source_names``, the sources that the log distinguishes, and the methods ``state``, ``changes`` and
    ``tokens_read``, as ``Dataset`` has them. The methods here are defaults for data that lack such a property.

    tokenizer_path: a file that belongs to every checkpoint, or None.
    """

    tokenizer_path = None

    @property
    def shares(self):
        """{source: its share of the mix} of the sources that a run must not lose sight of."""
        return {}

    def bytes_per_token(self):
        """{source: bytes of text per token, or None where that is not known}."""
        return {}

    def continue_from(self, saved, consumed):
        """The data set that continues after ``consumed`` samples; saved: the ``state`` of a checkpoint."""
        return self
