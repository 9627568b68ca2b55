"""The walk over machine code: which instructions of a listing one warp executes."""

import math
import types

import pytest
import walk

SOURCE = """def kernel():
    first()
    usual()


def rare():
    slow()


def loop():
    again()
"""


def sass(path, *lines):
    """An nvdisasm listing: labels, source lines ("#7" or "#7@2", inlined at line 2) and instructions."""
    out = []
    for address, line in enumerate(lines):
        if line.startswith("#"):
            at, _, caller = line[1:].partition("@")
            inlined = f' inlined at "{path}", line {caller}' if caller else ""
            out.append(f'\t//## File "{path}", line {at}{inlined}')
        elif line.endswith(":"):
            out.append(line)
        else:
            out.append(f"        /*{address * 16:04x}*/   {line} ;")
    return "\n".join(out)


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "kernel.py"
    file.write_text(SOURCE)
    return str(file)


def walked(listing, **how):
    return walk.walk(walk.sass_blocks(listing), **how)


def test_the_longer_way_unless_it_is_off(path):
    rare = ["#7@3", *["FADD R0, R0, R1"] * 9]
    listing = sass(
        path, "#2", "IADD3 R0, R0, R1, RZ", "@P0 BRA `(.L_x_0)", *rare, "EXIT", ".L_x_0:", "#3", "EXIT", "NOP"
    )
    assert walked(listing).instructions == 2 + 9 + 1
    taken = walked(listing, off=["rare"])
    assert taken.instructions == 2 + 1
    assert taken.listed.total() == 2 + 10 + 1  # padding is no instruction


def test_one_instruction_of_an_off_function_bars_its_block(path):
    """Some releases of Triton drop the outer functions from most instructions of what was inlined."""
    rare = ["#11", *["FADD R0, R0, R1"] * 9, "#7@3", "FADD R0, R0, R1"]
    listing = sass(path, "#2", "@P0 BRA `(.L_x_0)", *rare, "EXIT", ".L_x_0:", "#3", "EXIT")
    assert walked(listing).instructions == 12
    assert walked(listing, off=["rare"]).instructions == 2


def test_branches_that_no_rule_decides_are_doubt(path):
    """An early exit is not taken; of two ways to the common end nothing says which is."""
    start = ["#2", "@P0 BRA `(.L_x_0)", "EXIT", ".L_x_0:", "@P1 BRA `(.L_x_1)"]
    ways = [*["FADD R0, R0, R1"] * 9, "BRA `(.L_x_2)", ".L_x_1:", "IADD3 R0, R0, R1, RZ"]
    taken = walked(sass(path, *start, *ways, ".L_x_2:", "EXIT"))
    assert taken.instructions == 2 + 10 + 1
    assert taken.doubt == 10 - 1
    certain = walked(sass(path, *start, ".L_x_1:", "IADD3 R0, R0, R1, RZ", "EXIT"))
    assert certain.doubt == 0


def test_a_way_that_is_on_is_taken_without_doubt(path):
    rare = ["#7@3", *["FADD R0, R0, R1"] * 3, "BRA `(.L_x_1)"]
    usual = [".L_x_0:", "#11@3", *["FADD R0, R0, R1"] * 9]
    taken = walked(sass(path, "#2", "@P0 BRA `(.L_x_0)", *rare, *usual, ".L_x_1:", "EXIT"), on=["rare"])
    assert taken.instructions == 1 + 4 + 1
    assert taken.doubt == 0


def test_the_functions_that_the_bench_names_are_the_samplers():
    static = pytest.importorskip("static")
    from rowseed.kernels import fused, narrow

    for name in (*static.OFF_PATH, *static.ON_PATH, *static.TRIPS):
        assert hasattr(fused, name) or hasattr(narrow, name), name


def test_only_ways_that_are_off_leave_the_walk_lost(path):
    listing = sass(path, "#2", "IADD3 R0, R0, R1, RZ", "@P0 BRA `(.L_x_0)", "#7@3", "EXIT", ".L_x_0:", "EXIT")
    assert walked(listing, off=["rare"]).doubt == math.inf


def test_figures_without_a_known_branch_are_left_out(path, monkeypatch):
    static = pytest.importorskip("static")
    ways = ["#2", "@P0 BRA `(.L_x_0)", *["FADD R0, R0, R1"] * 9, ".L_x_0:", "#3", "EXIT"]
    for lines, known in ((ways, False), (["#2", *ways[2:]], True)):
        outputs = {"nvdisasm": sass(path, *lines), "cuobjdump": "REG:8 STACK:0 LOCAL:0"}
        monkeypatch.setattr(static, "_tool", lambda name, *_, outputs=outputs: outputs[name])
        metadata = types.SimpleNamespace(num_warps=4, shared=0)
        figures = static.measure(types.SimpleNamespace(metadata=metadata, asm={"cubin": b""}))
        assert figures["registers"] == 8
        counted = [figures[name] for name in ("instructions", "barriers")]
        assert counted == ([10, 0] if known else [None, None])


def test_a_loop_counts_its_trips(path):
    body = ["#11@3", ".L_x_1:", "BAR.SYNC.DEFER_BLOCKING 0x0", "REDUX.SUM UR4, R0", "@P0 BRA `(.L_x_1)"]
    listing = sass(path, "#2", "MOV R0, RZ", *body, "#3", "EXIT")
    taken = walked(listing, trips={"loop": 5})
    assert taken.instructions == 1 + 5 * 3 + 1
    assert taken.count("BAR") == 5
    assert taken.loops_once == 0
    once = walked(listing)
    assert once.instructions == 1 + 3 + 1
    assert once.loops_once == 1
    assert walked(listing, trips={"loop": 0}).instructions == 2


def test_calls_and_diverged_warps_are_off_the_path(path):
    slow = ["MOV R2, 0x40", "CALL.REL.NOINC `(slow)", *["MOV R3, R2"] * 20]
    listing = sass(
        path, "#2", "BSSY B0, `(.L_x_2)", "@!P0 BRA `(.L_x_2)", *slow, "BSYNC B0", ".L_x_2:", "EXIT"
    )
    assert walked(listing).instructions == 3
    diverged = sass(path, "#2", "BRA.DIV UR4, `(.L_x_3)", "EXIT", ".L_x_3:", *["MOV R3, R2"] * 20, "EXIT")
    assert walked(diverged).instructions == 2


def test_amd_listing(path):
    folder, name = path.rsplit("/", 1)
    listing = f"""
\t.file\t1 "{folder}" "{name}"
\t.loc\t1 2 0 ; {name}:2:0
\ts_load_dword s0, s[0:1], 0x0
\ts_cbranch_scc1 .LBB0_2
\t.loc\t1 7 0 ; {name}:7:0 @[ {name}:3:0 ]
\tv_add_f32_e32 v0, v0, v1
\tv_add_f32_e32 v0, v0, v1
.LBB0_2:
\t.loc\t1 3 0 ; {name}:3:0
\ts_barrier
\ts_nop 0
\ts_endpgm
\t.section\t.rodata
"""
    blocks = walk.amdgcn_blocks(listing)
    assert walk.walk(blocks).instructions == 2 + 2 + 2
    assert walk.walk(blocks, off=["rare"]).opcodes == {
        "s_load_dword": 1,
        "s_cbranch_scc1": 1,
        "s_barrier": 1,
        "s_endpgm": 1,
    }
