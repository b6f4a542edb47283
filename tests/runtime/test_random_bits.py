"""Random bits: from the operating system, many at once through a key stream, and never the same twice."""

import hashlib
import multiprocessing
import os
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import numpy as np
import pytest

from mdpext_dask.runtime import random_bits
from mdpext_dask.runtime.random_bits import system_words, words_for_tests, words_of

# Below and above what is worth a cipher, and more than one key's share of a small limit.
SIZES = [1, 255, 256, 5000]


@pytest.mark.parametrize("n", [0, *SIZES])
def test_as_many_words_as_asked_for_of_which_none_comes_twice(n: int) -> None:
    """Of 20 times n 64-bit words: the chance that two are alike is below 1e-9."""
    drawn = [system_words(n) for _ in range(20)]
    assert {(words.shape, words.dtype.str, words.flags.writeable) for words in drawn} == {((n,), "<u8", True)}
    assert len(np.unique(drawn)) == 20 * n


def test_words_are_little_endian_everywhere() -> None:
    content = bytes(range(16))
    assert words_of(content).tolist() == list(struct.unpack("<2Q", content))


def test_every_bit_is_set_half_of_the_time() -> None:
    n = 100_000
    bits = np.unpackbits(system_words(n).view(np.uint8)).reshape(n, 64).sum(axis=0)
    # Seven standard deviations of a binomial count, for 64 of them: a false alarm in 1e10.
    assert np.abs(bits - n / 2).max() <= 7 * np.sqrt(n) / 2


def _key_stream(key: bytes, size: int) -> bytes:
    """Return the first bytes of ChaCha20 with a nonce of zeros, from the counter 0."""
    ciphers = pytest.importorskip("cryptography.hazmat.primitives.ciphers")
    return ciphers.Cipher(ciphers.algorithms.ChaCha20(key, bytes(16)), None).encryptor().update(bytes(size))


def test_many_words_are_the_key_stream_of_keys_that_are_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    asked: list[int] = []
    random_bits._has_cipher()  # asks once

    def urandom(size: int) -> bytes:
        asked.append(size)
        return hashlib.sha256(bytes([len(asked)])).digest()[:size]

    monkeypatch.setattr(random_bits.os, "urandom", urandom)
    monkeypatch.setattr(random_bits, "_BYTES_OF_A_KEY", 2048)
    words = system_words(2 * 256 + 10)
    assert asked == [32, 32, 32]
    keys = [hashlib.sha256(bytes([k])).digest() for k in (1, 2, 3)]
    assert words.tobytes() == b"".join(map(_key_stream, keys, (2048, 2048, 80)))


def test_few_or_without_the_library_all_are_system_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_bits.os, "urandom", bytes)
    assert not system_words(255).any()
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    random_bits._has_cipher.cache_clear()
    try:
        assert not system_words(5000).any()
    finally:
        random_bits._has_cipher.cache_clear()


def test_where_the_library_refuses_the_cipher_all_words_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does where only approved algorithms may be used."""
    ciphers = pytest.importorskip("cryptography.hazmat.primitives.ciphers")
    exceptions = pytest.importorskip("cryptography.exceptions")

    class Refused:
        def __init__(self, *_: object, **__: object) -> None:
            raise exceptions.UnsupportedAlgorithm("chacha20 is not supported in FIPS mode")

    monkeypatch.setattr(ciphers, "Cipher", Refused)
    monkeypatch.setattr(random_bits.os, "urandom", bytes)
    random_bits._has_cipher.cache_clear()
    try:
        assert system_words(5000).tolist() == [0] * 5000
    finally:
        random_bits._has_cipher.cache_clear()


def _send_words(pipe: Connection) -> None:
    pipe.send([system_words(n).tolist() for n in (4, 1000)])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_child_processes_repeat_nothing() -> None:
    """After words of both kinds, each of four children draws: nothing comes twice, of them or the parent."""
    context = multiprocessing.get_context("fork")
    drawn = [system_words(n).tolist() for n in (4, 1000)]
    for _ in range(4):
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=_send_words, args=(there,))
        child.start()
        drawn += here.recv()
        child.join()
    drawn += [system_words(n).tolist() for n in (4, 1000)]
    everything = [word for words in drawn for word in words]
    assert len(set(everything)) == len(everything) == 6 * 1004


def test_threads_repeat_nothing() -> None:
    drawn: list[int] = []
    begin = threading.Barrier(8)

    def draw() -> None:
        begin.wait()
        for _ in range(20):
            drawn.extend([*system_words(3).tolist(), *system_words(400).tolist()])

    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(draw)
    assert len(set(drawn)) == len(drawn) == 8 * 20 * 403


def test_the_source_for_tests_repeats_itself_and_says_so() -> None:
    one, same, other = words_for_tests(3), words_for_tests(3), words_for_tests(4)
    first = one(100)
    assert np.array_equal(first, same(100))
    assert not np.array_equal(first, other(100))
    assert not np.array_equal(first, one(100))
