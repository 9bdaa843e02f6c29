"""Compilation of users' variants: name lookup, headers, and one sentence per mistake."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flashinfer import jit

from ..support.attention_modules import FLASH_SIGMOID, SIGMOID_PARAMETERS, compiled, sigmoid

CONFIGURATION = '#include "attention_config.h"\n'
KERNELS = "csrc/prefill_cpu.cc"
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_nvcc)]


def variant(
    decl: str | Path, name: str = "V", *, tensors: dict[str, str] | None = None, scalars: dict[str, str] | None = None,
    device: str = "cpu",
) -> jit.JitSpec:  # fmt: skip
    """Return the prefill module of a variant. ``tensors`` and ``scalars`` are names and types."""
    parameters = [[*part] for many in (tensors or {}, scalars or {}) for part in (many, many.values())]
    half = ("float16",) * 3
    return jit.gen_customize_single_prefill_module("auto", "one", *half, 64, 64, *parameters, name, decl, device=device)


def errors(said: str) -> list[str]:
    return [line for line in said.splitlines() if ": error: " in line or "): error" in line]


# Mistakes of form.

CONSTRUCTOR = "template <typename P> FLASHINFER_HD V(const P&, uint32_t, uint8_t*) {}"
UPDATER = "template <int kRows> __device__ auto GetAttentionUpdater() { return DefaultUpdater<kRows>(); }"
FORMS = {
    "of Hopper": (
        f"struct V : AttentionVariantBase {{ {UPDATER}"
        " template <typename P, typename C> __device__ __host__ V(const P&, const C& at) { (void)at.qo_len; } };"
    ),
    "as it should be": f"struct V : AttentionVariantBase {{ float sm_scale_log2 = 1; {CONSTRUCTOR} }};",
    "without softmax": f"struct V : AttentionVariantBase {{ static constexpr bool use_softmax = false; {CONSTRUCTOR} }};",
    "of a base of one's own": f"struct B : AttentionVariantBase {{ double sm_scale_log2 = 1; }};\nstruct V : B {{ {CONSTRUCTOR} }};",
}
MISTAKES = {
    "a variant with GetAttentionUpdater() has a constructor": f"struct V : AttentionVariantBase {{ {UPDATER} }};",
    "a variant is a struct": "using V = int;",
    "a variant is defined, not only declared": "struct V;",
    "a variant derives from AttentionVariantBase": f"struct V {{ float sm_scale_log2 = 1; {CONSTRUCTOR} }};",
    "a variant's use_softmax is a static constexpr bool": (
        f"struct V : AttentionVariantBase {{ bool use_softmax = false; {CONSTRUCTOR} }};"
    ),
    "a variant that uses softmax has a member sm_scale_log2": f"struct V : AttentionVariantBase {{ {CONSTRUCTOR} }};",
    "a variant has a constructor (const Params&, uint32_t batch_idx, uint8_t* smem_ptr)": (
        "struct V : AttentionVariantBase { float sm_scale_log2 = 1;"
        " template <typename P> FLASHINFER_HD V(const P&, uint32_t) {} };"
    ),
    "a variant can be copied": (
        f"struct V : AttentionVariantBase {{ float sm_scale_log2 = 1; {CONSTRUCTOR} V(const V&) = delete; }};"
    ),
    "a variant's window_left is an integer": (
        f"struct V : AttentionVariantBase {{ float sm_scale_log2 = 1, window_left = 3; {CONSTRUCTOR} }};"
    ),
    "one without is never called": (
        f"struct V : AttentionVariantBase {{ float sm_scale_log2 = 1; {CONSTRUCTOR}\n"
        "template <typename P, typename T> FLASHINFER_HD T LogitsTransform(const P&, T logits, uint32_t, uint32_t,"
        " uint32_t, uint32_t, uint32_t) const { return logits; } };"
    ),
    "a variant's hooks are const and return a number": (
        f"struct V : AttentionVariantBase {{ float sm_scale_log2 = 1; {CONSTRUCTOR}\n"
        "static constexpr bool masks_logits = true;"
        " template <typename P> FLASHINFER_HD bool LogitsMask(const P&, uint32_t kv_idx) const { return true; } };"
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_variant_of_form(form, tmp_path):
    assert not compiled(variant(FORMS[form]), KERNELS, tmp_path)


@pytest.mark.parametrize("sentence", MISTAKES)
def test_a_mistake_of_form_is_one_sentence(sentence, tmp_path):
    found = errors(compiled(variant(MISTAKES[sentence]), CONFIGURATION, tmp_path))
    assert len(found) == 1 and sentence in found[0], found


def test_kernels_add_nothing_to_a_mistake(tmp_path):
    said = compiled(variant(MISTAKES["a variant derives from AttentionVariantBase"]), KERNELS, tmp_path)
    assert len(errors(said)) == 1 and len(said.splitlines()) < 15, said


@needs_nvcc
@pytest.mark.parametrize("sentence", ["a variant derives from AttentionVariantBase", "one without is never called"])
def test_nvcc_reports_it_too(sentence, tmp_path):
    found = errors(compiled(variant(MISTAKES[sentence], device="cuda"), "csrc/prefill_cuda.cu", tmp_path))
    assert len(found) == 1 and sentence in found[0], found


@pytest.mark.parametrize("name, said", [("Nobody", "Nobody"), ("V<3>", "V")])
def test_an_unknown_name(name, said, tmp_path):
    found = errors(compiled(variant(FORMS["as it should be"], name), CONFIGURATION, tmp_path))
    assert found[0].startswith("one: variant_name:1:") and said in found[0]


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_is_at_the_users_line(device, tmp_path):
    """The line is that of a text or a header. Errors in a template are reported there when kernels use it."""
    broken = FLASH_SIGMOID.replace("math::log2e;", "math::log3e;", 1)
    line = 1 + broken[: broken.index("log3e")].count("\n")
    header = tmp_path / "broken.h"
    header.write_text(broken)
    for decl, file in ((broken, "one: variant_decl"), (header, str(header))):
        spec = variant(decl, "FlashSigmoid", scalars=dict(zip(*SIGMOID_PARAMETERS[2:], strict=True)), device=device)
        found = errors(compiled(spec, KERNELS if device == "cpu" else spec.sources[-1], tmp_path))
        assert (
            found[0].startswith(f"{file}:{line}:" if device == "cpu" else f"{file}({line}): ") and "log3e" in found[0]
        )


# Names and headers.

IS_USERS = """
#include "attention_config.h"
static_assert(sizeof(flashinfer::Variant) == sizeof(::{name}) && flashinfer::Variant::of_the_user == 1);
"""


@pytest.mark.parametrize("name", ["FlashSigmoid", "DefaultAttention", "Mask", "Params", "Variant"])
def test_the_users_text_wins(name, tmp_path):
    """The user's name wins over any name of the library, although the library's variants are included."""
    text = (
        "#include <flashinfer/attention/variants.cuh>\n"
        f"struct {name} : AttentionVariantBase {{ static constexpr int of_the_user = 1; float sm_scale_log2 = 1;\n"
        f"template <typename P> FLASHINFER_HD {name}(const P&, uint32_t, uint8_t*) {{}} }};"
    )
    assert not compiled(variant(text, name), IS_USERS.replace("{name}", name), tmp_path)


def test_a_name_with_two_meanings_is_ambiguous_at_the_users_line(tmp_path):
    text = "struct Mask { int of_the_user; };\n" + FORMS["as it should be"] + "\nconstexpr int size = sizeof(Mask);"
    found = errors(compiled(variant(text), CONFIGURATION, tmp_path))
    assert found[0].startswith("one: variant_decl:3:") and "ambiguous" in found[0]


def test_names_in_namespaces(tmp_path):
    inner = FORMS["as it should be"].replace("{", "{ static constexpr int of_the_user = 1;", 1)
    for text in (
        f"namespace mine {{ {inner} }}",
        f"namespace mine {{ {inner} }}\nnamespace flashinfer {{ struct V; }}",
    ):
        for name in ("mine::V", "::mine::V"):
            assert not compiled(variant(text, name), IS_USERS.replace("{name}", "mine::V"), tmp_path)


def test_the_librarys_headers_win_over_namesakes(tmp_path):
    """A header next to the user's does not affect the library's includes, only the user's own."""
    folder = tmp_path / "user"
    for name in ("flashinfer/attention/mask.h", "attention/run.h", "attention/call_arguments.h", "binding/check.h"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"#error the user's {name}\n")
    (folder / "part.h").write_text("// of the user\n")
    (folder / "sigmoid.h").write_text('#include "part.h"\n' + FLASH_SIGMOID)
    spec = sigmoid(decl=folder / "sigmoid.h")
    for source in spec.sources:
        assert not compiled(spec, source, tmp_path, "-E", "-o", "/dev/null")
    assert {Path(name).name for name in spec.files() if name.startswith("<")} == {"sigmoid.h", "part.h"}


