"""Helpers of the attention families: names, specialised and dispatching specs, users' variants.

A module has three axes: ``dtypes`` (``query:keys and values:output``), ``head_dims`` (``128``, or ``192:128``
for queries and values) and ``variants`` (builtin variants). A specialised module has one value of each axis, a
dispatching module has several. A user's variant is not a value of an axis, but part of the module's configuration.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from ... import env
from ..module import JitSpec
from ..spec import BACKENDS, Value, closure, digest
from . import DTYPE_AXIS, PROFILER_AXIS, Axis, Matrix, Values, one_of, some_of, words
from ._family import arch_kernels, family_spec

# Public name of a backend -> its kernels. ``auto`` selects, see _attention/kernels.py.
KERNELS = {"auto": "", "fa2": "cuda", "fa3": "sm90a"}
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
# Head sizes that all kernels support. Kernels for one GPU arch and kernels with RoPE support no others. Modules for
# the sizes that are not common are built on first use.
COMMON_HEAD_DIMS = ("64", "128", "256", "192:128")
CUDA_HEAD_DIMS = (*COMMON_HEAD_DIMS, "80", "96", "112", "160", "192", "512")
MAX_CPU_HEAD_DIM = 512
# Property of a builtin variant -> its bit in AttentionConfig (include/flashinfer/attention/config.h).
VARIANT_BITS = {"soft_cap": 1, "alibi": 2, "rope": 4}
# pos_encoding_mode: none, RoPE applied in the kernel, ALiBi.
POS_ENCODINGS = {0: (), 1: ("rope",), 2: ("alibi",)}
VARIANTS = ("default", "soft_cap", "rope", "rope+soft_cap", "alibi", "alibi+soft_cap")
# Axis -> the names of its constants in C++, see csrc/config.h.jinja.
CONSTANTS = {"dtypes": "DTypeQ:DTypeKV:DTypeO", "head_dims": "HEAD_DIM_QK:HEAD_DIM_VO", "variants": "VARIANT"}
CONFIG_HEADER = "attention_config.h"
KV_DTYPES = ("same", *DTYPES[3:])
FORMS = ("specialised", "dispatching")


def _head_dims(text: str) -> Values:
    values = words(text)
    if not values or not all(re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", value) for value in values):
        raise ValueError(f"got {text!r}, wanted positive numbers, or pairs as 192:128")
    return values


AXES = (
    DTYPE_AXIS,
    Axis("head_dims", ("64", "128", "256"), _head_dims, "head sizes, such as 192:128 if those of values differ"),
    Axis("kv_dtypes", ("same",), some_of(*KV_DTYPES), f"dtypes of keys and values: some of {','.join(KV_DTYPES)}"),
    Axis("variants", ("default",), some_of(*VARIANTS), f"some of {','.join(VARIANTS)}"),
    Axis(
        "attention_form", FORMS[:1], one_of(*FORMS), f"one module per configuration or one for all: {','.join(FORMS)}"
    ),
    PROFILER_AXIS,
)
# maybe_head_scales: for 8-bit queries, the factors of each query head's logits, then those of its outputs.
# maybe_numbers: device values of the scalars and of RoPE's parameters. See Number in params.h.
# maybe_sinks: logits that join the softmax, see sinks.h.
BUILTIN_TENSORS = {
    "maybe_alibi_slopes": "float", "maybe_numbers": "double", "maybe_head_scales": "float", "maybe_sinks": "float",
}  # fmt: skip
BUILTIN_SCALARS = {"sm_scale": "float", "logits_soft_cap": "float"}
_MASK_TENSORS = {"maybe_numbers": "double", "maybe_sinks": "float"}
# Variants of prefill with a mask of their own: name -> the type, additional tensors, additional scalars. The header is
# include/flashinfer/attention/<name>.h, without the suffix of the soft cap.
MASKS = {
    "draft_mask": ("DraftMask", {"draft_mask": "uint16_t", "maybe_draft_starts": "int32_t"}, {"draft_words": "int64_t"}),
    "chunk_mask": ("ChunkMask<false>", {}, {"chunk_size": "int64_t"}),
    "chunk_mask_soft_cap": ("ChunkMask<true>", {}, {"logits_soft_cap": "float", "chunk_size": "int64_t"}),
}  # fmt: skip
TENSOR_TYPES = {
    "float": "float",
    "float32": "float",
    "half": "half_t",
    "nv_half": "half_t",
    "__half": "half_t",
    "nv_bfloat16": "bfloat16_t",
    "__nv_bfloat16": "bfloat16_t",
    **{name: name for name in ("int32_t", "int64_t", "uint8_t", "uint16_t", "uint32_t")},
}
SCALAR_TYPES = ("double", "float", "int64_t")
# Names that AttentionParams and the operators already use, see include/flashinfer/attention/params.h. The names
# custom_mask and mask_indptr are not reserved: a variant's parameters then hide members that it does not use.
RESERVED_NAMES = frozenset({
    "q", "q_row", "q_head", "k", "v", "o", "o_row", "o_head", "out", "lse", "kv", "num_qo_heads", "num_kv_heads",
    "group", "num_tokens", "mask_mode", "window_left", "heads_per_mask", "prefix_len", "token_pos_in_items",
    "token_pos_in_items_len",
    "o_scale", "rope_rcp_scale", "rope_rcp_theta", "rope_scale", "rope_theta", "items", "merges", "counts",
    "max_items", "max_merges", "max_slots", "qo_lens", "kv_lens", "single", "tile_rows", "slot_rows", "partial_o",
    "partial_ml", "tickets", "kv_indptr", "kv_indices", "kv_layout", "plan", "float_workspace", "batch_size",
    "variant", "get_qo_len", "get_kv_len", "num_items", "num_merges", "item", "merge", "maybe_sinks", "profiler", "profiler_buffer", "kProfiler",
})  # fmt: skip
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_HEADERS = (".h", ".hpp", ".cuh")
_INCLUDE = re.compile(r'#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]')


def dtype_name(dtype: object, argument: str = "dtype") -> str:
    """Return a name of :data:`DTYPES`: ``torch.bfloat16`` or ``"bfloat16"`` -> ``"bfloat16"``."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"{argument}: got {name}, wanted one of {', '.join(DTYPES)}")
    return name


