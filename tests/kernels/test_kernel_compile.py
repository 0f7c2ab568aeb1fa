"""Test that every kernel compiles at its real tile sizes for Hopper (sm_90), and the kernels with
matrix products also for sm_80, 86, 89, 100 and 120, on a machine without a GPU.

The compiled code is checked for products and copies by the device's hardware instructions, shared
memory within the limit of a block, spilled registers from the assembler's report, and 64-bit
offsets if T x V exceeds 2^31.
"""

import itertools
import math
import os
import re
import subprocess
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not compile"
)
ASSEMBLERS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
GPUS = (80, 86, 89, 90, 100, 120)  # compute capabilities
NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
INTS = (
    "N V T col_base col_end tiles tile_base split_base parts stride stride_x stride_w stride_kept "
    "stride_exp stride_out columns exps R splits first stride_row stride_head stride_page "
    "stride_place stride_table"
).split()
FLOATS = "in_scale out_scale headroom beta low high scale".split()
# Numbers that are multiples of 16, as are all addresses.
ALIGNED = set(
    "stride_x stride_w stride_out stride_kept stride_row stride_head stride_page stride_place "
    "plane".split()
)
HEAD_DATA = ("bias_ptr", "kept_ptr", "out_ptr")
LONGS = ("y_ptr", "at_ptr", "cu_ptr")
# Bytes of shared memory that a block may request, by compute capability (CUDA C++ Programming
# Guide, "Technical specifications").
SHARED_MEMORY_BYTES = {80: 166_912, **dict.fromkeys((86, 89, 120), 101_376)}
SHARED_MEMORY_BYTES |= dict.fromkeys((90, 100), 232_448)


def build(*inputs, **more):
    """Return (compiled kernel, bytes of spilled registers); see `compile_kernel`."""
    compiled, _, spilled = compile_kernel(*inputs, **more)
    return compiled, spilled


def compile_kernel(
    kernel, constants, data, warps, stages, descriptors=None, tmp_path=None, capability=90
):
    """Return (compiled kernel, registers per thread, spilled bytes per thread). Every tensor that
    is not an index or the data type is float32.
    """
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.compiler import ASTSource

    kinds = dict.fromkeys(INTS, "i32") | dict.fromkeys(FLOATS, "fp32")
    kinds |= dict.fromkeys(LONGS, "*i64") | {"mask_ptr": "*u8"}
    kinds |= dict.fromkeys(data, f"*{constants.pop('TYPE', 'fp32')}") | (descriptors or {})
    signature = {
        name: "constexpr" if name in constants else kinds.get(name, "*fp32")
        for name in kernel.arg_names
    }
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in ALIGNED
    }
    source = ASTSource(kernel, signature, constants, attributes)
    reports = []

    def assemble(backend, ptx, *_):
        """Assemble in place of Triton, with a report of registers and spills."""
        path, binary = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
        path.write_text(ptx)
        name = re.search(r"\.target (sm_\w+)", ptx)[1]
        assembler = ASSEMBLERS / ("ptxas" if capability < 100 else "ptxas-blackwell")
        command = [str(assembler), "-v", f"--gpu-name={name}", str(path), "-o", str(binary)]
        reports.append(subprocess.run(command, check=True, capture_output=True, text=True).stderr)
        return binary.read_bytes()

    # A kernel from Triton's cache would have no report.
    cache = mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": str(tmp_path)})
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": warps, "num_stages": stages}
    with cache, mock.patch.object(CUDABackend, "make_cubin", assemble):
        compiled = triton.compile(source, target=target, options=options)
    (report,) = reports
    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES[capability]
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", report))
    return compiled, registers, sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", report))


def head_options(D, dtype, descriptors, capability=90):
    from kernels.linear_logprob_triton import GROUP, SPLITS
    from kernels.tile_config import GpuInfo, select_tile_sizes

    tiles = select_tile_sizes(D, NAMES[dtype], GpuInfo(capability))
    constants = {"D": D, "BM": tiles.rows, "BN": tiles.columns, "BK": tiles.depth}
    constants |= {"SPLITS": SPLITS, "GROUP": GROUP, "UPCAST": False, "DESCRIPTORS": descriptors}
    constants |= {"PRECISION": "tf32x3" if dtype == "fp32" else "ieee", "TYPE": dtype}
    blocks = {"x": (tiles.rows, tiles.depth), "w": (tiles.columns, tiles.depth)}
    kinds = {
        name: f"tensordesc<{dtype}[{a}, {b}]>" if descriptors else f"*{dtype}"
        for name, (a, b) in blocks.items()
    }
    return constants, kinds, tiles