def test_a_header_called_as_the_configuration_is_refused(tmp_path):
    (tmp_path / "attention_config.h").write_text(FLASH_SIGMOID)
    with pytest.raises(ValueError, match=r"variant_decl: got a header named attention_config\.h.*wanted another name"):
        variant(tmp_path / "attention_config.h", "FlashSigmoid")


# Parameters.


def test_parameters_keep_their_types(tmp_path):
    spec = variant(
        FORMS["as it should be"],
        tensors={"maybe_a": "half", "b": "nv_bfloat16"},
        scalars={"x": "double", "y": "int64_t", "z": "float"},
    )
    text = """
    #define FLASHINFER_BINDING 1
    #include "attention_config.h"
    #include <type_traits>
    using namespace flashinfer;
    static_assert(std::is_same_v<decltype(Params::x), double> && std::is_same_v<decltype(Params::y), int64_t>);
    static_assert(std::is_same_v<decltype(Params::z), float>);
    static_assert(std::is_same_v<decltype(Params::maybe_a), half_t*>);
    static_assert(std::is_same_v<decltype(Params::b), bfloat16_t*>);
    """
    assert not compiled(spec, text, tmp_path)


def test_a_binding_has_the_kernels_types(tmp_path):
    """In a CUDA module half_t and bfloat16_t, and so Params, are the types of nvcc's headers."""
    spec = variant(FORMS["as it should be"], tensors={"a": "half", "b": "nv_bfloat16"}, device="cuda")
    text = """
    #include "attention/arguments.h"
    #include <type_traits>
    struct __half;
    struct __nv_bfloat16;
    static_assert(std::is_same_v<decltype(flashinfer::Params::a), __half*>);
    static_assert(std::is_same_v<decltype(flashinfer::Params::b), __nv_bfloat16*>);
    """
    assert not compiled(spec, text, tmp_path, suffix="cc")
