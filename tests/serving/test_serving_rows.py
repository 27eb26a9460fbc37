"""Row formats of served tables: what is read is as near to what was written as the format allows."""

import ctypes
import mmap

import pytest
import torch
from another_process import call
from hypothesis import given
from hypothesis import strategies as st
from serving_cases import decode

from torchrec_dyn.serving.row_format import NBitPooling, RowFormat

INT8, INT4 = RowFormat(torch.int8), RowFormat(torch.int4)


def step_of(rows):
    """A 255th of each row's range, with the slack of a scale and a bias in float16."""
    low, high = rows.aminmax(dim=1, keepdim=True)
    # The bias may lie one float16 below, 2^-10 of it or 2^-24; the scale is as much too large at most.
    below = low.abs() * 2**-10 + 2**-24
    return ((high - low + below) / 255) * (1 + 2**-10) + 2**-24


@given(
    st.integers(0, 2**32),
    st.integers(1, 40),
    st.sampled_from([1e-7, 1e-4, 0.01, 1.0, 100.0]),
    st.sampled_from([0.0, 1e-3, -1.0, 30.0, -300.0]),
)
def test_int8_is_within_half_a_step(seed, columns, scale, centre):
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(7, columns, generator=draw) * scale + centre
    rows[0] = centre  # a row without a range
    read = decode(INT8, INT8.encode(rows, "t"))
    error = (read - rows).abs()
    rounding = rows.abs() * 2**-22  # of float32, in between
    assert bool((error <= step_of(rows) / 2 + rounding).all())


def test_int8_is_within_half_a_255th_of_the_range_of_usual_rows():
    rows = torch.randn(1000, 64) * 0.05
    error = (decode(INT8, INT8.encode(rows, "t")) - rows).abs().amax(1)
    low, high = rows.aminmax(dim=1)
    assert bool((error <= (high - low) / 255 / 2 * 1.003).all())
    assert float((error / ((high - low) / 255 / 2)).max()) > 0.95  # and no better: a byte a column


def test_fbgemm_reads_int8_as_we_do():
    rows = torch.randn(50, 12)
    written = INT8.encode(rows, "t")
    assert written.shape == (50, INT8.row_bytes(12)) == (50, 16)
    numbers = torch.tensor([3, 0, 49, -1, 3])
    read = NBitPooling([12], torch.int8)(written.view(-1), numbers, None)
    expected = decode(INT8, written)[numbers]
    expected[3] = 0.0
    torch.testing.assert_close(read, expected, rtol=0, atol=1e-6)


ranges = st.sampled_from([1e-9, 1e-7, 1e-4, 0.01, 1.0, 100.0, 1e4])
centres = st.sampled_from([0.0, 1e-3, -1.0, 30.0, -300.0])


def normal(seed, columns, scale, centre):
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(9, columns, generator=draw) * scale + centre
    rows[0] = centre  # a row without a range
    return rows


@given(st.integers(0, 2**32), st.sampled_from([4, 8, 12, 60, 64, 260]), ranges, centres)
def test_int4_has_the_numbers_of_fbgemm(seed, columns, scale, centre):
    """Its rows have scale and bias at the end, ours at the begin; what is read is bit-equal."""
    rows = normal(seed, columns, scale, centre)
    written = INT4.encode(rows, "t")
    assert written.shape == (9, INT4.row_bytes(columns)) == (9, columns // 2 + 4)
    fused = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, 4)
    assert torch.equal(written.roll(-4, 1), fused)
    read = torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(fused, 4)
    assert torch.equal(decode(INT4, written), read)


@given(st.integers(0, 2**32), st.sampled_from([4, 12, 64]), ranges, centres)
def test_the_error_of_int4(seed, columns, scale, centre):
    """Half a 15th of the row's range, and the roundings of scale and bias to float16."""
    rows = normal(seed, columns, scale, centre)
    low, high = rows.aminmax(dim=1, keepdim=True)

    def rounding(numbers):
        return (numbers.abs() * 2**-11).clamp(min=2**-25)

    bound = (high - low) / 30 + rounding(low) + 15 * rounding((high - low) / 15)
    error = (decode(INT4, INT4.encode(rows, "t")) - rows).abs()
    assert bool((error <= bound + rows.abs() * 2**-22).all())


def test_the_error_of_int4_is_not_smaller():
    rows = torch.randn(1000, 64) * 0.05
    low, high = rows.aminmax(dim=1)
    error = (decode(INT4, INT4.encode(rows, "t")) - rows).abs().amax(1) / ((high - low) / 30)
    assert 0.95 < float(error.max()) < 1.03  # of half a step


def test_fbgemm_reads_int4_as_we_do():
    rows = torch.randn(50, 12)
    numbers = torch.tensor([3, 0, 49, -1, 3])
    written = INT4.encode(rows, "t")
    read = NBitPooling([12], torch.int4)(written.view(-1), numbers, None)
    expected = decode(INT4, written)[numbers]
    expected[3] = 0.0
    torch.testing.assert_close(read, expected, rtol=0, atol=1e-6)


