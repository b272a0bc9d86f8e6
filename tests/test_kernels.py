"""The CPU's kernels against what torch computes in float64, on odd shapes too; rows and splits change no bit."""

import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine import kernels

pytestmark = pytest.mark.usefixtures("one_thread")

EVERYWHERE = sys.maxsize
NO_NORMS = np.empty((0, 1), np.float32)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def attend(q, keys, values, positions, window=EVERYWHERE, threads=2) -> np.ndarray:
    out = np.full_like(q, np.nan)
    kernels.use_threads(threads)
    kernels.attend(q, keys, values, np.asarray(positions), window, np.float32(0.3), threads, out)
    return out


def by_torch(q, keys, values, positions, window=EVERYWHERE) -> np.ndarray:
    """In float64, with a mask: `q` `[queries, heads, dim]` of one text."""
    places = torch.arange(keys.shape[2])
    queries = torch.tensor(positions)[:, None]
    seen = (places <= queries) & (places > queries - window)
    q, keys, values = (torch.from_numpy(part).double() for part in (q[None].swapaxes(1, 2), keys, values))
    out = F.scaled_dot_product_attention(q, keys, values, seen, scale=0.3, enable_gqa=True)
    return out[0].transpose(0, 1).float().numpy()


@pytest.mark.parametrize("heads, kv_heads, dim", [(9, 3, 64), (4, 4, 8), (6, 1, 20)])
@pytest.mark.parametrize("window", [EVERYWHERE, 1, 6, 40])
def test_attention(heads, kv_heads, dim, window):
    room, positions = 71, list(range(22, 53))
    q, keys, values = (numbers(*shape) for shape in ((31, heads, dim), *[(1, kv_heads, room, dim)] * 2))
    expected = by_torch(q, keys, values, positions, window)
    np.testing.assert_allclose(attend(q, keys, values, positions, window), expected, atol=2e-6)


@pytest.mark.parametrize("window", [EVERYWHERE, 9])
def test_a_query_does_not_notice_how_its_text_is_split_who_is_beside_it_or_how_much_room_there_is(window):
    q, keys, values = (numbers(*shape) for shape in ((40, 6, 16), (1, 2, 41, 16), (1, 2, 41, 16)))
    whole = attend(q, keys, values, range(40), window)
    for cuts in ([0, 1, 40], [0, 7, 15, 40], list(range(41))):
        pieces = zip(cuts, cuts[1:], strict=False)
        parts = [attend(q[a:b], keys, values, range(a, b), window, threads=1) for a, b in pieces]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
    rows = np.stack([q[11], q[39], q[0]])
    roomy = [np.concatenate([part, numbers(1, 2, 50, 16)], axis=2).repeat(3, axis=0) for part in (keys, values)]
    np.testing.assert_array_equal(attend(rows, *roomy, [11, 39, 0], window), whole[[11, 39, 0]])


def test_a_row_that_is_spoilt_spoils_no_other():
    q, keys, values = (numbers(*shape) for shape in ((3, 4, 8), (3, 2, 20, 8), (3, 2, 20, 8)))
    clean = attend(q, keys, values, [9, 19, 4])
    keys[1, 0, 3, 0], values[2, 1, 2, 5] = np.nan, np.inf
    spoilt = attend(q, keys, values, [9, 19, 4])
    np.testing.assert_array_equal(spoilt[0], clean[0])
    assert np.isnan(spoilt[1, :2]).all() and np.isinf(spoilt[2, 2:, 5]).all()
    assert np.isnan(attend(np.full_like(q, np.nan), keys, values, [9, 19, 4])).all()


def test_scores_far_apart_neither_overflow_nor_vanish():
    keys = np.zeros((1, 1, 3, 8), np.float32)
    keys[0, 0, :, 0] = [-1e6, 1e6, 1e6]
    values = numbers(1, 1, 3, 8)
    out = attend(np.eye(1, 8, dtype=np.float32)[None], keys, values, [2])
    np.testing.assert_allclose(out[0, 0], values[0, 0, 1:].mean(axis=0), rtol=1e-6)


