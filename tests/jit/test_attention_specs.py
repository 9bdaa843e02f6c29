"""Specs of attention: names, generators and errors."""

from __future__ import annotations

import inspect
import re
from itertools import product

import pytest
import torch

import flashinfer
from flashinfer import jit
from flashinfer.jit import attention as addresses
from flashinfer.jit.attention import pytorch
from flashinfer.jit.modules import _attention, decode, prefill
from flashinfer.jit.modules._attention import attention_spec, dispatching_spec
from flashinfer.jit.ninja import render_config

from ..support.attention_modules import FLASH_SIGMOID, sigmoid
from .test_attention_modules import ROOT


def test_names_contain_the_configuration():
    name = {
        ("float32:float32:float32", "64", "default"): "decode_f32_d64_cpu",
        ("float16:float8_e5m2:float16", "192:128", "rope+soft_cap"): "decode_f16_kv_e5m2_d192_128_rope_soft_cap_cpu",
        ("float16:bfloat16:float32", "64", "alibi"): "decode_f16_kv_bf16_o_f32_d64_alibi_cpu",
    }
    for axes_, wanted in name.items():
        spec = attention_spec("decode", "cpu", *axes_)
        assert spec.name == spec.namespace == wanted
    names = [
        attention_spec("prefill", "cpu", f"{q}:{kv}:{q}", dims, variant).name
        for q, kv, dims, variant in product(
            ("float32", "float16"), ("float16", "float8_e4m3fn"), ("64", "128"), ("default", "rope", "alibi+soft_cap")
        )
    ]
    assert len(set(names)) == len(names)


def test_flashinfers_addresses():
    half = ("float16", "float16", "float16")
    for name in addresses.__all__:
        assert callable(getattr(addresses, name)) and callable(getattr(jit, name))
    assert addresses.gen_single_decode_module is jit.gen_single_decode_module is flashinfer.gen_single_decode_module
    assert addresses.get_single_decode_uri(*half, 64, 64, device="cuda") == "decode_f16_d64_cuda"
    assert addresses.get_batch_prefill_uri("fa2", *half, "int32", 192, 128, 0, False, True, device="cpu") == (
        "prefill_f16_d192_128_soft_cap_cpu"
    )
    for module in (addresses, pytorch):
        with pytest.raises(AttributeError, match="gen_nothing_module"):
            module.gen_nothing_module  # noqa: B018
    for public in (flashinfer.decode, flashinfer.prefill):
        names = [name for name in addresses.__all__ if name.endswith(f"_{public.__name__[11:]}_module")]
        assert len(names) == 4 and all(getattr(public, name) is getattr(pytorch, name) for name in names)


def test_modules_that_flashinfer_has_for_pod_and_batch_attention():
    half = (torch.float16, torch.float16, torch.float16)
    pod = pytorch.gen_pod_module(*half, 128, 0, False, True, False, torch.int32, 1, False, False, device="cuda")
    assert pod == prefill.gen_single_prefill_module("auto", *half, 128, 128, 0, False, True, device="cuda")
    assert pytorch.get_pod_uri(*half, 64, device="cpu") == "prefill_f16_d64_cpu"
    with pytest.raises(ValueError, match="pos_encoding_mode: got 7"):
        pytorch.gen_pod_module(*half, 128, 0, False, False, False, torch.int32, 7, False, False)
    batch = pytorch.gen_batch_attention_module(*half, torch.int32, 64, 64, 0, device="cpu")
    assert batch.name == pytorch.get_batch_attention_uri(*half, torch.int32, 64, 64, device="cpu")
    profiled = pytorch.gen_batch_attention_module(*half, torch.int32, 64, 64, 0, True, device="cpu")
    assert profiled.name == "prefill_f16_d64_profiler_cpu" and dict(profiled.config)["PROFILER"] is True
    assert profiled.coverage == batch.coverage and "PROFILER" not in dict(batch.config)