PLAIN, FULL = {"HAS_BIAS": False, "SOFTCAP": False}, {"HAS_BIAS": True, "SOFTCAP": True}
NOTHING_KEPT = {"ENTROPY": True, "KEEP": False, "KEEP_SLOPE": False}
QUICK = [(2048, "bf16", True)]
MODELS = [(4096, "bf16", True), (1000, "fp16", False), (1024, "fp32", True)]
MORE_MODELS = [(896, "bf16", True), (2304, "bf16", True), (3584, "bf16", False)]


@pytest.mark.parametrize(
    ("D", "dtype", "descriptors"),
    QUICK
    + [pytest.param(*model, marks=pytest.mark.slow) for model in MODELS]
    + [pytest.param(*model, marks=pytest.mark.campaign) for model in MORE_MODELS],
)
def test_linear_logprob_kernels(D, dtype, descriptors, tmp_path):
    """The two kernels that the default path runs with descriptors must not spill; rarer variants
    may spill a few hundred bytes.
    """
    from kernels import linear_logprob_triton as kernels

    variants = [
        (kernels._forward_kernel, FULL | NOTHING_KEPT | {"KEEP": True, "KEEP_SLOPE": True}, 300),
        (kernels._dlogits_kernel, FULL | {"HAS_C": True}, 800),
    ]
    if (D, dtype, descriptors) not in QUICK:  # the next test compiles these two for it
        variants.append((kernels._forward_kernel, PLAIN | NOTHING_KEPT, 0))
        variants.append((kernels._dlogits_kernel, PLAIN | {"HAS_C": False}, 0))
    for kernel, options, allowed in variants:
        allowed = allowed if descriptors else allowed + 300
        check_hopper_code(kernel, options, allowed, (D, dtype, descriptors), tmp_path)


def check_hopper_code(kernel, options, allowed, model, tmp_path):
    """Check the spills, products and copies of a kernel. Return the compiled kernel."""
    constants, kinds, tiles = head_options(*model)
    sizes = (tiles.warps, tiles.stages, kinds, tmp_path)
    compiled, spilled = build(kernel, constants | options, HEAD_DATA, *sizes)
    assert "wgmma" in compiled.asm["ptx"]
    assert spilled <= allowed, (kernel.__name__, options, spilled)
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"] or not model[2]
    return compiled


@pytest.mark.parametrize("name", ["_forward_kernel", "_dlogits_kernel"])
def test_loops_over_tiles_are_flattened_into_the_products(name, tmp_path):
    """A single loop with one product lets loads of the next tile start under the epilogue of the
    current tile. Without `flatten` the compiler makes two loops.
    """
    from kernels import linear_logprob_triton as kernels

    options = {"_forward_kernel": NOTHING_KEPT, "_dlogits_kernel": {"HAS_C": False}}[name]
    results = []
    for word, allowed in (("flatten=True", 0), ("flatten=False", math.inf)):
        kernel = triton.JITFunction(getattr(kernels, name).fn)
        assert kernel.src.count("flatten=True") == 1
        kernel._unsafe_update_src(kernel.src.replace("flatten=True", word))
        compiled = check_hopper_code(kernel, options | PLAIN, allowed, *QUICK, tmp_path)
        code = compiled.asm["ttgir"]
        loops, products = r"\bscf.for\b", r"\bttng.warp_group_dot\b"
        results.append((len(re.findall(loops, code)), len(re.findall(products, code))))
    assert results == [(1, 1), (2, 1)]


# Bytes per thread that the assembler may spill: in the forward with KEEP, bias and softcap, and in
# its dlogits. The other kernels must not spill.
SPILLS = {
    "bf16": {80: (150, 0), 86: (100, 0), 89: (100, 0), 90: (300, 300), 100: (60, 0), 120: (40, 0)},
    "fp32": {80: (200, 0), 86: (100, 0), 89: (100, 0), 90: (0, 0), 100: (0, 0), 120: (60, 0)},
}
SOME = [("bf16", 80, 4096), ("fp16", 89, 2048), ("bf16", 100, 4096), ("fp32", 120, 4096)]
EVERY = list(itertools.product(NAMES, GPUS, (896, 2048, 4096)))