def test_norms_grow_the_states_first():
    x, change, weight, out = numbers(5, 24), numbers(5, 24, seed=1), numbers(24, seed=2), np.empty((5, 24), np.float32)
    expected = torch.from_numpy(x + change).double()
    kernels.add_and_norm(x, change, weight, np.float32(1e-5), out)
    np.testing.assert_allclose(x, expected, rtol=1e-6)
    np.testing.assert_allclose(out, F.rms_norm(expected, (24,), torch.from_numpy(weight).double(), 1e-5), atol=2e-6)


def test_gates_of_any_size():
    gate_up, out = numbers(3, 34), np.empty((3, 17), np.float32)
    gate_up[:, :8] = [-1e6, -300, -87, -1e-20, 0, 1e-3, 90, 1e6]
    kernels.gate(gate_up, out)
    left, right = torch.from_numpy(gate_up).double().chunk(2, dim=1)
    np.testing.assert_allclose(out, F.silu(left) * right, rtol=2e-6, atol=1e-30)
    gate_up[1, 3] = np.nan
    kernels.gate(gate_up, out)
    assert np.isnan(out[1, 3]) and np.isfinite(out).sum() == out.size - 1


@pytest.mark.parametrize("norms", [NO_NORMS, numbers(2, 8, seed=3)])
def test_queries_are_turned_and_keys_and_values_stored_at_their_positions(norms):
    heads, kv_heads, dim, rows, queries = 4, 2, 8, 2, 3
    qkv, angles = numbers(rows * queries, (heads + 2 * kv_heads) * dim), numbers(rows * queries, dim // 2, seed=1)
    cos, sin = (np.concatenate([part(angles)] * 2, axis=1) for part in (np.cos, np.sin))
    positions = np.array([2, 3, 4, 0, 1, 2])
    keys, values = np.zeros((2, rows, kv_heads, 6, dim), np.float32)
    q = np.empty((rows * queries, heads, dim), np.float32)
    expected = torch.from_numpy(qkv).double().view(rows * queries, -1, dim).clone()
    kernels.place(qkv, norms, np.float32(1e-5), cos, sin, positions, q, keys, values)
    of_q, of_k, of_v = expected.split([heads, kv_heads, kv_heads], dim=1)
    if len(norms):
        weights = torch.from_numpy(norms).double()
        of_q, of_k = (
            F.rms_norm(part, (dim,), weight, 1e-5) for part, weight in zip((of_q, of_k), weights, strict=True)
        )
    turn = torch.polar(torch.ones_like(torch.from_numpy(angles)).double(), torch.from_numpy(angles).double())[:, None]
    turned = [torch.complex(*part.chunk(2, dim=-1)) * turn for part in (of_q, of_k)]
    of_q, of_k = (torch.cat([part.real, part.imag], dim=-1) for part in turned)
    np.testing.assert_allclose(q, of_q, atol=2e-6)
    for token, position in enumerate(positions):
        row = token // queries
        np.testing.assert_allclose(keys[row, :, position], of_k[token], atol=2e-6)
        np.testing.assert_allclose(values[row, :, position], of_v[token], atol=2e-6)
    assert not keys[0, :, [0, 1, 5]].any() and not values[1, :, 3:].any()


def test_rounding_goes_to_the_nearest_of_255_steps():
    x = numbers(4, 37) * np.array([[1e-30], [1], [1e30], [0]], np.float32)
    codes, largest = np.empty((4, 37), np.uint8), np.empty((4, 1), np.float32)
    kernels.round_rows(x, codes, largest)
    np.testing.assert_array_equal(largest[:3, 0], np.abs(x[:3]).max(axis=1))
    assert (np.abs((codes[:3] - 128.0) - x[:3] * (127 / largest[:3].astype(np.float64))) < 0.5001).all()
    assert (codes[3] == 128).all() and largest[3, 0] > 0
