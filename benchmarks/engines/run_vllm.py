"""Run vLLM whole, with one attention backend, on a small model with random weights.

    python benchmarks/engines/run_vllm.py make MODEL                      # a Llama of 8 layers
    python benchmarks/engines/run_vllm.py run MODEL FLASHINFER fi.json    # start, greedy tokens, tokens a second
    python benchmarks/engines/run_vllm.py run MODEL TRITON_ATTN tr.json
    python benchmarks/engines/run_vllm.py run MODEL FLASHINFER trace.json --trace   # calls of flashinfer, no times
    python benchmarks/engines/run_vllm.py run MODEL FLASHINFER many.json --requests 1000        # mixed lengths
    python benchmarks/engines/run_vllm.py run MODEL FLASHINFER tp2.json --gpus 2                # fused all-reduce
    python benchmarks/engines/run_vllm.py run MODEL FLASHINFER own.json --gpus 2 --own-allreduce     # of vLLM
    python benchmarks/engines/run_vllm.py compare fi.json tr.json
    python benchmarks/engines/run_vllm.py reference MODEL fi.json tr.json      # logprobs against float32

Flags of vLLM are its defaults, but for the backend, the number of GPUs and the tokenizer, which a model of random
weights lacks. No line of vLLM or of flashinfer is changed. A trace needs Python 3.12. It runs the engine in this process,
and counts from the engine's import on. With several GPUs it counts in rank 0, after the start.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, VOCABULARY, CONTEXT = 8, 2048, 32, 8, 128, 32000, 1500


def make(folder: Path, scale: float = 1.0, layers: int = LAYERS) -> None:
    """Write the configuration and the weights, bfloat16 and equal in every run. ``scale`` multiplies W_q and W_k."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=5632, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=DIM, vocab_size=VOCABULARY, max_position_embeddings=4096,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.data *= scale
    model.save_pretrained(folder)


def prompts(count: int, length: int | None = None) -> list[dict[str, list[int]]]:
    """Return token ids, drawn from the same seed in every run."""
    import random

    draw = random.Random(count)
    lengths = [length or draw.choice([1, 2, 15, 16, 17, 100, 333, 1000, 2049]) for _ in range(count)]
    return [{"prompt_token_ids": [draw.randrange(3, VOCABULARY) for _ in range(n)]} for n in lengths]


