"""Test attention over pages compiled for every kind of GPU with the heads of real models: spills,
shared memory, loads during the products.
"""

import itertools

import pytest
from test_kernel_compile import GPUS, NAMES, compile_kernel, triton
from test_kernel_compile import pytestmark as pytestmark

# (query heads, key heads, width) of Qwen2.5-0.5B and Llama-3.1-8B; then every width that models
# have, and one key head for all. Gemma 2 9B has windows and limits scores.
MODELS = [(14, 2, 64), (32, 8, 128)]
WIDTHS = [(16, 8, 256), (32, 32, 80), (24, 8, 96), (32, 1, 64)]
GEMMA2 = (16, 8, 256)
UNBOUNDED, BOUNDS = (0, 0.0), (4096, 50.0)
QUICK = [(90, "bf16", MODELS[0], UNBOUNDED), (90, "bf16", GEMMA2, BOUNDS)]
SOME = [
    (80, "bf16", MODELS[1], UNBOUNDED),
    (89, "bf16", MODELS[0], UNBOUNDED),
    (100, "bf16", MODELS[1], UNBOUNDED),
    (120, "bf16", MODELS[1], UNBOUNDED),
    (90, "bf16", WIDTHS[1], UNBOUNDED),
    (80, "bf16", WIDTHS[3], UNBOUNDED),
    (90, "fp16", MODELS[1], UNBOUNDED),
    (89, "fp32", WIDTHS[0], UNBOUNDED),
    (80, "bf16", GEMMA2, BOUNDS),
    (120, "bf16", GEMMA2, BOUNDS),
]
EVERY = itertools.product(GPUS, NAMES, MODELS + WIDTHS, [UNBOUNDED])
REST = [case for case in EVERY if case not in QUICK + SOME]


def paged_kernels(heads, key_heads, width, dtype, bounds):
    """Return each kernel of a launch with its constants, as test_kernel_compile's
    `compile_kernel` expects them, and its allowed spills.
    """
    from kernels import paged_attention_triton as kernels

    repeat = heads // key_heads
    tile, first, several = kernels.choose_launch_sizes(width, 4 if dtype == "fp32" else 2, repeat)
    warps, stages = tile.pop("num_warps"), tile.pop("num_stages")
    some = {"K": key_heads, "REPEAT": repeat, "S": 256, "UPCAST": False, **tile}
    some |= {"SLIDING_WINDOW": bounds[0], "SOFTCAP": bounds[1]}
    some["PRECISION"] = "tf32x3" if dtype == "fp32" else "ieee"
    kinds = dict.fromkeys(("table_ptr", "length_ptr", "private_length_ptr"), "*i32")
    kinds |= dict.fromkeys(("order_ptr", "group_ptr"), "*i64") | {"shares_ptr": "*i1"}
    kinds |= dict.fromkeys(("q_ptr", "kv_ptr"), f"*{dtype}") | {"plane": "i64"}
    single, few = kinds | {"out_ptr": f"*{dtype}"}, 32 if dtype == "fp32" else 16
    private, shared = some | {"BM": first}, some | {"BM": several}
    shared["HEADS"] = triton.next_power_of_2(repeat)
    merge = {"D": width, "MOST": 64, "SOME": 8, "BLOCK": tile["BLOCK"]}
    return [
        (kernels._private_pages_kernel, private | {"PARTIAL": False}, warps, stages, single, few),
        (kernels._private_pages_kernel, private | {"PARTIAL": True}, warps, stages, kinds, few),
        (kernels._shared_pages_kernel, shared, warps, stages, kinds, 180),
        (kernels._merge_kernel, merge, 1, 3, single, 0),
    ]


@pytest.mark.parametrize(
    ("target", "dtype", "model", "bounds"),
    QUICK
    + [pytest.param(*case, marks=pytest.mark.slow) for case in SOME]
    + [pytest.param(*case, marks=pytest.mark.campaign) for case in REST],
)
def test_attention_over_pages(target, dtype, model, bounds, tmp_path):
    """The hot kernel spills almost nothing and loads the next keys during the products (cp.async),
    which run on the tensor cores, also within a window and with limited scores.
    """
    for kernel, constants, *sizes, kinds, allowed in paged_kernels(*model, dtype, bounds):
        compiled, _, spilled = compile_kernel(
            kernel, constants, (), *sizes, kinds, tmp_path, target
        )
        assert spilled <= allowed, (kernel.__name__, spilled)
        if "_merge" not in kernel.__name__:
            assert "cp.async.cg" in compiled.asm["ptx"] and "mma" in compiled.asm["ptx"]
