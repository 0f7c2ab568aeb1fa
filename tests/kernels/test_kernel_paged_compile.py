"""Test attention over pages compiled for every kind of GPU with the heads of real models: spills,
shared memory, loads during the products.
"""

import itertools

import pytest
from test_kernel_compile import compile_kernel, triton
from test_kernel_compile import pytestmark as pytestmark

# (query heads, key heads, width) of Qwen2.5-0.5B and Llama-3.1-8B; then every width that models
# have, and one key head for all.
MODELS = [(14, 2, 64), (32, 8, 128)]
WIDTHS = [(16, 8, 256), (32, 32, 80), (24, 8, 96), (32, 1, 64)]


def paged_kernels(heads, key_heads, width, dtype, bounds=(0, 0.0)):
    """Return each kernel of a launch with its constants, as test_kernel_compile's
    `compile_kernel` expects them, and its allowed spills.
    """
    from kernels import paged_attention_triton as kernels

    tile, first, several = kernels.choose_launch_sizes(
        width, 4 if dtype == "fp32" else 2, heads // key_heads
    )
    warps, stages = tile.pop("num_warps"), tile.pop("num_stages")
    some = {"K": key_heads, "REPEAT": heads // key_heads, "S": 256, "UPCAST": False, **tile}
    some |= {"SLIDING_WINDOW": bounds[0], "SOFTCAP": bounds[1]}
    some["PRECISION"] = "tf32x3" if dtype == "fp32" else "ieee"
    kinds = (
        dict.fromkeys(("table_ptr", "length_ptr", "private_length_ptr"), "*i32")
        | dict.fromkeys(("order_ptr", "group_ptr"), "*i64")
        | {"shares_ptr": "*i1"}
    )
    kinds |= dict.fromkeys(("q_ptr", "kv_ptr"), f"*{dtype}") | {"plane": "i64"}
    single, few = kinds | {"out_ptr": f"*{dtype}"}, 32 if dtype == "fp32" else 16
    merge = {"D": width, "MOST": 64, "SOME": 8, "BLOCK": tile["BLOCK"]}
    return [
        (
            kernels._private_pages_kernel,
            some | {"BM": first, "PARTIAL": False},
            warps,
            stages,
            single,
            few,
        ),
        (
            kernels._private_pages_kernel,
            some | {"BM": first, "PARTIAL": True},
            warps,
            stages,
            kinds,
            few,
        ),
        (
            kernels._shared_pages_kernel,
            some | {"BM": several, "HEADS": triton.next_power_of_2(heads // key_heads)},
            warps,
            stages,
            kinds,
            180,
        ),
        (kernels._merge_kernel, merge, 1, 3, single, 0),
    ]


CASES = [(90, "bf16", *MODELS[0])]
SOME = [
    (80, "bf16", *MODELS[1]),
    (89, "bf16", *MODELS[0]),
    (100, "bf16", *MODELS[1]),
    (120, "bf16", *MODELS[1]),
    (90, "bf16", *MODELS[1]),
]
SOME += [
    (90, "bf16", *WIDTHS[0]),
    (90, "bf16", *WIDTHS[1]),
    (80, "bf16", *WIDTHS[3]),
    (90, "fp16", *MODELS[1]),
    (89, "fp32", *WIDTHS[0]),
]
TARGETS, KINDS = (80, 86, 89, 90, 100, 120), ("bf16", "fp16", "fp32")
EVERY = [
    (target, kind, *model)
    for target, kind, model in itertools.product(TARGETS, KINDS, MODELS + WIDTHS)
]


@pytest.mark.parametrize(
    ("target", "dtype", "heads", "key_heads", "width"),
    CASES
    + [pytest.param(*case, marks=pytest.mark.slow) for case in SOME]
    + [
        pytest.param(*case, marks=pytest.mark.campaign)
        for case in EVERY
        if case not in CASES + SOME
    ],
)
def test_attention_over_pages(target, dtype, heads, key_heads, width, tmp_path):
    """The hot kernel spills almost nothing and loads the next keys during the products (cp.async),
    which run on the tensor cores.
    """
    for kernel, constants, warps, stages, kinds, allowed in paged_kernels(
        heads, key_heads, width, dtype
    ):
        compiled, _, spilled = compile_kernel(
            kernel, constants, (), warps, stages, kinds, tmp_path, target
        )
        assert spilled <= allowed, (kernel.__name__, spilled)
        if "_merge" not in kernel.__name__:
            assert "cp.async.cg" in compiled.asm["ptx"] and "mma" in compiled.asm["ptx"]


@pytest.mark.parametrize(
    "target",
    [90, pytest.param(80, marks=pytest.mark.slow), pytest.param(120, marks=pytest.mark.slow)],
)
def test_attention_over_pages_with_a_window_and_limited_scores(target, tmp_path):
    """With Gemma 2 9B's heads, score bounds add no spills, and keys are still loaded ahead."""
    for kernel, constants, warps, stages, kinds, allowed in paged_kernels(
        16, 8, 256, "bf16", (4096, 50.0)
    ):
        compiled, _, spilled = compile_kernel(
            kernel, constants, (), warps, stages, kinds, tmp_path, target
        )
        assert spilled <= allowed, (kernel.__name__, spilled)
        if "_merge" not in kernel.__name__:
            assert "cp.async.cg" in compiled.asm["ptx"] and "mma" in compiled.asm["ptx"]
