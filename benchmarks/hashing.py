"""What verifying costs: BLAKE3 of chunk-sized buffers, beside a plain copy and SHA-256."""

import hashlib

from benchmarks.report import print_rates, time_rounds
from kvnet.format.hashes import blake3_hash

CHUNK_SIZE_BYTES = 1024 * 1024
N_CHUNKS = 64


def main() -> None:
    """Print the rates."""
    chunks = [bytes([index]) * CHUNK_SIZE_BYTES for index in range(N_CHUNKS)]
    size_bytes = CHUNK_SIZE_BYTES * N_CHUNKS
    room = memoryview(bytearray(CHUNK_SIZE_BYTES))

    def copy_all() -> None:
        for chunk in chunks:
            room[:] = chunk

    rates = [
        time_rounds("copy", size_bytes, copy_all),
        time_rounds("BLAKE3, as every chunk is checked", size_bytes, lambda: [blake3_hash(chunk) for chunk in chunks]),
        time_rounds("SHA-256", size_bytes, lambda: [hashlib.sha256(chunk).digest() for chunk in chunks]),
    ]
    print_rates(f"hashing, {N_CHUNKS} buffers of 1 MiB, one thread", rates)
