"""Where draws get their random bits from: the operating system, always.

Few bits are read from it directly. Many at once are the key stream of ChaCha20 under a key that is read from
it for this one call and then forgotten: the same bits to anybody who cannot break ChaCha20 (which is what the
kernels of Linux and the BSDs make theirs with), several times as fast. No stream outlives the call that has
made it, so there is nothing that a child process could repeat after a fork, and nothing for threads to share.
Without the library ``cryptography``, or where it may not use this cipher, all bits come from the operating
system directly.

There is no seed. Tests that need one say so: :func:`words_for_tests`.
"""

import os
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

# Uniform, independent 64-bit numbers, as many as are asked for: uint64 of shape (n,).
Words = Callable[[int], NDArray[np.uint64]]

WORD_BYTES = 8
# From here on setting up a cipher (4 µs) takes less than the operating system would (2.4 µs per KiB).
_BYTES_WORTH_A_CIPHER = 2048
# What one key is used for, at most; its counter of 64-byte blocks has 32 bits.
_BYTES_OF_A_KEY = 1 << 26
_KEY_BYTES, _NONCE_BYTES = 32, 16


def system_words(n: int) -> NDArray[np.uint64]:
    """Return `n` uniform 64-bit numbers that nobody can predict, uint64 of shape (n,)."""
    wanted = WORD_BYTES * n
    if wanted < _BYTES_WORTH_A_CIPHER or not _has_cipher():
        content = os.urandom(wanted)
    elif wanted <= _BYTES_OF_A_KEY:
        content = _key_stream(wanted)
    else:
        sizes = [min(_BYTES_OF_A_KEY, wanted - done) for done in range(0, wanted, _BYTES_OF_A_KEY)]
        content = b"".join(map(_key_stream, sizes))
    return words_of(content)


def words_of(content: bytes) -> NDArray[np.uint64]:
    """Return bytes as 64-bit numbers, little-endian on every machine."""
    return np.frombuffer(content, dtype="<u8").astype(np.uint64)


def words_for_tests(seed: int) -> Words:
    """Return a source that anybody can predict: for tests, and for nothing else.

    Parameters
    ----------
    seed
        Of numpy's generator.
    """
    rng = np.random.default_rng(seed)
    return lambda n: rng.integers(0, 1 << 64, size=n, dtype=np.uint64)


@cache
def _has_cipher() -> bool:
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
    except ImportError:
        return False
    try:
        _key_stream(0)
    except UnsupportedAlgorithm:  # the library is there, and may not use this cipher: "FIPS mode"
        return False
    return True


def _key_stream(size: int) -> bytes:
    """Return the first bytes of ChaCha20's key stream under a key of the operating system's, used once."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    # The nonce begins with the counter of blocks; a key that is used once needs no other.
    cipher = Cipher(algorithms.ChaCha20(os.urandom(_KEY_BYTES), bytes(_NONCE_BYTES)), mode=None)
    return cipher.encryptor().update(bytes(size))