def dtypes_value(dtype_q: object, dtype_kv: object, dtype_o: object, backend: str) -> str:
    """Return the value of the axis ``dtypes``.

    Raises:
        ValueError: ``backend`` has no kernels for these dtypes.
    """
    q, kv = dtype_name(dtype_q, "dtype_q"), dtype_name(dtype_kv, "dtype_kv")
    o = dtype_name(dtype_o, "dtype_o")
    queries = ("float16", "bfloat16", *(("float32",) if backend == "cpu" else ()))
    for argument, name, known in (
        ("dtype_q", q, (*queries, *(DTYPES[3:] if backend not in BACKENDS else ()))),
        ("dtype_o", o, queries),
    ):
        if name not in known:
            raise ValueError(f"{argument}: got {name}, wanted one of {', '.join(known)} on {backend}")
    keys = dict.fromkeys([*queries, *DTYPES[3:]] if backend == "cpu" else [q] if q in DTYPES[3:] else [q, *DTYPES[3:]])
    if kv not in keys:
        raise ValueError(f"dtype_kv: got {kv}, wanted one of {', '.join(keys)} with {q} queries on {backend}")
    return f"{q}:{kv}:{o}"


def check_index_dtype(argument: str, dtype: object) -> None:
    """Check that indices are int32, as in every module. FlashInfer's functions have an argument for it."""
    if str(dtype).removeprefix("torch.") != "int32":
        raise ValueError(f"{argument}: got {dtype}, wanted int32")


def head_dims_value(head_dim_qk: int, head_dim_vo: int, backend: str) -> str:
    """Return the value of the axis ``head_dims``.

    Raises:
        ValueError: ``backend`` has no kernels for these sizes. The text lists the sizes.
    """
    value = f"{head_dim_qk}" if head_dim_qk == head_dim_vo else f"{head_dim_qk}:{head_dim_vo}"
    if backend == "cuda" and value not in CUDA_HEAD_DIMS:
        raise ValueError(f"head_dim: got {value}, wanted one of {', '.join(CUDA_HEAD_DIMS)} (queries:values) on cuda")
    if backend == "cpu":
        for size in (head_dim_qk, head_dim_vo):
            if not (0 < size <= MAX_CPU_HEAD_DIM and size % 8 == 0):
                raise ValueError(f"head_dim: got {value}, wanted a multiple of 8 up to {MAX_CPU_HEAD_DIM} on cpu")
    return value