@pytest.mark.parametrize(
    ("dtype", "capability", "D"),
    [pytest.param(*case, marks=pytest.mark.slow) for case in SOME]
    + [pytest.param(*case, marks=pytest.mark.campaign) for case in EVERY if case not in SOME],
)
def test_linear_logprob_kernels_on_other_gpus(dtype, capability, D, tmp_path):
    """GPUs before Hopper have no copy engine: with descriptors an A100 spilled 20 KB per thread. A
    consumer GPU has 99 KiB of shared memory per block, not 227.
    """
    from kernels import linear_logprob_triton as kernels
    from kernels.tile_config import GpuInfo

    copies = "cp.async.bulk.tensor" if capability >= 90 else "cp.async.cg"
    products = {90: "wgmma", 100: "tcgen05.mma"}.get(capability, "mma.sync")
    keeps, bent = SPILLS["fp32" if dtype == "fp32" else "bf16"][capability]
    variants = [
        (kernels._forward_kernel, PLAIN | NOTHING_KEPT, 0),
        (kernels._dlogits_kernel, PLAIN | {"HAS_C": False}, 0),
        (kernels._forward_kernel, FULL | NOTHING_KEPT | {"KEEP": True, "KEEP_SLOPE": True}, keeps),
        (kernels._dlogits_kernel, FULL | {"HAS_C": True}, bent),
    ]
    for kernel, options, allowed in variants:
        constants, kinds, tiles = head_options(D, dtype, GpuInfo(capability).has_tma, capability)
        sizes = (tiles.warps, tiles.stages, kinds, tmp_path, capability)
        compiled, spilled = build(kernel, constants | options, HEAD_DATA, *sizes)
        assert spilled <= allowed, (kernel.__name__, options, spilled)
        assert copies in compiled.asm["ptx"]
        assert products in compiled.asm["ptx"] or dtype == "fp32"


# Arguments that a model, a memory layout or a run fixes; every other argument changes from batch to
# batch.
SETTLED = {
    *"V columns eps stride_x stride_w stride_kept stride_out stride_row stride_head".split(),
    *"stride_page stride_place plane stride_table positions in_scale out_scale headroom".split(),
    *"scale beta low high stride stride_a stride_y".split(),
    # for an adapter of a layer
    *(f"{name}_{i}" for name in "scale end column columns rank ranks".split() for i in range(3)),
}
MODULES = (
    "linear_logprob_triton linear_logprob_hopper sample_tokens_triton decode_ops_triton paged_attention_triton "
    "token_logprob_triton policy_loss_triton lora_ops_triton"
)


def test_the_tests_of_all_kernels_know_every_module_with_kernels():
    folder = Path(import_module("kernels").__file__).parent
    found = {path.stem for path in folder.glob("*.py") if "@triton.jit" in path.read_text()}
    assert found == set(MODULES.split())


def test_numbers_of_a_batch_compile_no_variants():
    """200 micro-batches of 3k to 33k tokens once compiled 8 to 20 variants, at seconds each, and
    at different steps on each rank.
    """
    changing = 0
    for module in MODULES.split():
        for name, kernel in vars(import_module(f"kernels.{module}")).items():
            if not isinstance(kernel, triton.JITFunction) or not name.endswith("_kernel"):
                continue
            for p in kernel.params:
                is_number = not p.name.endswith("_ptr") and p.name not in ("x", "w")
                if is_number and not p.is_constexpr and p.name not in SETTLED:
                    assert p.do_not_specialize, (module, name, p.name)
                    changing += 1
    # none in step_triton and token_logprob_triton: only the grid depends on the number of rows
    assert changing > 35


def test_defect_9_offsets_are_64_bit(tmp_path):
    """Row times stride is 64-bit in every kernel that accesses a tensor of T x V elements."""
    from kernels import linear_logprob_triton as head
    from kernels import token_logprob_triton as logits

    constants, kinds, tiles = head_options(2048, "bf16", False)
    constants |= PLAIN | {"HAS_C": False}
    sizes = (tiles.warps, tiles.stages, kinds, tmp_path)
    compiled, _ = build(head._dlogits_kernel, constants, ("bias_ptr", "out_ptr"), *sizes)
    products = re.findall(r"arith.muli .* : (tensor<\d+x1xi\d+>)", compiled.asm["ttir"])
    assert products and all(kind.endswith("i64>") for kind in products)
    constants = {"BLOCK": 8192, "TYPE": "bf16"}
    compiled, _ = build(logits._forward_kernel, constants, ("logits_ptr",), 8, 3, None, tmp_path)
    assert re.search(r"arith.muli %\w+, %\w+ : i64", compiled.asm["ttir"])


