"""What a CPU does between the matrix products of a Llama, compiled by numba: one call where torch needs many.

A decode step of a small model is some thousand small operators, and starting them takes longer than their work. And
here every row is computed as if it were alone: attention reads exactly the positions that a token may see, in an order
that depends on nothing else, so the bits of a row's result do not change with the batch, the room in the cache or how a
prompt was split. A NaN stays in its row. All arrays are float32 unless said otherwise.
"""

import math
from typing import Any

import numba
import numpy as np

TILE = 8  # tokens of one text that attend together, so that keys and values are read once for all of them

# Sums may be reordered to fill vector registers; what is NaN or infinite must remain so.
_ORDER = {"reassoc", "contract", "nsz"}
_kernel = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=_ORDER)
_exact_kernel = numba.njit(cache=True, nogil=True, error_model="numpy", parallel=True)
_parallel_kernel = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=_ORDER, parallel=True)

_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)
_LOG2_E = np.float32(math.log2(math.e))
# ln 2 as a short number and a rest: multiples of the first are exact (Cody and Waite 1980).
_LN2, _LN2_REST = np.float32(0.693359375), np.float32(math.log(2) - 0.693359375)
_TAYLOR = tuple(np.float32(1 / math.factorial(n)) for n in (6, 5, 4, 3, 2, 1, 0))
_LEAST = np.float32(-87)  # e to this is just above the smallest normal number
_BIAS, _MANTISSA_BITS = np.int32(127), np.int32(23)

LARGEST = np.float32(127)
ZERO = np.float32(128)  # oneDNN's quick kernels want unsigned numbers
# As whole numbers, the bits of positive floats have the same order, and NaN comes last.
_WITHOUT_SIGN, _TINY = np.int32(0x7FFFFFFF), np.finfo(np.float32).tiny.view(np.int32)


def use_threads(count: int) -> None:
    """How many threads the calling thread's kernels take; one that is not needed would still be waited for."""
    limits: Any = numba.config
    numba.set_num_threads(min(count, limits.NUMBA_NUM_THREADS))


@_kernel
def add_and_norm(x, change, weight, epsilon, out):
    """`x` `[n, width]` grows by `change`; `out` is its RMS norm (Zhang and Sennrich 2019), with `weight` `[width]`."""
    rows, width = x.shape
    for row in range(rows):
        for i in range(width):
            x[row, i] += change[row, i]
        _rms_norm(x[row], weight, epsilon, out[row])


@_kernel
def _rms_norm(x, weight, epsilon, out):
    squares = _ZERO
    for i in range(len(x)):
        squares += x[i] * x[i]
    scale = _ONE / np.sqrt(squares / np.float32(len(x)) + epsilon)
    for i in range(len(x)):
        out[i] = x[i] * scale * weight[i]


@_kernel
def place(qkv, norms, epsilon, cos, sin, positions, q, keys, values):
    """Queries, keys and values of consecutive tokens of each of some texts to where attention reads them.

    qkv: `[rows * queries, (heads + 2 * kv_heads) * dim]`
    norms: `[2, dim]`, weights for an RMS norm of each head of the queries and of the keys, or `[0, dim]`
    cos, sin: `[rows * queries, dim]`, by which queries and keys are turned (Su et al. 2021)
    q: `[rows * queries, heads, dim]`
    keys, values: `[rows, kv_heads, room, dim]`, written at `positions` int64 `[rows * queries]`
    """
    heads, dim = q.shape[1:]
    rows, kv_heads = keys.shape[:2]
    queries = len(q) // rows
    for token in range(len(q)):
        row, position = token // queries, positions[token]
        for head in range(heads + kv_heads):
            x = qkv[token, head * dim : (head + 1) * dim]
            if len(norms):
                _rms_norm(x, norms[0 if head < heads else 1], epsilon, x)
            _turn(x, cos[token], sin[token], q[token, head] if head < heads else keys[row, head - heads, position])
        for head in range(kv_heads):
            start = (heads + kv_heads + head) * dim
            values[row, head, position] = qkv[token, start : start + dim]