def variant_value(pos_encoding_mode: int, use_logits_soft_cap: bool) -> str:
    """Return the value of the axis ``variants``: ``default``, or the variant's properties joined by ``+``."""
    if int(pos_encoding_mode) not in POS_ENCODINGS:
        raise ValueError(f"pos_encoding_mode: got {pos_encoding_mode}, wanted 0 (none), 1 (RoPE) or 2 (ALiBi)")
    parts = (*POS_ENCODINGS[int(pos_encoding_mode)], *(("soft_cap",) if use_logits_soft_cap else ()))
    return "+".join(parts) or "default"


def variant_bits(variant: str) -> int:
    """Return the number of a builtin variant that operators take."""
    return sum(VARIANT_BITS[part] for part in variant.split("+") if part != "default")


def _name_of(dtypes: str, head_dims: str) -> str:
    """Return the part of a module's name for its dtypes and sizes: ``bf16_kv_e4m3_d128``."""
    q, kv, o = (_SHORT[name] for name in dtypes.split(":"))
    types = q if q == kv == o else f"{q}_kv_{kv}" if q == o else f"{q}_kv_{kv}_o_{o}"
    return f"{types}_d{head_dims.replace(':', '_')}"


def attention_spec(
    family: str, backend: str, dtypes: str, head_dims: str, variant: str, *, profiler: bool = False
) -> JitSpec:
    """Return the specialised module of one configuration.

    ``profiler``: the kernels write events to a buffer that ``run`` takes after the variant's other tensors.
    """
    name = _name_of(dtypes, head_dims) + ("" if variant == "default" else f"_{variant.replace('+', '_')}")
    coverage = {"dtypes": [dtypes], "head_dims": [head_dims], "variants": [variant]}
    if profiler:
        tensors = BUILTIN_TENSORS | {"profiler_buffer": "int64_t"}
        return _spec(family, backend, f"{name}_profiler", coverage, tensors, BUILTIN_SCALARS, {"PROFILER": True})
    spec = _spec(family, backend, name, coverage, BUILTIN_TENSORS, BUILTIN_SCALARS, {})
    return replace(spec, dispatching=f"{family}_{backend}")


def mask_spec(mask: str, backend: str, dtypes: str, head_dims: str) -> JitSpec:
    """Return the prefill module of a variant of :data:`MASKS`."""
    variant, tensors, scalars = MASKS[mask]
    header = f"flashinfer/attention/{mask.removesuffix('_soft_cap')}.h"
    config = {
        "ATTENTION_VARIANT": f"flashinfer::{variant}", "POS_ENCODING_MODE": "kNone", "VARIANT_URI": mask,
        "VARIANT_HEADER": header, "VARIANT_DECL": "",
    }  # fmt: skip
    coverage, name = {"dtypes": [dtypes], "head_dims": [head_dims]}, f"{_name_of(dtypes, head_dims)}_{mask}"
    tensors, scalars = _MASK_TENSORS | tensors, {"sm_scale": "float"} | scalars
    spec = _spec("prefill", backend, name, coverage, tensors, scalars, config)
    return replace(spec, headers=(f"{env.data_root()}/include/{header}",))


def profiled_spec(spec: JitSpec, family: str) -> JitSpec:
    """Return the module with the configuration of ``spec`` whose kernels write events."""
    coverage, backend = dict(spec.coverage), spec.name.rpartition("_")[2]
    dtypes, head_dims, variant = (str(coverage[axis][0]) for axis in ("dtypes", "head_dims", "variants"))
    return attention_spec(family, backend, dtypes, head_dims, variant, profiler=True)


def dispatching_spec(family: str, backend: str, coverage: Mapping[str, Iterable[Value]]) -> JitSpec:
    """Return one module for all combinations of the three axes' values. It selects among them at run time."""
    return _spec(family, backend, "", coverage, BUILTIN_TENSORS, BUILTIN_SCALARS, {})


