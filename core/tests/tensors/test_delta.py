"""Changes between two states of the same bytes: every bit comes back, few changes are few bytes, damage is told."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from powertrain.errors import TransferError
from powertrain.tensors import delta

INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture(scope="module", autouse=True)
def small():
    """Let parts and chunks be so small that little data has many."""
    patch = pytest.MonkeyPatch()
    patch.setattr(delta, "CHUNK", 64)
    patch.setattr(delta, "PART", 320)
    patch.setattr(delta, "WORTH", 100.0)
    yield
    patch.undo()


def random_bytes(count, seed):
    return torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def changed(old, item, share, seed):
    """Return bytes of which a share of the elements (or one element, for None) has another bit pattern."""
    generator = torch.Generator().manual_seed(seed)
    new = old.clone()
    rows = new.view(-1, item)
    if share is None:
        picked = torch.randint(len(rows), (1,), generator=generator)
    else:
        picked = (torch.rand(len(rows), generator=generator) < share).nonzero().squeeze(1)
    byte, bit = torch.randint(item, (1,), generator=generator), int(torch.randint(8, (1,), generator=generator))
    rows[picked, byte] ^= 1 << bit
    return new, len(picked)


LAYOUTS = st.lists(st.tuples(st.sampled_from([8, 4, 2, 1]), st.integers(1, 900)), min_size=1, max_size=4).map(
    lambda some: delta.spans(sorted(((item, item * n) for item, n in some), reverse=True))
)
SHARES = st.sampled_from([0.0, None, 0.01, 0.1, 0.5, 0.97, 1.0])


@settings(deadline=None, max_examples=150)
@given(layout=LAYOUTS, shares=st.lists(SHARES, min_size=4, max_size=4), seed=st.integers(0, 1 << 30))
def test_every_bit_comes_back_and_all_changes_are_counted(layout, shares, seed):
    olds, news, counts = [], [], 0
    for (item, count), share in zip(layout, shares, strict=False):
        olds.append(random_bytes(count, seed + item))
        new, n = changed(olds[-1], item, share, seed)
        news.append(new)
        counts += n
    old, new = torch.cat(olds), torch.cat(news)
    data, told = delta.encode(new, old, layout)
    assert told == counts
    delta.patch(old, data, layout)
    assert torch.equal(old, new)


@pytest.mark.parametrize(
    ("share", "way"), [(0.0, 0), (0.02, 1), (0.5, 2), (1.0, 3)], ids=["none", "places", "bits", "all"]
)
def test_each_part_is_written_in_its_smallest_way(share, way):
    old = random_bytes(2 * 320, 0)
    new, _ = changed(old, 2, share, 1)
    data, _ = delta.encode(new, old, [(2, 640)])
    assert int(data[:8].view(torch.int64)) == way
    assert data.numel() <= 640 + 16


@pytest.mark.parametrize(("dtype", "item"), [(torch.bfloat16, 2), (torch.float32, 4)])
@pytest.mark.parametrize("seed", [0, 1])
def test_signs_of_zero_and_payloads_of_nan_are_changes(dtype, item, seed):
    old = torch.zeros(64, dtype=dtype)
    old[20:] = float("nan")
    new = old.clone()
    new[3] = -0.0
    new.view(INTS[item])[30] += 1
    assert new[30].isnan()
    data, told = delta.encode(new.view(torch.uint8), old.view(torch.uint8), [(item, 64 * item)])
    assert told == 2
    delta.patch(old.view(torch.uint8), data, [(item, 64 * item)])
    assert torch.equal(old.view(INTS[item]), new.view(INTS[item]))


def test_real_sizes_take_four_bytes_for_each_of_few_changes(monkeypatch):
    monkeypatch.setattr(delta, "CHUNK", 1 << 16)
    monkeypatch.setattr(delta, "PART", 1 << 22)
    monkeypatch.setattr(delta, "WORTH", 0.8)
    old = random_bytes(2 * 300_000, 0)
    new, count = changed(old, 2, 0.01, 1)
    new[2 * 65_535] ^= 1
    new[2 * 65_536] ^= 1
    data, told = delta.encode(new, old, [(2, 600_000)])
    assert count <= told <= count + 2
    assert data.numel() <= 16 + 24 + 4 * told + 16
    delta.patch(old, data, [(2, 600_000)])
    assert torch.equal(old, new)


@pytest.mark.parametrize(("share", "worth"), [(0.2, True), (0.65, True), (0.8, False), (1.0, False)])
def test_changes_that_save_too_little_are_not_told(monkeypatch, share, worth):
    monkeypatch.setattr(delta, "WORTH", 0.8)
    old = random_bytes(2 * 6400, 0)
    new, count = changed(old, 2, share, 1)
    data, told = delta.encode(new, old, [(2, 12_800)])
    assert told == count
    assert (data is not None) is worth


@settings(deadline=None, max_examples=100)
@given(
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    share=SHARES,
    seed=st.integers(0, 1 << 30),
    draw=st.data(),
)
def test_range_of_a_block_is_patched_as_the_block_is(shape, share, seed, draw):
    count = torch.Size(shape).numel()
    start = [draw.draw(st.integers(0, n - 1)) for n in shape]
    size = [draw.draw(st.integers(1, n - s)) for n, s in zip(shape, start, strict=True)]
    ours = tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))
    old = random_bytes(2 * count, seed)
    new, _ = changed(old, 2, share, seed)
    data, _ = delta.encode(new, old, [(2, 2 * count)])
    held = old.view(torch.int16).view(shape)[ours].contiguous().view(-1).view(torch.uint8)
    delta.patch_range(held, data, 2, shape, start, size)
    assert torch.equal(held.view(torch.int16).view(size), new.view(torch.int16).view(shape)[ours])


@settings(deadline=None, max_examples=200)
@given(at=st.integers(0, 5000), value=st.integers(0, 255), share=SHARES, cut=st.booleans())
def test_damage_is_told_or_stays_within_its_bytes(at, value, share, cut):
    room = torch.zeros(8 + 1400 + 8, dtype=torch.uint8)
    old = room[8:-8]
    new, _ = changed(old, 2, share, 7)
    data, _ = delta.encode(new, old, [(2, 1400)])
    if cut:
        data = data[: at % data.numel()].clone()
    else:
        data[at % data.numel()] = value
    with contextlib.suppress(TransferError):
        delta.patch(old, data, [(2, 1400)])
    assert not room[:8].any()
    assert not room[-8:].any()


@pytest.mark.parametrize(
    ("word", "value", "words"),
    [
        (0, 7, r"written in way 7, with \d+ of 320 elements"),
        (1, 321, "321 of 320 elements are said to have changed"),
        (1, -1, "-1 of 320 elements"),
        (1, 4, "4 elements are said to have changed, and chunks tell of 3"),
        (2, 1, "elements are said to have changed, and chunks tell of"),
    ],
)
def test_first_fault_is_named(word, value, words):
    old = torch.zeros(640, dtype=torch.uint8)
    new = old.clone()
    new[[0, 2, 4]] = 1
    data, _ = delta.encode(new, old, [(2, 640)])
    data.view(torch.int64)[word] = value
    with pytest.raises(TransferError, match=words):
        delta.patch(old, data, [(2, 640)])


def test_place_behind_the_last_element_is_told():
    old = torch.zeros(2 * 300, dtype=torch.uint8)
    new = old.clone()
    new[-2] = 1
    data, _ = delta.encode(new, old, [(2, 600)])
    data[16 + 24 :].view(torch.int16)[0] += 1
    with pytest.raises(TransferError, match="element 300 of 300 is said to have changed"):
        delta.patch(old, data, [(2, 600)])


def test_more_bytes_than_changes_is_told():
    old = torch.zeros(640, dtype=torch.uint8)
    data, _ = delta.encode(old.clone(), old, [(2, 640)])
    with pytest.raises(TransferError, match="it has 24 bytes, and changes are told in 16"):
        delta.patch(old, torch.cat([data, torch.zeros(8, dtype=torch.uint8)]), [(2, 640)])


def test_neighbours_of_one_size_are_one_span():
    assert delta.spans([(4, 8), (4, 4), (2, 6), (2, 2), (1, 1)]) == [(4, 12), (2, 8), (1, 1)]