@_kernel
def _turn(x, cos, sin, out):
    half = len(x) // 2
    for i in range(half):
        out[i] = x[i] * cos[i] - x[i + half] * sin[i]
        out[i + half] = x[i + half] * cos[i + half] + x[i] * sin[i + half]


@_kernel
def gate(gate_up, out):
    """SiLU of the left half of `[n, 2 * width]` times the right (Shazeer 2020)."""
    rows, width = out.shape
    x, bits = np.empty(width, np.float32), np.empty(width, np.int32)
    powers = bits.view(np.float32)
    for row in range(rows):
        for i in range(width):
            x[i] = -gate_up[row, i]
        _exp(x, 0, width, bits, powers)
        for i in range(width):
            out[row, i] = gate_up[row, i] / (_ONE + x[i]) * gate_up[row, width + i]


@_kernel
def round_rows(x, codes, largest):
    """Rows `[n, width]` as whole numbers: `codes` uint8 of 1 to 255, 128 for zero; 127 above is `largest` `[n, 1]`."""
    rows, width = x.shape
    x_bits, largest_bits = x.view(np.int32), largest.view(np.int32)
    for row in range(rows):
        bits = _TINY
        for i in range(width):
            bits = max(bits, x_bits[row, i] & _WITHOUT_SIGN)
        largest_bits[row, 0] = bits
        most = largest[row, 0]
        scale = LARGEST / most
        for i in range(width):
            codes[row, i] = np.int32(x[row, i] * scale + (ZERO + _HALF))


@_exact_kernel
def multiply_few(codes, weight, scale, largest, threads, out):
    """`out` `[n, out]`: rounded rows times int8 `weight` `[out, in]` of `scale` `[out]`; arguments as in `round_rows`.

    For one or two rows, where reading the weights is all: blocked layouts, made for many, read them more slowly.
    """
    rows, width = codes.shape
    columns = (len(weight) + threads - 1) // threads
    for thread in numba.prange(threads):
        x = np.empty((rows, width), np.int16)
        for row in range(rows):
            for i in range(width):
                x[row, i] = np.int16(codes[row, i]) - np.int16(ZERO)
        for column in range(thread * columns, min((thread + 1) * columns, len(weight))):
            for row in range(rows):
                total = np.int32(0)
                for i in range(width):
                    total += np.int32(x[row, i]) * np.int32(weight[column, i])
                out[row, column] = np.float32(total) * scale[column] * largest[row, 0]


@_kernel
def _exp(x, start, end, bits, powers):
    """`x[start:end]` becomes e to its power, where the library's function would stand in the way of vector registers.

    `powers` is the same memory as the int32 `bits`.
    """
    for i in range(start, end):
        y = x[i]
        if y < _LEAST:
            y = _LEAST
        if y > -_LEAST:
            y = -_LEAST
        twos = np.floor(y * _LOG2_E + _HALF)
        rest = y - twos * _LN2 - twos * _LN2_REST
        bits[i] = (np.int32(twos) + _BIAS) << _MANTISSA_BITS
        a, b, c, d, e, f, g = _TAYLOR
        x[i] = (((((a * rest + b) * rest + c) * rest + d) * rest + e) * rest + f) * rest + g
    for i in range(start, end):
        x[i] *= powers[i]


@_kernel
def _softmax(x, start, end, bits, powers):
    largest = x[start]
    for i in range(start, end):
        largest = max(largest, x[i])
    for i in range(start, end):
        x[i] -= largest
    _exp(x, start, end, bits, powers)
    total = _ZERO
    for i in range(start, end):
        total += x[i]
    scale = _ONE / total
    for i in range(start, end):
        x[i] *= scale