def attention_aot_specs(family: str, matrix: Matrix) -> Iterator[JitSpec]:
    """Yield a family's part of the AOT matrix: all combinations of values, in the form of the matrix.

    Raises:
        ValueError: a backend has no kernels for a value.
    """
    for backend in matrix["backends"]:
        queries = [dtype for dtype in matrix["dtypes"] if backend == "cpu" or dtype != "float32"]
        coverage = {
            "dtypes": [
                dtypes_value(q, q if kv == "same" else kv, q, backend) for q in queries for kv in matrix["kv_dtypes"]
            ],
            "head_dims": [_head_dims_of(value, backend) for value in matrix["head_dims"]],
            "variants": list(matrix["variants"]),
        }
        yield from _specs_in_form(family, backend, coverage, matrix)
        # Modules of decode for one arch are not in the matrix, because no call selects them by default.
        for kernels in arch_kernels(family) if backend == "cuda" and family != "decode" else ():
            coverage["dtypes"] = [f"{q}:{q}:{q}" for q in queries if "same" in matrix["kv_dtypes"]]
            coverage["variants"] = [variant for variant in matrix["variants"] if "rope" not in variant]
            coverage["head_dims"] = [value for value in coverage["head_dims"] if value in COMMON_HEAD_DIMS]
            yield from _specs_in_form(family, kernels, coverage, matrix)
            if matrix["attention_form"] == ("specialised",) and "off" in matrix["profiler"]:
                fp8_kv_dtypes = [kv for kv in matrix["kv_dtypes"] if kv != "same"]
                sizes = [value for value in coverage["head_dims"] if ":" not in value]
                for kv, q, size, variant in product(fp8_kv_dtypes, queries, sizes, coverage["variants"]):
                    yield attention_spec(family, kernels, f"{kv}:{kv}:{q}", size, variant)


def _specs_in_form(family: str, kernels: str, coverage: Mapping[str, list[str]], matrix: Matrix) -> Iterator[JitSpec]:
    if "on" in matrix["profiler"]:
        yield from (attention_spec(family, kernels, *one, profiler=True) for one in product(*coverage.values()))
    if "off" not in matrix["profiler"]:
        return
    if matrix["attention_form"] == ("specialised",):
        yield from (attention_spec(family, kernels, *one) for one in product(*coverage.values()))
    elif all(coverage.values()):
        yield dispatching_spec(family, kernels, coverage)


def _head_dims_of(value: str, backend: str) -> str:
    sizes = [int(size) for size in value.split(":")]
    return head_dims_value(sizes[0], sizes[-1], backend)


def customize_spec(
    family: str,
    backend: str,
    uri: str,
    dtypes: str,
    head_dims: str,
    tensors: tuple[Sequence[str], Sequence[str]],
    scalars: tuple[Sequence[str], Sequence[str]],
    variant_name: str,
    variant_decl: str | Path,
    pos_encoding_mode: int,
) -> JitSpec:
    """Return the module of a user's variant, which is C++ text or the path of a header.

    Its name contains a digest of all arguments, so that two variants of one ``uri`` never collide.
    """
    if not _IDENTIFIER.fullmatch(uri):
        raise ValueError(f"uri: got {uri!r}, wanted a C++ identifier")
    if not variant_name or "\n" in variant_name:
        raise ValueError(f"variant_name: got {variant_name!r}, wanted the name of a C++ struct")
    additional_tensors = _parameters("tensor", tensors, TENSOR_TYPES)
    additional_scalars = _parameters("scalar", scalars, {name: name for name in SCALAR_TYPES})
    if set(additional_tensors) & set(additional_scalars):
        raise ValueError("additional parameters: got one name for a tensor and a scalar, wanted distinct names")
    if int(pos_encoding_mode) not in (0, 1):
        raise ValueError(
            f"pos_encoding_mode: got {pos_encoding_mode}, wanted 0 or 1: a variant implements ALiBi itself"
        )
    header = _header_of(variant_decl)
    variant = {
        "ATTENTION_VARIANT": variant_name.strip().removeprefix("::"),
        "POS_ENCODING_MODE": ("kNone", "kRopeLlama")[int(pos_encoding_mode)],
        "VARIANT_URI": uri,
        "VARIANT_HEADER": "" if header is None else header.name,
        "VARIANT_DECL": str(variant_decl) if header is None else "",
    }
    coverage = {"dtypes": [dtypes], "head_dims": [head_dims]}
    spec = _spec(family, backend, "", coverage, additional_tensors, additional_scalars, variant)
    if header is not None:
        spec = replace(spec, headers=(str(header),), include_paths=(*spec.include_paths, str(header.parent)))
    else:
        spec = replace(spec, headers=tuple(_included(str(variant_decl), spec.include_dirs)))
    identity = [uri, spec.config, spec.coverage, sorted(_custom_digests(spec))]
    name = f"{family}_{uri}_{digest(identity)[:12]}_{backend}"
    return replace(spec, name=name, namespace=name)