def read_last_rows_before_a_hole(dtype):
    """Reads rows that end `spare_bytes` before a page that cannot be read."""
    memory, form = mmap.mmap(-1, 3 * mmap.PAGESIZE), RowFormat(dtype)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    hole = ctypes.c_void_p(begin + 2 * mmap.PAGESIZE)
    assert ctypes.CDLL(None).mprotect(hole, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    for columns in (4, 8, 12, 20, 60, 64, 100):
        end = 2 * mmap.PAGESIZE - form.spare_bytes(columns)
        written = form.encode(torch.randn(20, columns), "t").view(-1)
        rows = torch.frombuffer(memory, dtype=torch.uint8)[end - len(written) : end].copy_(written)
        pooling, last = NBitPooling([columns], dtype), torch.tensor([19])
        pooled = pooling(rows, last, torch.tensor([0, 1]))
        assert torch.equal(pooled, pooling(rows, last, None))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int4])
def test_fbgemm_reads_the_spare_bytes_at_most(dtype):
    call(read_last_rows_before_a_hole, dtype)


@pytest.mark.parametrize("columns", [1, 2, 3, 6, 7, 13])
def test_int4_needs_columns_as_fbgemm_does(columns):
    rows = torch.ones(2, columns)
    with pytest.raises(RuntimeError):
        torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, 4)
    says = f"t: expected a multiple of 4 columns for rows of int4, as FBGEMM does, got {columns}"
    with pytest.raises(ValueError, match=says):
        INT4.encode(rows, "t")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_floats_are_to_nearest(dtype):
    form = RowFormat(dtype)
    rows = torch.cat([torch.randn(100, 8), torch.tensor([[1e-8, -65504.0, 0, -0.0, 1, 2, 3, 4.0]])])
    written = form.encode(rows, "t")
    assert written.shape[1] == form.row_bytes(8) == 8 * dtype.itemsize
    assert torch.equal(decode(form, written), rows.to(dtype).float())


@pytest.mark.parametrize("trained", [torch.float16, torch.bfloat16, torch.float32])
def test_float32_is_exact_for_every_dtype(trained):
    rows = torch.randn(10, 4).to(trained)
    form = RowFormat(torch.float32)
    assert torch.equal(decode(form, form.encode(rows, "t")), rows.float())


# torch casts few numbers by other code than many.
@pytest.mark.parametrize("columns", [1, 4, 16, 64])
@pytest.mark.parametrize(
    ("trained", "served"),
    [
        (torch.float16, torch.float16),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
    ],
)
def test_bits_of_training_are_kept(trained, served, columns):
    """Also those of NaNs."""
    if trained == torch.float32:
        bits = torch.tensor([0x7FC00000, -1, 0x7F800001, 0x7F800000, 1], dtype=torch.int32)
    else:
        bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    rows = bits.view(trained)[:, None].repeat(1, columns)
    form = RowFormat(served)
    written = form.encode(rows, "t").view(served)
    assert torch.equal(written.to(trained)[~rows.isnan()], rows[~rows.isnan()])
    words = written.view(torch.int32 if served == torch.float32 else torch.int16)
    is_nan = rows.isnan()[:, 0]
    if trained == served:
        assert torch.equal(words, rows.view(bits.dtype))
    else:  # the bits of a NaN, and zeros
        kept = 16 if trained == torch.bfloat16 else 13
        assert not (words[is_nan] & ((1 << kept) - 1)).any()
        assert len(words[is_nan][:, 0].unique()) == int(is_nan.sum())


# Of int8 the bias and the scale are float16, so what lies above the bias may be 255 times as much.
@pytest.mark.parametrize(
    ("dtype", "large"),
    [
        (torch.float16, 1e5),
        (torch.float16, -1e5),
        (torch.int8, 1e8),
        (torch.int8, -1e5),
        (torch.int4, 1e6),
        (torch.int4, -1e5),
    ],
)
def test_numbers_that_do_not_fit_are_refused(dtype, large):
    rows = torch.zeros(3, 4)
    rows[1, 2] = large
    with pytest.raises(
        ValueError, match=rf"t: expected rows of numbers that {str(dtype)[6:]} can hold"
    ):
        RowFormat(dtype).encode(rows, "t")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_int8_and_int4_hold_finite_numbers_only_and_floats_any(wrong):
    rows = torch.zeros(3, 4)
    rows[1, 2] = wrong
    for form, name in ((INT8, "int8"), (INT4, "int4")):
        with pytest.raises(ValueError, match=f"{name} can hold"):
            form.encode(rows, "t")
    for dtype in (torch.float16, torch.float32):
        form = RowFormat(dtype)
        torch.testing.assert_close(decode(form, form.encode(rows, "t")), rows, equal_nan=True)


def test_int8_refuses_rows_that_are_all_too_large():
    with pytest.raises(ValueError, match="int8 can hold"):
        INT8.encode(torch.full((2, 4), 1e6), "t")


def test_no_rows():
    for dtype in (torch.float32, torch.float16, torch.int8, torch.int4):
        form = RowFormat(dtype)
        assert form.encode(torch.empty(0, 4), "t").shape == (0, form.row_bytes(4))


def test_other_dtypes_are_refused():
    with pytest.raises(
        ValueError, match=r"expected rows of float32, float16, int8 or int4, got torch.int2"
    ):
        RowFormat(torch.int2)
