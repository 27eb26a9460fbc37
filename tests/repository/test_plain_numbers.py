"""Policies, initializers and configs take numbers of numpy, and hold equal numbers of Python."""

import numpy as np
import pytest

import torchrec_dyn as dyn

HALF = np.float32(0.5)


@pytest.mark.parametrize(
    ("make", "given", "plain"),
    [
        (dyn.Uniform, (-HALF, HALF), (-0.5, 0.5)),
        (dyn.Normal, (np.int64(0), np.float64(0.1)), (0, 0.1)),
        (dyn.TruncatedNormal, (np.float16(0), HALF, np.int8(-2), 2), (0.0, 0.5, -2, 2)),
        (dyn.Constant, (HALF,), (0.5,)),
        (dyn.XavierUniform, (HALF,), (0.5,)),
        (dyn.XavierNormal, (HALF,), (0.5,)),
        (dyn.KaimingUniform, (HALF,), (0.5,)),
        (dyn.KaimingNormal, (HALF,), (0.5,)),
        (dyn.AdmitAfter, (np.int64(2), np.uint8(5)), (2, 5)),
        (dyn.AdmitWithProbability, (HALF,), (0.5,)),
        (lambda steps: dyn.ExpireAfter(steps=steps), (np.int32(60),), (60,)),
        (lambda time: dyn.ExpireAfter(time=time), (np.int64(60),), (60,)),
        (lambda time: dyn.LeastFrequentlyUsed(half_life_time=time), (np.int64(9),), (9,)),
        (lambda unit: dyn.LowestScore(unit=unit), (HALF,), (0.5,)),
        (lambda steps: dyn.LowestScore(half_life_steps=steps), (np.int16(9),), (9,)),
        (lambda seed: dyn.DynamicTableConfig(seed=seed), (np.int64(3),), (3,)),
    ],
)
def test_numbers_of_numpy_become_pythons(make, given, plain):
    made, expected = make(*given), make(*plain)
    assert made == expected and repr(made) == repr(expected)


@pytest.mark.parametrize("value", [np.float32(2.0), np.bool_(True), np.array([2])])
def test_other_types_are_still_refused(value):
    with pytest.raises(ValueError, match=r"AdmitAfter\.count: expected an integer from 1 to"):
        dyn.AdmitAfter(value)