@pytest.mark.parametrize("name", jit.modules.families())
def test_every_generator_takes_a_device(name, monkeypatch):
    """Every generator has the keyword, and its default is the device of this machine."""
    for generator, function in vars(jit.modules.family(name)).items():
        # FlashInfer's names with sm90 mean CUDA.
        if re.fullmatch(r"gen_\w+_module", generator) and not re.search(r"_sm\d+_module$", generator):
            parameters = inspect.signature(function).parameters
            assert parameters["device"].default is None
            # These select kernels of a device.
            chosen = "prefill_module" in generator or generator == "gen_batch_mla_module"
            assert next(iter(parameters)) == "backend" if chosen else "backend" not in parameters
    for gpus, backend in (((), "cpu"), (((9, 0),), "cuda")):
        monkeypatch.setattr("flashinfer.jit.modules.visible_gpus", lambda gpus=gpus: gpus)
        monkeypatch.setattr("torch.version.cuda", "13.0")
        assert jit.modules.device_of() == backend
    monkeypatch.setattr("torch.version.cuda", None)
    assert jit.modules.device_of() == "cpu"  # torch without CUDA
    assert jit.modules.device_of(torch.device("cuda", 1)) == jit.modules.device_of("cuda:0") == "cuda"


@pytest.mark.parametrize(
    "generate, message",
    [
        (lambda: decode.gen_single_decode_module("int8", "int8", "int8", 64, 64), "dtype_q: got int8, wanted one of"),
        (
            lambda: decode.gen_single_decode_module("float32", "float32", "float32", 64, 64, device="cuda"),
            "dtype_q: got float32, wanted one of float16, bfloat16 on cuda",
        ),
        (
            lambda: decode.gen_single_decode_module("float16", "bfloat16", "float16", 64, 64, device="cuda:1"),
            "dtype_kv: got bfloat16, wanted one of float16, float8_e4m3fn, float8_e5m2 with float16 queries on cuda",
        ),
        (
            lambda: decode.gen_single_decode_module("float16", "float16", "float16", 72, 72, device="cuda"),
            r"head_dim: got 72, wanted one of 64, 128, 256, 192:128, 80, .*, 512 \(queries:values\) on cuda",
        ),
        (
            lambda: decode.gen_single_decode_module("float16", "float16", "float16", 520, 520, device="cpu"),
            "head_dim: got 520, wanted a multiple of 8 up to 512 on cpu",
        ),
        (
            lambda: decode.gen_single_decode_module("float16", "float16", "float16", 64, 64, 3),
            "pos_encoding_mode: got 3, wanted 0",
        ),
        (
            lambda: decode.gen_single_decode_module("float16", "float16", "float16", 64, 64, device="tpu"),
            "device: got 'tpu', wanted one of cpu, cuda",
        ),
        (
            lambda: decode.gen_batch_decode_module("float16", "float16", "float16", "int64", 64, 64),
            "dtype_idx: got int64, wanted int32",
        ),
        (
            lambda: prefill.gen_single_prefill_module("fa3", *["float16"] * 3, 64, 64, device="cpu"),
            "backend: got 'fa3' for device 'cpu', wanted 'auto' or 'fa2'",
        ),
        (
            lambda: prefill.gen_single_prefill_module("fa3", "float16", "float8_e4m3fn", "float16", 64, 64),
            "backend: got 'fa3' with float8_e4m3fn keys, float16 queries",
        ),
        (
            lambda: prefill.gen_single_prefill_module("fa4", "float16", "float16", "float16", 64, 64),
            "backend: got 'fa4', wanted one of auto, fa2, fa3",
        ),
        (lambda: sigmoid("no-name"), "uri: got 'no-name', wanted a C\\+\\+ identifier"),
        (lambda: sigmoid(name=""), "variant_name: got '', wanted"),
        (lambda: sigmoid(decl="/nowhere/variant.h"), "variant_decl: got the path '/nowhere/variant.h', wanted a file"),
    ],
)
def test_bad_arguments(generate, message):
    with pytest.raises(ValueError, match=message):
        generate()


@pytest.mark.parametrize(
    "parameters, message",
    [
        ((["a"], [], [], []), "additional tensors: got 1 names and 0 dtypes"),
        ((["a b"], ["float"], [], []), "additional tensor names: got 'a b', wanted a C\\+\\+ identifier"),
        ((["kv_lens"], ["float"], [], []), "additional tensor names: got 'kv_lens', wanted .* that is not reserved"),
        (([], [], ["out"], ["double"]), "additional scalar names: got 'out', wanted .* that is not reserved"),
        ((["a"], ["int7"], [], []), "dtype of a: got 'int7', wanted one of float"),
        (([], [], ["a"], ["half"]), "dtype of a: got 'half', wanted one of double, float, int64_t"),
        ((["a", "a"], ["float", "float"], [], []), "additional tensor names: got a, a, wanted distinct"),
        ((["a"], ["float"], ["a"], ["double"]), "got one name for a tensor and a scalar"),
    ],
)
def test_bad_parameters_of_variants(parameters, message):
    half = ("float16",) * 3
    with pytest.raises(ValueError, match=message):
        jit.gen_customize_batch_decode_module("one", *half, "int32", 64, 64, *parameters, "V", "struct V;")
    with pytest.raises(ValueError, match=message):
        jit.gen_customize_batch_prefill_module("fa2", "one", *half, "int32", 64, 64, *parameters, "V", "struct V;")