@_parallel_kernel
def attend(q, keys, values, positions, window, scale, threads, out):
    """What each query gathers (Vaswani et al. 2017, with grouped heads as in Ainslie et al. 2023).

    q, out: `[rows * queries, heads, dim]`, consecutive tokens of each of some texts
    keys, values: `[rows, kv_heads, room, dim]`, of which the beginnings are those texts
    positions: int64 `[rows * queries]`; a token sees its own position and the `window - 1` before it
    """
    heads, dim = q.shape[1:]
    rows, kv_heads, room = keys.shape[:3]
    group, queries = heads // kv_heads, len(q) // rows
    tiles = (queries + TILE - 1) // TILE
    for thread in numba.prange(threads):
        scores = np.empty((TILE * group, room + 4), np.float32)
        bits = np.empty(room + 4, np.int32)
        powers = bits.view(np.float32)
        for item in range(thread, rows * kv_heads * tiles, threads):
            row, kv_head, tile = item // (kv_heads * tiles), item // tiles % kv_heads, item % tiles
            first = row * queries + tile * TILE
            last = min(first + TILE, (row + 1) * queries) - 1
            # From a multiple of four, as all in here goes by fours: else the sums' order would depend on the tile.
            start, end = max(0, positions[first] + 1 - window) & ~3, positions[last] + 1
            _scores(q, keys, row, kv_head, first, last, start, end, scale, scores)
            for token in range(first, last + 1):
                begin, stop = max(0, positions[token] + 1 - window), positions[token] + 1
                for query in range((token - first) * group, (token - first + 1) * group):
                    _softmax(scores[query], begin, stop, bits, powers)
                    scores[query, start:begin] = _ZERO
                    scores[query, stop : end + 3] = _ZERO
            _gather(scores, values, row, kv_head, first, last, start, end, out)


@_kernel
def _scores(q, keys, row, kv_head, first, last, start, end, scale, scores):
    """Products of the queries of tokens `first..last` with keys `start..end`, by fours: queries are read less."""
    dim, group, room = q.shape[2], q.shape[1] // keys.shape[1], keys.shape[2]
    for j in range(start, end, 4):
        j1, j2, j3 = min(j + 1, room - 1), min(j + 2, room - 1), min(j + 3, room - 1)
        for token in range(first, last + 1):
            for g in range(group):
                head, query = kv_head * group + g, (token - first) * group + g
                s0, s1, s2, s3 = _ZERO, _ZERO, _ZERO, _ZERO
                for i in range(dim):
                    x = q[token, head, i]
                    s0 += x * keys[row, kv_head, j, i]
                    s1 += x * keys[row, kv_head, j1, i]
                    s2 += x * keys[row, kv_head, j2, i]
                    s3 += x * keys[row, kv_head, j3, i]
                scores[query, j], scores[query, j + 1] = s0 * scale, s1 * scale
                scores[query, j + 2], scores[query, j + 3] = s2 * scale, s3 * scale


@_kernel
def _gather(weights, values, row, kv_head, first, last, start, end, out):
    """Sums of values `start..end` for the queries of tokens `first..last`; weights beyond what is seen are zero."""
    dim, group, room = out.shape[2], out.shape[1] // values.shape[1], values.shape[2]
    for token in range(first, last + 1):
        out[token, kv_head * group : (kv_head + 1) * group] = _ZERO
    for j in range(start, end, 4):
        j1, j2, j3 = min(j + 1, room - 1), min(j + 2, room - 1), min(j + 3, room - 1)
        for token in range(first, last + 1):
            for g in range(group):
                head, query = kv_head * group + g, (token - first) * group + g
                w0, w1, w2, w3 = weights[query, j], weights[query, j + 1], weights[query, j + 2], weights[query, j + 3]
                for i in range(dim):
                    out[token, head, i] += (
                        w0 * values[row, kv_head, j, i]
                        + w1 * values[row, kv_head, j1, i]
                        + w2 * values[row, kv_head, j2, i]
                        + w3 * values[row, kv_head, j3, i]
                    )