def test_defect_12_unaligned_targets_are_not_read_in_wide_words():
    """Without a guarantee of 16-byte alignment the compiler must not load two int64 at once."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kernels import linear_logprob_triton as head

    constants, kinds, tiles = head_options(896, "bf16", False)
    constants |= PLAIN | {"HAS_C": False}
    constants.pop("TYPE")
    kinds |= dict.fromkeys(INTS, "i32") | dict.fromkeys(FLOATS, "fp32")
    kinds |= dict.fromkeys(LONGS, "*i64") | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "*fp32") for name in head._dlogits_kernel.arg_names}
    source = ASTSource(head._dlogits_kernel, signature, constants)
    target = GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": 4})
    assert not re.search(r"ld\.global\S*\.v2\.b64", compiled.asm["ptx"])


TARGETS = [(90, ("bf16",))]
TARGETS += [pytest.param(90, ("fp16", "fp32"), marks=pytest.mark.slow)]
TARGETS += [pytest.param(120, tuple(NAMES), marks=pytest.mark.slow)]
TARGETS += [pytest.param(n, tuple(NAMES), marks=pytest.mark.campaign) for n in (80, 86, 89, 100)]


@pytest.mark.parametrize(("capability", "kinds"), TARGETS)
def test_kernels_without_products(capability, kinds, tmp_path):
    """They spill nothing for any input dtype, with the tile sizes that the target's
    products use.
    """
    from kernels import linear_logprob_triton, policy_loss_triton, token_logprob_triton
    from kernels.tile_config import GpuInfo, select_tile_sizes

    cases = [
        (linear_logprob_triton._combine_kernel, {"PARTS": 32, "BLOCK": 32}, (), 4),
        (policy_loss_triton._sequence_mean_kernel, {"HAS_MASK": True, "BLOCK": 1024}, (), 4),
    ]
    aligned = linear_logprob_triton._align_kernel
    saved, more = linear_logprob_triton._saved_dlogits_kernel, {"SOFTCAP": True, "HAS_AT": True}
    forward, backward = token_logprob_triton._forward_kernel, token_logprob_triton._backward_kernel
    for kind in kinds:
        gpu = GpuInfo(capability)
        for BN in {select_tile_sizes(D, NAMES[kind], gpu).columns for D in (896, 4096)}:
            tile = {"BM": 32, "BN": BN, "TYPE": kind}
            cases.append((aligned, tile, ("kept_ptr",), 8))
            cases.append((saved, tile | more, ("kept_ptr", "out_ptr"), 8))
        row = {"BLOCK": 8192, "TYPE": kind}
        cases.append((forward, dict(row), ("logits_ptr",), 8))
        cases.append((backward, row | {"HAS_C": True}, ("logits_ptr", "out_ptr"), 8))
    options = {"HAS_MASK": True, "HAS_LOW": True, "HAS_HIGH": True, "BLOCK": 1024}
    cases += [
        (policy_loss_triton._policy_loss_kernel, options | {"KIND": number}, (), 4)
        for number in range(5)
    ]
    for kernel, constants, data, warps in cases:
        _, spilled = build(kernel, constants, data, warps, 3, None, tmp_path, capability)
        assert spilled == 0, (kernel.__name__, constants, spilled)


SAMPLER_INTS = {
    **dict.fromkeys((f"stride_{x}_{part}" for x in "kv" for part in ("prompt", "token")), "i32"),
    **dict.fromkeys(("stride_k_head", "stride_v_head", "slices", "positions"), "i32"),
    **dict.fromkeys(("plane", "stride_page", "stride_place"), "i64"),
}


SLOTS = {"slot_ptr": "*i64", "T": "i32", "stride_slot": "i32"}


def sampler_kernels(capability):
    """Yield (kernel, constants, data, warps, stages, kinds, spills allowed) for the sampler and a
    decoding step, at the sizes of a real model.
    """
    from kernels import decode_ops_triton, sample_tokens_triton
    from kernels.tile_config import GpuInfo, select_tile_sizes

    longs = dict.fromkeys(("position_ptr", "page_ptr", "place_ptr", "token_ptr"), "*i64")
    other = SAMPLER_INTS | longs | {"slice_ptr": "*i32", "greedy_ptr": "*u8", "eps": "fp32"}
    wide = dict.fromkeys(("uniform_ptr", "rest_ptr"), "*fp64")
    constants, kinds, tiles = head_options(2048, "bf16", GpuInfo(capability).has_tma, capability)
    assert tiles == select_tile_sizes(2048, torch.bfloat16, GpuInfo(capability))
    constants["SUB"], sizes = 64, (tiles.warps, tiles.stages)
    yield sample_tokens_triton._slices_kernel, constants, (), *sizes, other | kinds, 300
    pick = {"HAS_GREEDY": True, "BM": 1, "BS": 4096}
    search = {"D": 2048, "BM": 1, "SUB": 64, "BK": 64, "HAS_GREEDY": True, "TYPE": "bf16"}
    norm = {"E": 4096, "HAS_X": True, "BLOCK": 4096, "TYPE": "bf16"}
    silu = {"F": 4864, "BLOCK": 1024, "TYPE": "bf16"}
    rope = {"H": 16, "K": 8, "D": 128, "HAS_NORM": True, "BLOCK": 128, "TYPE": "bf16"}
    append = {"S": 256, "K": 8, "D": 128, "BLOCK": 1024, "TYPE": "bf16"}
    for kernel, constants, data, warps, kinds in (
        (sample_tokens_triton._pick_kernel, pick, "", 16, wide),
        (sample_tokens_triton._search_kernel, search, "x w", 4, wide),
        (decode_ops_triton._fused_add_rms_norm_kernel, norm, "x residual weight out", 8, {}),
        (decode_ops_triton._silu_mul_kernel, silu, "gate_up out", 4, {}),
        (decode_ops_triton._rope_to_cache_kernel, rope, "qkv norm rope q kv", 1, {}),
        (decode_ops_triton._append_to_cache_kernel, append, "k v kv", 4, SLOTS),
    ):
        pointers = [f"{name}_ptr" for name in data.split()]
        yield kernel, constants, pointers, warps, 3, other | kinds, 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability",
    [pytest.param(n, marks=[pytest.mark.campaign] * (n not in (80, 90, 120))) for n in GPUS],
)
def test_the_samplers_kernels(capability, tmp_path):
    """Kernels without products compile for the targets of `test_kernels_without_products`."""
    for kernel, constants, data, warps, stages, kinds, allowed in sampler_kernels(capability):
        if capability not in (80, 90, 120) and "BK" not in constants:
            continue
        _, spilled = build(kernel, constants, data, warps, stages, kinds, tmp_path, capability)
        assert spilled <= allowed, (kernel.__name__, spilled)


def hoppers_kernels(kind, D):
    """Yield (kernel, constants, data, warps, stages, spilled bytes allowed) for the
    warp-specialized branch.
    """
    from kernels import linear_logprob_hopper as kernels
    from kernels.tile_config import HOPPER_TILES

    tiles, data = HOPPER_TILES, ("x_ptr", "w_ptr", "out_ptr", "kept_ptr")
    base = {"BM": tiles.rows, "BN": tiles.columns, "BK": tiles.depth, "GROUP": 16, "UPCAST": False}
    base |= {"PRECISION": "ieee", "WS": True, "TYPE": kind, "D": D}
    plain = {"ENTROPY": True, "KEEP": False, "HALVES": 1, "SPLITS": 132}
    keeping = plain | {"KEEP": True, "HALVES": 1 if D >= 1536 else 2}
    for kernel, options, allowed in (
        (kernels._forward_ws_kernel, plain, 0),
        (kernels._forward_ws_kernel, keeping, 100),
        (kernels._dlogits_ws_kernel, {"HAS_C": False}, 100),
        (kernels._dlogits_ws_kernel, {"HAS_C": True}, 100),
    ):
        yield kernel, base | options, data, tiles.warps, tiles.stages, allowed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "D"),
    [
        ("bf16", 896),
        ("bf16", 2048),
        ("fp16", 2048),
        pytest.param("bf16", 4096, marks=pytest.mark.campaign),
    ],
)
def test_hoppers_branch_has_warps_with_tasks_of_their_own(kind, D, tmp_path):
    """A block has 384 threads: a group of four warps copies and two groups multiply. Registers move
    from the first to the other two.
    """
    for kernel, constants, data, warps, stages, allowed in hoppers_kernels(kind, D):
        compiled, spilled = build(kernel, constants, data, warps, stages, None, tmp_path)
        assert spilled <= allowed, (kernel.__name__, spilled)
        code = compiled.asm["ptx"]
        for words in ("setmaxnreg", r"\.reqntid 384", "wgmma", r"cp\.async\.bulk\.tensor"):
            assert re.search(words, code), (kernel.__name__, words)


@pytest.mark.parametrize("kind", range(5))
def test_the_policy_loss_has_no_minimum_that_drops_a_nan(kind, tmp_path):
    """PTX's min.f32 and max.f32 return the other operand if one is NaN; min.NaN.f32 and max.NaN.f32
    return NaN.
    """
    from kernels import policy_loss_triton as losses

    options = {"HAS_MASK": True, "HAS_LOW": True, "HAS_HIGH": True, "BLOCK": 1024, "KIND": kind}
    compiled, _ = build(losses._policy_loss_kernel, options, (), 4, 3, None, tmp_path)
    result = set(re.findall(r"\b(?:min|max)\.(?:\w+\.)*f32", compiled.asm["ptx"]))
    assert result <= {"min.NaN.f32", "max.NaN.f32"}, result
    clips = kind in (losses.PPO.value, losses.CISPO.value, losses.GSPO.value)
    assert bool(result) == clips


# Inputs of a layer, ranks of its adapters.
LORA_MODELS = [(896, 96), (4096, 96), (14336, 32)]
LORA = list(itertools.product(GPUS, ("fp32", "bf16"), LORA_MODELS))
# Three GPUs, each with one model and both dtypes.
LORA_SOME = [case for case in LORA if 2 * LORA_MODELS.index(case[2]) == GPUS.index(case[0])]


@pytest.mark.parametrize(
    ("capability", "kind", "model"),
    [pytest.param(*case, marks=pytest.mark.slow) for case in LORA_SOME]
    + [pytest.param(*case, marks=pytest.mark.campaign) for case in LORA if case not in LORA_SOME],
)
def test_the_products_of_adapters(capability, kind, model, tmp_path):
    import triton.language as tl

    from kernels import lora_ops_triton as kernels

    inputs, ranks = model
    splits = kernels.choose_splits(inputs)
    options = {"R": ranks, "BM": 32, "UPCAST": False}
    options["PRECISION"] = "tf32x3" if kind == "fp32" else "ieee"
    each = triton.cdiv(triton.cdiv(inputs, splits), 64) * 64
    down = options | {"D": inputs, "EACH": each, "BR": 32, "BK": 32}
    kinds = {"x_ptr": "*bf16", "a_ptr": f"*{kind}", "stride_a": "i32"}
    _, spilled = build(kernels._lora_down_kernel, down, (), 4, 3, kinds, tmp_path, capability)
    assert spilled == 0
    columns = kernels.choose_columns(NAMES[kind])
    up = options | {"SPLITS": splits, "PARTS": 3, "BN": columns, "BR": 32}
    kinds = {"y_ptr": "*bf16", "stride_y": "i32"}
    for i in range(3):
        kinds |= {f"b{i}_ptr": f"*{kind}", f"scale_{i}": "fp32"}
        kinds |= dict.fromkeys((f"{n}_{i}" for n in "end column columns rank ranks".split()), "i32")
    _, spilled = build(kernels._lora_up_kernel, up, (), 4, 3, kinds, tmp_path, capability)
    assert spilled == 0
    # adapters of rows: their addresses are read on the device
    places = {"BM": 16, "FIELDS": 11, "KIND": {"fp32": tl.float32, "bf16": tl.bfloat16}[kind]}
    kinds = {"x_ptr": "*bf16", "y_ptr": "*bf16", "tile_ptr": "*i32", "stride_y": "i32"}
    kinds |= {"address_ptr": "*i64", "id_ptr": "*i64"}
    kinds |= {f"{n}_{i}": "i32" for n in "end column columns".split() for i in range(3)}
    variants = {
        kernels._row_lora_down_kernel: down,
        kernels._row_lora_embed_kernel: {"D": inputs, "R": ranks, "BR": 32},
        kernels._row_lora_up_kernel: up,
    }
    for kernel, constants in variants.items():
        sizes = (4, 3, kinds, tmp_path, capability)
        constants = {n: value for n, value in (constants | places).items() if n in kernel.arg_names}
        _, spilled = build(kernel, constants, (), *sizes)
        assert spilled == 0, kernel.__name__
