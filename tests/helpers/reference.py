"""fisher-yates-v1 in plain Python: docs/inside/shuffle.md."""

WORD = 2**64 - 1
IV = int.from_bytes(b"cseq-v1\0", "big")
GOLDEN = 0x9E3779B97F4A7C15
SHUFFLE = 1
# The least number of samples for which feistel-v1 has an order of its own.
LEAST = 65536


def mix(v):
    v = (v + GOLDEN) & WORD
    v = (v ^ v >> 30) * 0xBF58476D1CE4E5B9 & WORD
    v = (v ^ v >> 27) * 0x94D049BB133111EB & WORD
    return v ^ v >> 31


def derive(seed, epoch, purpose, count):
    z = mix(mix(mix(IV ^ seed) ^ epoch) ^ purpose)
    return tuple(mix(z + k * GOLDEN & WORD) for k in range(count))


def rotate(v, bits):
    return (v << bits | v >> 64 - bits) & WORD


def words(state):
    a, b, c, d = state
    while True:
        yield (rotate(a + d & WORD, 23) + a) & WORD
        c, d, shifted = c ^ a, d ^ b, b << 17 & WORD
        b, a = b ^ c, a ^ d
        c, d = c ^ shifted, rotate(d, 45)


def bounded(stream, limit):
    products = (word * limit for word in stream)
    return next(p for p in products if p & WORD >= 2**64 % limit) >> 64


def order(n, seed, epoch):
    stream = words(derive(seed, epoch, SHUFFLE, 4))
    # Samples that are not at their own position.
    moved = {}
    for i in range(n):
        j = i + bounded(stream, n - i)
        here = moved.pop(i, i)
        yield here if i == j else moved.get(j, j)
        moved[j] = here
