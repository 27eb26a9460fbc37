"""The emulator of PTX (tests/csrc/ptx): the parser, what is not supported, what was executed."""

import numpy as np
import pytest
from ptx_emulator import HEAD, Program, kernel


@pytest.mark.parametrize(
    "code",
    [
        "frobnicate.u32 %x, %x;",
        "add.ftz.f32 %x, %x, %x;",  # a modifier
        "div.approx.f32 %x, %x, %x;",
        "add.s32 %x, %x, %nothing;",
        "mov.u32 %x, %clock;",
        "atom.global.min.f32 %x, [%out], %x;",
        "ld.global.v2.u32 %x, [%out];",
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%x}, {%x}, {%x}, {%x};",
        "call.uni something;",
        "cp.async.ca.shared.global [%x], [%out], 4;",
    ],
)
def test_what_is_not_supported_is_named_when_it_is_executed(code):
    body = f"setp.eq.u32 %p, %i, 3;\n@%p {code}\nst.global.u32 [%out], 1;"
    text = HEAD + kernel(body, registers=["pred %p", "b32 %x"])
    line = text.splitlines().index(f"@%p {code}") + 1
    program = Program(text)
    assert program.unsupported() == [f"@%p {code.rstrip(';')}"]
    out = np.zeros(1, np.uint32)
    program.run("kernel", 1, 3, [out])
    assert out[0] == 1
    launched = program.launch("kernel", 1, 4, [out])
    assert launched.error == 98
    assert f"lane 3, PTX line {line} (@%p {code.rstrip(';')})" in launched.report
    assert "expected an instruction that the emulator supports" in launched.report


def test_a_trap_is_told():
    launched = Program(kernel("trap;")).launch("kernel", 1, 1, [0])
    assert launched.error == 719
    assert "expected that no lane comes here, got a trap" in launched.report