class Trace:
    """Counts calls of public functions of flashinfer."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def start(self) -> None:
        import flashinfer

        root = str(Path(flashinfer.__file__).parent)
        monitoring = sys.monitoring  # type: ignore[attr-defined]

        def called(code: Any, offset: int) -> Any:
            file, name = code.co_filename, code.co_qualname
            inner = file[len(root) + 1 :]
            if not file.startswith(root) or inner.startswith(("jit/", "_ops/")) or "<" in name:
                return monitoring.DISABLE
            self.counts[f"{inner.removesuffix('.py').replace('/', '.')}.{name}"] += 1
            return None

        monitoring.use_tool_id(4, "flashinfer")
        monitoring.register_callback(4, monitoring.events.PY_START, called)
        monitoring.set_events(4, monitoring.events.PY_START)


def start_trace(worker: Any) -> None:
    """Count calls in the process of a worker. ``LLM.collective_rpc`` passes the worker."""
    worker.trace = Trace()
    worker.trace.start()


def traced(worker: Any) -> Counter[str]:
    """Return the counts of a worker."""
    return worker.trace.counts


def run(folder: Path, backend: str, options: argparse.Namespace) -> dict[str, Any]:
    """Start the engine, answer requests, and return tokens and times."""
    trace = options.trace
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    flags: dict[str, Any] = json.loads(options.flags)
    if options.gpus > 1:
        flags["tensor_parallel_size"] = options.gpus
    if options.own_allreduce:
        os.environ["VLLM_ALLREDUCE_USE_FLASHINFER"] = "0"
        flags["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    tracer = Trace()
    if trace:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if options.gpus == 1:
            tracer.start()
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    begin = time.perf_counter()
    llm = LLM(model=str(folder), skip_tokenizer_init=True, attention_config={"backend": backend}, **flags)
    result: dict[str, Any] = {"backend": backend, "vllm": vllm.__version__, "torch": torch.__version__}
    result |= {"gpus": options.gpus, "all-reduce of vLLM": options.own_allreduce, "flags": options.flags}
    result["start s"] = round(time.perf_counter() - begin, 1)

    if trace and options.gpus > 1:
        llm.collective_rpc(start_trace)

    def answer(requests: list[Any], tokens: int | list[int], **options: Any) -> tuple[list[Any], float]:
        options = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, **options}
        counts = tokens if isinstance(tokens, list) else [tokens] * len(requests)
        begin = time.perf_counter()
        outputs = llm.generate(requests, [SamplingParams(max_tokens=n, **options) for n in counts], use_tqdm=False)
        return [output.outputs[0] for output in outputs], time.perf_counter() - begin

    mixed = prompts(24)
    for again in ("", " again"):  # the second time all but a few tokens of each prompt are in the cache of prefixes
        outputs, _ = answer(mixed, 32, logprobs=2)
        result[f"greedy{again}"] = [list(output.token_ids) for output in outputs]
        result[f"top two{again}"] = [
            [sorted((x.logprob for x in at.values()), reverse=True)[:2] for at in output.logprobs] for output in outputs
        ]
    pairs = zip(result["greedy"], result["greedy again"], strict=True)
    result["equal again"] = sum(one == other for one, other in pairs)
    sampled, _ = answer(mixed, 32, temperature=0.8, top_k=50, top_p=0.9, seed=None)
    result["sampled distinct"] = len({token for output in sampled for token in output.token_ids})
    assert all(len(output.token_ids) == 32 and max(output.token_ids) < VOCABULARY for output in (*outputs, *sampled))
    if options.requests:
        result |= many(answer, options.requests)
    if trace:
        caches = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
        result["use of the cache at the end"] = caches.usage
    elif not options.quick:
        result |= times(answer)
    counts = llm.collective_rpc(traced)[0] if trace and options.gpus > 1 else tracer.counts
    result["calls"] = dict(counts.most_common(60))
    return result


def many(answer: Any, count: int) -> dict[str, Any]:
    """Answer requests of mixed lengths twice, and return how many tokens came, the time and the GPU's free memory."""
    import random

    import torch

    requests, draw = prompts(count), random.Random(0)
    lengths = [draw.choice([1, 2, 16, 33, 64, 100]) for _ in requests]
    found: dict[str, Any] = {"mixed requests": count, "tokens of their prompts": 0}
    found["tokens of their prompts"] = sum(len(request["prompt_token_ids"]) for request in requests)
    for again in ("", " again"):
        outputs, seconds = answer(requests, lengths)
        assert [len(output.token_ids) for output in outputs] == lengths, "an answer has another length"
        assert {output.finish_reason for output in outputs} == {"length"}, "a request ended early"
        found[f"mixed{again}, output tokens/s"] = round(sum(lengths) / seconds)
        found[f"mixed{again}, free MiB of the GPU"] = torch.cuda.mem_get_info(0)[0] >> 20
    return found


def times(answer: Any) -> dict[str, Any]:
    """Return tokens a second of prefill, of decode with 64 requests and with one, and of sampled decode."""
    found: dict[str, Any] = {}
    for name, count, tokens, options in (
        ("prefill 32 x 1500", 32, 1, {}),
        ("decode of 64", 64, 128, {}),
        ("decode of 1", 1, 256, {}),
        ("sampled decode of 64", 64, 128, {"temperature": 0.8, "top_p": 0.9, "top_k": 50}),
    ):
        rates = []
        for turn in range(3):
            requests = prompts(count, CONTEXT)
            for request in requests:  # prefixes are cached: another first token makes another request
                request["prompt_token_ids"][0] = 3 + turn * 97 + len(found) * 1009
            _, all_of_it = answer(requests, tokens, **options)
            if tokens == 1:
                rates.append(count * CONTEXT / all_of_it)
            else:
                _, prefill = answer(
                    [dict(prompt_token_ids=[5 + turn, *r["prompt_token_ids"][1:]]) for r in requests], 1
                )
                rates.append(count * (tokens - 1) / (all_of_it - prefill))
        found[f"{name}, tokens/s"] = [round(rate) for rate in rates]
    return found


