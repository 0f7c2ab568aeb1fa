"""Every kernel compiles for Hopper (sm_90) at its real tile sizes, on a machine without a GPU.

Read from the results: warpgroup products (wgmma) in the kernels that multiply, shared memory within the device's 232448 bytes,
spilled registers from the assembler's own report, and 64-bit offsets where T x V passes 2^31.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not compile")
SHARED_LIMIT = 232_448
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
INTS = "N V T col_base tiles tile_base split_base parts stride stride_x stride_w stride_kept stride_exp stride_out columns ignore_index"
INTS += " stride_xs stride_ws stride_xt stride_wt"
FLOATS = "in_scale out_scale headroom in_s out_s in_t out_t beta low high kl_coef gamma lam"
LONGS = ("y_ptr", "at_ptr", "cu_ptr")


def build(kernel, constants, data, warps, stages, descriptors=None, tmp_path=None):
    """(compiled kernel, bytes of spilled registers); every tensor that is not an index or the data type is float32."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = dict.fromkeys(INTS.split(), "i32") | dict.fromkeys(FLOATS.split(), "fp32") | dict.fromkeys(LONGS, "*i64")
    kinds |= {"mask_ptr": "*u8"} | dict.fromkeys(data, f"*{constants.pop('TYPE', 'fp32')}") | (descriptors or {})
    signature = {name: "constexpr" if name in constants else kinds.get(name, "*fp32") for name in kernel.arg_names}
    wide = ("stride_x", "stride_w", "stride_out")
    aligned = [i for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*") or name in wide]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})
    assert compiled.metadata.shared <= SHARED_LIMIT
    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(compiled.asm["ptx"])
    command = [str(PTXAS), "-v", "--gpu-name=sm_90a", str(ptx), "-o", os.devnull]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return compiled, sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", report))


def head_options(D, dtype, descriptors):
    from kernels.linear_logprob_triton import GROUP, SPLITS, tiles_for

    tiles = tiles_for(D, NAMES[dtype])
    constants = {"D": D, "BM": tiles.rows, "BN": tiles.columns, "BK": tiles.depth, "SPLITS": SPLITS, "GROUP": GROUP, "UPCAST": False}
    constants |= {"DESCRIPTORS": descriptors, "PRECISION": "tf32x3" if dtype == "fp32" else "ieee", "TYPE": dtype}
    blocks = {"x": (tiles.rows, tiles.depth), "w": (tiles.columns, tiles.depth)}
    kinds = {name: f"tensordesc<{dtype}[{a}, {b}]>" if descriptors else f"*{dtype}" for name, (a, b) in blocks.items()}
    return constants, kinds, tiles


QUICK = [(2048, "bf16", True)]
MODELS = [(896, "bf16", True), (2304, "bf16", True), (4096, "bf16", True)]
MODELS += [(1000, "fp16", False), (3584, "bf16", False), (1024, "fp32", True)]


@pytest.mark.parametrize(("D", "dtype", "descriptors"), QUICK + [pytest.param(*m, marks=pytest.mark.slow) for m in MODELS])
def test_linear_logprob_kernels(D, dtype, descriptors, tmp_path):
    """No spills in the two kernels that the default path runs with descriptors; a few hundred bytes in rarer variants."""
    from kernels import linear_logprob_triton as kernels

    data = ("bias_ptr", "kept_ptr", "out_ptr")
    variants = [
        (kernels._forward_kernel, {"HAS_BIAS": False, "SOFTCAP": False, "ENTROPY": True, "KEEP": False, "KEEP_SLOPE": False}, 0),
        (kernels._forward_kernel, {"HAS_BIAS": True, "SOFTCAP": True, "ENTROPY": True, "KEEP": True, "KEEP_SLOPE": True}, 1500),
        (kernels._dlogits_kernel, {"HAS_BIAS": False, "SOFTCAP": False, "HAS_C": False}, 0),
        (kernels._dlogits_kernel, {"HAS_BIAS": True, "SOFTCAP": True, "HAS_C": True}, 800),
    ]
    for kernel, options, allowed in variants:
        constants, kinds, tiles = head_options(D, dtype, descriptors)
        compiled, spilled = build(kernel, constants | options, data, tiles.warps, tiles.stages, kinds, tmp_path)
        assert "wgmma" in compiled.asm["ptx"]
        assert spilled <= (allowed if descriptors else allowed + 300), (kernel.__name__, options, spilled)
        if descriptors:
            assert "cp.async.bulk.tensor" in compiled.asm["ptx"]


def test_defect_9_offsets_are_64_bit(tmp_path):
    """Rows times a stride, in every kernel that touches something of T x V elements."""
    from kernels import linear_logprob_triton as head
    from kernels import token_logprob_triton as logits

    constants, kinds, tiles = head_options(2048, "bf16", False)
    options = {"HAS_BIAS": False, "SOFTCAP": False, "HAS_C": False}
    compiled, _ = build(head._dlogits_kernel, constants | options, ("bias_ptr", "out_ptr"), tiles.warps, tiles.stages, kinds, tmp_path)
    products = re.findall(r"arith.muli .* : (tensor<\d+x1xi\d+>)", compiled.asm["ttir"])
    assert products and all(kind.endswith("i64>") for kind in products)
    constants = {"SOFTCAP": False, "BLOCK": 8192, "TYPE": "bf16"}
    compiled, _ = build(logits._forward_kernel, constants, ("logits_ptr",), 8, 3, None, tmp_path)
    assert re.search(r"arith.muli %\w+, %\w+ : i64", compiled.asm["ttir"])


def test_defect_12_unaligned_targets_are_not_read_in_wide_words(tmp_path):
    """Without a promise of 16-byte alignment the compiler must not load two int64 at once."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kernels import linear_logprob_triton as head

    constants, kinds, tiles = head_options(896, "bf16", False)
    constants |= {"HAS_BIAS": False, "SOFTCAP": False, "HAS_C": False}
    constants.pop("TYPE")
    signature = {}
    for name in head._dlogits_kernel.arg_names:
        fallback = "i32" if name in INTS.split() else "fp32" if name in FLOATS.split() else "*fp32"
        signature[name] = "constexpr" if name in constants else kinds.get(name, "*i64" if name in LONGS else fallback)
    compiled = triton.compile(
        ASTSource(head._dlogits_kernel, signature, constants), target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}
    )
    assert not re.search(r"ld\.global\S*\.v2\.b64", compiled.asm["ptx"])


@pytest.mark.parametrize("kind", ["reverse", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("forward", "mixture"))])
def test_distill_kernels(kind, tmp_path):
    from kernels import distill_kl_triton as kernels

    tiles = kernels.tiles_for(torch.bfloat16)
    base = {"D": 2048, "E": 4096, "BM": tiles.rows, "BN": tiles.columns, "BK": tiles.depth, "DESC_S": True, "DESC_T": True}
    base |= {"UPCAST": False, "PRECISION": "ieee", "CAP_S": False, "CAP_T": False, "SPLITS": 33, "GROUP": 16, "TYPE": "bf16"}
    kinds = {name: f"tensordesc<bf16[{tiles.rows}, {tiles.depth}]>" for name in ("xs", "ws", "xt", "wt")}
    mode = {"MODE": kernels.MODES[kind]}
    for kernel, options in ((kernels._stats_kernel, mode), (kernels._dlogits_kernel, mode), (kernels._mixture_kernel, {})):
        compiled, spilled = build(kernel, base | options, ("out_ptr",), tiles.warps, tiles.stages, kinds, tmp_path)
        assert "wgmma" in compiled.asm["ptx"]
        assert spilled <= 600, (kernel.__name__, spilled)


def test_kernels_without_products(tmp_path):
    from kernels import discounted_scan_triton, linear_logprob_triton, policy_loss_triton, token_logprob_triton

    cases = [
        (linear_logprob_triton._combine_kernel, {"BLOCK": 128}, (), 4),
        (linear_logprob_triton._align_kernel, {"BM": 32, "BN": 256, "TYPE": "bf16"}, ("kept_ptr",), 8),
        (linear_logprob_triton._saved_dlogits_kernel,
         {"BM": 32, "BN": 256, "SOFTCAP": True, "HAS_C": True, "HAS_AT": True, "TYPE": "bf16"}, ("kept_ptr", "out_ptr"), 8),
        (token_logprob_triton._forward_kernel, {"SOFTCAP": True, "BLOCK": 8192, "TYPE": "bf16"}, ("logits_ptr",), 8),
        (token_logprob_triton._backward_kernel,
         {"SOFTCAP": False, "HAS_C": True, "BLOCK": 8192, "TYPE": "bf16"}, ("logits_ptr", "out_ptr"), 8),
        (policy_loss_triton._sequence_mean_kernel, {"HAS_MASK": True, "BLOCK": 1024}, (), 4),
        (discounted_scan_triton._scan_kernel,
         {"HAS_VALUE": True, "HAS_MASK": True, "HAS_AFTER": True, "FROM_START": False, "BLOCK": 2048}, (), 8),
    ]  # fmt: skip
    options = {"HAS_MASK": True, "HAS_REF": True, "HAS_LOW": True, "HAS_HIGH": True, "BLOCK": 1024}
    cases += [(policy_loss_triton._policy_loss_kernel, options | {"KIND": kind, "KL_KIND": 2}, (), 4) for kind in range(5)]
    for kernel, constants, data, warps in cases:
        _, spilled = build(kernel, constants, data, warps, 3, None, tmp_path)
        assert spilled == 0, (kernel.__name__, spilled)