def test_bad_variants():
    half = ("float16",) * 3
    with pytest.raises(ValueError, match="pos_encoding_mode: got 2, wanted 0 or 1"):
        jit.gen_customize_single_decode_module("one", *half, 64, 64, [], [], [], [], "V", "struct V;", 2)
    with pytest.raises(ValueError, match="fp8_enabled: got True, wanted False"):
        jit.gen_customize_single_prefill_module(
            "fa2", "one", *half, 64, 64, [], [], [], [], "V", "struct V;", fp8_enabled=True
        )
    with pytest.raises(ValueError, match="idtype: got int64, wanted int32"):
        jit.gen_customize_batch_decode_module("one", *half, "int64", 64, 64, [], [], [], [], "V", "struct V;")


def test_reserved_names_are_complete():
    """The list has all members of the parameters and all arguments of the operators, except two."""
    struct = (ROOT / "include/flashinfer/attention/params.h").read_text().split("struct AttentionParams {")[1]
    # Members are indented by two spaces: a function's name before its parenthesis, fields before a comma or
    # semicolon.
    members = re.findall(r"^  (?:FLASHINFER_HD )?(\w[^;({]*[;(])", struct[: struct.index("\n};")], re.MULTILINE)
    names = {name for member in members for name in re.findall(r"(\w+)(?=[,;(])", member)}
    lists = (ROOT / "csrc/attention/arguments.h").read_text()  # X(Tensor, name), those of run() first
    names |= set(re.findall(r"^  X\([^,]+, (\w+)\)", lists[: lists.index("FLASHINFER_ATTENTION_REBIND")], re.MULTILINE))
    assert {"q", "kv", "lse", "get_qo_len", "num_items", "float_workspace", "variant"} < names
    assert names - _attention.RESERVED_NAMES == {"custom_mask", "mask_indptr"}


def test_configuration_headers():
    """One value gives constants, several give a case each or a part, and a variant gives its text."""
    text = render_config(attention_spec("prefill", "cuda", "float16:float16:float16", "192:128", "soft_cap"))
    for line in (
        "using DTypeQ = half_t;",
        "constexpr int HEAD_DIM_QK = 192;",
        "constexpr int HEAD_DIM_VO = 128;",
        "constexpr int VARIANT = kSoftCap;",
        "using Variant = CheckedVariant<ATTENTION_VARIANT, Params>;",
    ):
        assert f"\n{line}\n" in text
    assert "_DISPATCH_CASES_" not in text and "FLASHINFER_PART /" not in text
    coverage = {"dtypes": ["float32:float32:float32"], "head_dims": ["64", "192:128"], "variants": ["default"]}
    text = render_config(dispatching_spec("prefill", "cpu", coverage))
    assert "#define _DISPATCH_CASES_head_dims(value, HEAD_DIM_QK, HEAD_DIM_VO, ...) \\\n" in text
    assert "#define DISPATCH_head_dims(value, HEAD_DIM_QK, HEAD_DIM_VO, ...) { __VA_ARGS__; }\n" in text
    assert "\nconstexpr int HEAD_DIM_QK = 64;\n" in text and "\nconstexpr int HEAD_DIM_QK = 192;\n" in text
    text = render_config(sigmoid())
    assert '#line 1 "sigmoid: variant_decl"\n' + FLASH_SIGMOID in text
    assert "double logits_scale;" in text and '", float sigmoid_bias"' in text
    custom = jit.gen_customize_single_decode_module(
        "one", *("float16",) * 3, 64, 64, ["maybe_a", "custom_mask"], ["half", "uint8_t"], ["n"], ["int64_t"], "V",
        "struct V;",
    )  # fmt: skip
    text = render_config(custom)
    assert "half_t* maybe_a;" in text and '", Tensor? maybe_a"' in text and '", Tensor own_custom_mask"' in text
    assert "int64_t n;" in text and '", int n"' in text