def label(result: dict[str, Any]) -> str:
    """Name a result by its backend, its GPUs and its all-reduce."""
    name = result["backend"] + (f", {result['gpus']} GPUs" if result["gpus"] > 1 else "")
    name += f", {result['flags']}" if result["flags"] != "{}" else ""
    return name + (", vLLM's all-reduce" if result["all-reduce of vLLM"] else "")


def reference(folder: Path, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the rms error of each backend's logprobs of its greedy tokens, against transformers in float32."""
    import torch
    from transformers import LlamaForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    found: dict[str, Any] = {}
    for result in results:
        for again in ("", " again"):
            errors, first, agree = [], [], 0
            rows = zip(prompts(24), result[f"greedy{again}"], result[f"top two{again}"], strict=True)
            for prompt, tokens, top in rows:
                ids = torch.tensor([prompt["prompt_token_ids"] + tokens[:-1]], device=device)
                with torch.inference_mode():
                    logits = model(ids).logits[0, -len(tokens) :]
                exact = logits.log_softmax(-1)
                chosen = exact.gather(1, torch.tensor(tokens, device=device)[:, None])[:, 0].cpu()
                error = (chosen - torch.tensor([best for best, *_ in top])).square()
                errors += error.tolist()
                first.append(float(error[0]))
                agree += int((exact.argmax(-1).cpu() == torch.tensor(tokens)).sum())
            found[label(result) + again] = {
                "rms error": round((sum(errors) / len(errors)) ** 0.5, 4),
                "of first tokens": round((sum(first) / len(first)) ** 0.5, 4),
                "argmax of float32": f"{agree} of {len(errors)}",
            }
    return found


def compare(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Compare two backends: equal greedy tokens, the gap of the two best logits where they part, and logprobs up to there.

    Two backends part where the two best logits are nearer than the errors of bfloat16, as random weights make them.
    """
    equal, gaps, errors = 0, [], []
    for left, right, top, bottom in zip(one["greedy"], other["greedy"], one["top two"], other["top two"], strict=True):
        parts = next((place for place, (x, y) in enumerate(zip(left, right, strict=True)) if x != y), len(left))
        equal += parts == len(left)
        gaps += [round(top[parts][0] - top[parts][1], 4)] if parts < len(left) else []
        errors += [(x[0] - y[0]) ** 2 for x, y in zip(top[: parts + 1], bottom[: parts + 1], strict=True)]
    rates = {key: {label(result): result.get(key) for result in (one, other)} for key in one if "tokens/s" in key}
    return {"requests": len(one["greedy"]), "equal": equal, "logprobs compared": len(errors),
            "rms of their difference": round((sum(errors) / len(errors)) ** 0.5, 4), "largest gap where they part":
            max(gaps, default=0), **rates}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("make", "run", "compare", "reference"))
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--scale", type=float, default=1.0, help="of W_q and W_k: above 1 attention is less uniform")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model that is made")
    parser.add_argument("--quick", action="store_true", help="measure no times")
    parser.add_argument("--requests", type=int, default=0, help="answer this many of mixed lengths, twice")
    parser.add_argument("--gpus", type=int, default=1, help="tensor parallelism")
    parser.add_argument("--flags", default="{}", help='more arguments of LLM, such as \'{"kv_cache_dtype": "fp8"}\'')
    parser.add_argument("--own-allreduce", action="store_true", help="take vLLM's all-reduce and fuse nothing")
    options = parser.parse_args()
    if options.command == "make":
        make(Path(options.paths[0]), options.scale, options.layers)
        return
    if options.command == "compare":
        print(json.dumps(compare(*(json.loads(Path(path).read_text()) for path in options.paths)), indent=1))
        return
    if options.command == "reference":
        results = [json.loads(Path(path).read_text()) for path in options.paths[1:]]
        print(json.dumps(reference(Path(options.paths[0]), results), indent=1))
        return
    folder, backend, out = options.paths
    result = run(Path(folder), backend, options)
    Path(out).write_text(json.dumps(result))
    print(json.dumps({key: value for key, value in result.items() if key[:3] not in ("gre", "top")}, indent=1))


if __name__ == "__main__":
    main()