def _header_of(variant_decl: str | Path) -> Path | None:
    """Return the path of a variant's header, or ``None`` if the variant is C++ text."""
    text = str(variant_decl)
    if not isinstance(variant_decl, Path) and ("\n" in text or "{" in text or not text.endswith(_HEADERS)):
        return None
    path = Path(variant_decl).resolve()
    if not path.is_file():
        raise ValueError(f"variant_decl: got the path {str(path)!r}, wanted a file that exists, or C++ text")
    if path.name == CONFIG_HEADER:
        raise ValueError(
            f"variant_decl: got a header named {CONFIG_HEADER}, like the configuration, wanted another name"
        )
    return path


def _included(text: str, directories: Iterable[str]) -> Iterator[str]:
    """Yield the files that a variant's text includes, so that the key covers them.

    System headers are not found.
    """
    for name in _INCLUDE.findall(text):
        yield from (path for path in (os.path.join(one, name) for one in directories) if os.path.isfile(path))


def _custom_digests(spec: JitSpec) -> Iterator[str]:
    """Yield the digests of the user's files that a variant includes."""
    for path, content in closure(spec.headers, spec.include_dirs).items():
        if not path.startswith(f"{env.data_root()}/"):
            yield content


def _parameters(
    kind: str, names_and_types: tuple[Sequence[str], Sequence[str]], known: Mapping[str, str]
) -> dict[str, str]:
    names, types = names_and_types
    if len(names) != len(types):
        raise ValueError(f"additional {kind}s: got {len(names)} names and {len(types)} dtypes, wanted equal numbers")
    for name, type in zip(names, types, strict=True):
        if not _IDENTIFIER.fullmatch(name) or name in RESERVED_NAMES:
            raise ValueError(f"additional {kind} names: got {name!r}, wanted a C++ identifier that is not reserved")
        if type not in known:
            raise ValueError(f"dtype of {name}: got {type!r}, wanted one of {', '.join(known)}")
    if len(set(names)) != len(names):
        raise ValueError(f"additional {kind} names: got {', '.join(names)}, wanted distinct names")
    return {name: known[type] for name, type in zip(names, types, strict=True)}


def _spec(
    family: str,
    backend: str,
    variant: str,
    coverage: Mapping[str, Iterable[Value]],
    tensors: Mapping[str, str],
    scalars: Mapping[str, str],
    config: Mapping[str, str | bool],
) -> JitSpec:
    rotates = config.get("POS_ENCODING_MODE") == "kRopeLlama" or any(
        "rope" in str(x) for x in coverage.get("variants", ())
    )
    for value in coverage["head_dims"]:
        if backend != "cpu" and rotates and value not in COMMON_HEAD_DIMS:
            wanted = f"another mode, or head_dim {', '.join(COMMON_HEAD_DIMS)}, on cuda"
            raise ValueError(f"pos_encoding_mode: got ROPE_LLAMA with head_dim {value}, wanted {wanted}")
    spec = family_spec(
        family,
        backend,
        variant=variant,
        coverage=coverage,
        config={
            "ADDITIONAL_TENSORS": ";".join(f"{name} {type}" for name, type in tensors.items()),
            "ADDITIONAL_SCALARS": ";".join(f"{name} {type}" for name, type in scalars.items()),
            **{axis: names for axis, names in CONSTANTS.items() if axis in coverage},
            **config,
        },
    )
    return replace(spec, config_header=CONFIG_HEADER, namespace=spec.name, split=True)
