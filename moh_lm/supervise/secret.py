"""Signed messages between the ranks of several machines: only values that carry the secret of their launch are
believed.

Anybody on the network can connect to the store in which ranks meet, list its keys and change them. A value is therefore
only believed if it carries a signature: the HMAC of its key and text with MOH_LM_SECRET, which all ranks know and
strangers do not. Without this variable nothing is signed and everything is believed, so the network has to be private.
"""

import hashlib
import hmac
import os
import time

import torch
import torch.distributed as dist

SECRET = "MOH_LM_SECRET"


def signature(*parts):
    return hmac.new(os.environ[SECRET].encode(), repr(parts).encode(), hashlib.sha256)


class SignedStore:
    """A part of a store that holds the texts of this launch. name: name of the part."""

    def __init__(self, name, store):
        self.name, self.store = name, dist.PrefixStore(name, store)

    def signed(self, key, text):
        return f"{signature(self.name, key, text).hexdigest()} {text}" if os.environ.get(SECRET) else text

    def believed(self, key, value):
        """Return the text of a ``value``, or None if a stranger wrote it."""
        text = value.decode(errors="replace")
        if os.environ.get(SECRET):
            text = text.partition(" ")[2]
        return text if hmac.compare_digest(self.signed(key, text).encode(), value) else None

    def set(self, key, text):
        self.store.set(key, self.signed(key, text))

    def set_if_absent(self, key, text):
        """Return the text that ``key`` has from now on: the existing one if it is believed, otherwise the new one."""
        value = self.store.compare_set(key, "", self.signed(key, text))
        before = self.believed(key, value)
        if before is None:
            self.set(key, text)
        return text if before is None else before

    def read(self, key):
        """Return the text of ``key``, or None if there is none that is believed."""
        return self.believed(key, self.store.get(key)) if self.store.check([key]) else None

    def wait_for(self, key, timeout):
        """Return the text of ``key`` once there is one that is believed. Raises RuntimeError if nothing is there after
        the ``timeout``, or if the store is gone."""
        self.store.wait([key], timeout)
        while (text := self.read(key)) is None:  # a stranger wrote this key first
            time.sleep(0.1)
        return text

    def read_all(self, keys):
        """``read`` each of the keys; keys that exist are fetched in one request."""
        if self.store.check(keys):
            return list(map(self.believed, keys, self.store.multi_get(keys)))
        return list(map(self.read, keys))


def refuse_strangers(device):
    """Make every rank prove to all others that it knows the secret. Returns the ranks that do not know it."""
    if not os.environ.get(SECRET):
        return []
    own = torch.frombuffer(bytearray(os.urandom(32)), dtype=torch.uint8).to(device)
    challenges = gathered(own)
    asked = hashlib.sha256(challenges.numpy().tobytes()).hexdigest()
    proof = signature(dist.get_rank(), asked).digest()
    proofs = gathered(torch.frombuffer(bytearray(proof), dtype=torch.uint8).to(device)).tolist()
    expected = [list(signature(rank, asked).digest()) for rank in range(len(proofs))]
    return [rank for rank, (found, due) in enumerate(zip(proofs, expected, strict=True)) if found != due]


def gathered(row):
    """Gather the row [bytes] of every rank to [ranks, bytes], on the CPU."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows).cpu()
