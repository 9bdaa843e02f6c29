"""Pipelines: what they compile to, what they refuse, and that they give what the functions give."""

from __future__ import annotations

import pytest
import torch

from flashinfer import sampling
from flashinfer.logits_processor import (
    CompileError,
    Compiler,
    FusionRule,
    LegalizationError,
    LogitsPipe,
    LogitsProcessor,
    MinP,
    Op,
    ParameterizedOp,
    Sample,
    Softmax,
    TaggedTensor,
    Temperature,
    TensorType,
    TopK,
    TopP,
    compile_pipeline,
    legalize_processors,
)
from flashinfer.logits_processor.operators import (
    FusedProbsTopKTopPSampleOp,
    LogitsTopKOp,
    ProbsTopKOp,
    SoftmaxOp,
    TemperatureOp,
)

RANDOM = dict(seed=3, offset=4)
LOGITS, PROBS = TensorType.LOGITS, TensorType.PROBS
JOINT = dict(filter_apply_order="joint")

# Processors, what they take, the steps they are compiled into, parameters, and the function that does the same.
PIPES = [
    ([Temperature(), Softmax()], LOGITS, ["FusedTemperatureSoftmaxOp"], dict(temperature=0.7), sampling.softmax),
    ([TopK()], LOGITS, ["LogitsTopKOp"], dict(top_k=5), sampling.top_k_mask_logits),
    ([TopK()], PROBS, ["ProbsTopKOp"], dict(top_k=5), sampling.top_k_renorm_probs),
    ([TopP()], PROBS, ["TopPOp"], dict(top_p=0.4), sampling.top_p_renorm_probs),
    ([Sample()], LOGITS, ["LogitsSampleOp"], {}, sampling.sampling_from_logits),
    ([Sample()], PROBS, ["ProbsSampleOp"], {}, sampling.sampling_from_probs),
    ([TopK(), Sample()], PROBS, ["FusedProbsTopKSampleOp"], dict(top_k=5), sampling.top_k_sampling_from_probs),
    ([TopP(), Sample()], PROBS, ["FusedProbsTopPSampleOp"], dict(top_p=0.4), sampling.top_p_sampling_from_probs),
    ([MinP(), Sample()], PROBS, ["FusedProbsMinPSampleOp"], dict(min_p=0.4), sampling.min_p_sampling_from_probs),
    ([TopK(), TopP(), Sample()], PROBS, ["ProbsTopKOp", "FusedProbsTopPSampleOp"], dict(top_k=9, top_p=0.4),
     sampling.top_k_top_p_sampling_from_probs),
    ([TopK(joint_topk_topp=True), TopP(), Sample()], PROBS, ["FusedProbsTopKTopPSampleOp"], dict(top_k=9, top_p=0.4),
     lambda x, **more: sampling.top_k_top_p_sampling_from_probs(x, **JOINT, **more)),
    ([Softmax(), TopK(joint_topk_topp=True), TopP(), Sample()], LOGITS, ["FusedSoftmaxFilterSampleOp"],
     dict(top_k=9, top_p=0.4), lambda x, **more: sampling.top_k_top_p_sampling_from_logits(x, **JOINT, **more)),
    ([TopK(), Softmax(), TopP(), Sample()], LOGITS, ["FusedSoftmaxFilterSampleOp"], dict(top_k=9, top_p=0.4),
     sampling.top_k_top_p_sampling_from_logits),
    ([Temperature(), Softmax(), MinP(), Sample()], LOGITS, ["FusedSoftmaxFilterSampleOp"],
     dict(temperature=0.7, min_p=0.3), lambda x, temperature, min_p, **more: sampling.min_p_sampling_from_probs(
         sampling.softmax(x, temperature), min_p, **more)),
    ([TopK(), Temperature(), Softmax(), TopP(), Sample()], LOGITS, ["FusedSoftmaxFilterSampleOp"],
     dict(temperature=0.7, top_k=9, top_p=0.6), lambda x, temperature, top_k, top_p, **more:
     sampling.top_p_sampling_from_probs(
         sampling.softmax(sampling.top_k_mask_logits(x, top_k), temperature), top_p, **more)),
    ([TopK(), Softmax(), TopK(), Sample()], LOGITS, ["LogitsTopKOp", "FusedSoftmaxFilterSampleOp"], dict(top_k=9),
     lambda x, top_k, **more: sampling.top_k_sampling_from_probs(
         sampling.softmax(sampling.top_k_mask_logits(x, top_k)), top_k, **more)),
]  # fmt: skip


@pytest.mark.parametrize(
    "processors, takes, steps, numbers, function", PIPES, ids=lambda x: "" if callable(x) else str(x)[:40]
)
def test_a_pipe_equals_the_function(processors, takes, steps, numbers, function, device):
    x = torch.randn(9, 300, device=device)
    x = x if takes == LOGITS else torch.softmax(x, -1)
    pipe = LogitsPipe(processors, input_type=takes)
    assert [op.name for op in pipe.compiled_ops] == steps
    draws = RANDOM if isinstance(processors[-1], Sample) else {}
    assert pipe(x, **numbers, **draws).equal(function(x, **numbers, **draws))
    assert pipe(TaggedTensor(x, takes), **numbers, **draws).equal(function(x, **numbers, **draws))


def test_uncompiled_steps_give_the_same_and_warn(device):
    logits = torch.randn(8, 500, device=device)
    temperature = torch.tensor([0.5, 1.0, 2.0, 4.0] * 2, device=device)  # to divide by them rounds nothing, in any step
    pipes = [LogitsPipe([Temperature(), Softmax(), MinP(), Sample()], compile=done) for done in (True, False)]
    numbers = dict(temperature=temperature, min_p=0.1)
    with pytest.warns(UserWarning, match="not compiled"):
        alone = pipes[1](logits, **numbers, **RANDOM)
    assert pipes[0](logits, **numbers, **RANDOM).equal(alone)
    temperature = torch.rand(8, device=device) + 0.5
    with pytest.warns(UserWarning):
        probs = LogitsPipe([Temperature(), Softmax()], compile=False)(logits, temperature=temperature)
    torch.testing.assert_close(probs, sampling.softmax(logits, temperature), atol=1e-6, rtol=1e-5)
    pipes[1].compile()
    assert pipes[1](logits, **numbers, **RANDOM).equal(alone)


def test_repr():
    pipe = LogitsPipe([TopK(), Sample()], input_type=TensorType.PROBS)
    assert repr(pipe) == (
        "LogitsPipe([TopK -> Sample], ops=[ProbsTopKOp -> ProbsSampleOp], compiled_ops=[FusedProbsTopKSampleOp])"
    )
    assert pipe.initial_type == TensorType.PROBS and len(pipe.processors) == 2


@pytest.mark.parametrize(
    "processors, kind, text",
    [
        ([], None, "Pipeline cannot be empty"),
        ([TopK(), Sample()], None, "Pipeline creation failed: Cannot infer input type"),
        ([TopP()], LOGITS, "Pipeline creation failed: processor 0"),
        ([Sample(), TopK()], LOGITS, "Pipeline creation failed: processor 1"),
        ([Softmax(), Softmax()], LOGITS, "Pipeline creation failed"),
    ],
)
def test_invalid_pipelines(processors, kind, text):
    with pytest.raises(ValueError, match=text):
        LogitsPipe(processors, input_type=kind)


@pytest.mark.parametrize(
    "processors, numbers, text",
    [
        ([Temperature()], {}, r"Error executing operator 0 \(TemperatureOp\): .*temperature: got None"),
        ([Temperature()], dict(temperature=0), "wanted a positive number"),
        ([Softmax(), TopK()], dict(top_k=0), r"operator 1 \(ProbsTopKOp\): .*positive integer"),
        ([Softmax(), TopK()], dict(top_k=2.5), "positive integer"),
        ([Softmax(), TopP()], dict(top_p=1.5), "above 0, at most 1"),
        ([Softmax(), MinP()], dict(min_p=0.0), "above 0, at most 1"),
        ([Softmax(), TopP()], dict(top_p="much"), "got str"),
        ([Softmax(), TopP(), Sample()], dict(top_p=0.5, indices=torch.tensor([9])), "indices: got 9"),
        ([Softmax(), TopP(), Sample()], dict(top_p=0.5, indices=[0]), "indices: got list, wanted Tensor"),
    ],
)
def test_steps_that_fail_are_named(processors, numbers, text):
    with pytest.raises(ValueError, match=text):
        LogitsPipe(processors, input_type=LOGITS)(torch.randn(2, 20), **numbers)
    with pytest.raises(ValueError, match="x: got PROBS, wanted LOGITS"):
        LogitsPipe([Softmax()])(TaggedTensor.probs(torch.rand(2, 20)))


def test_tagged_tensors_are_tensors_to_torch():
    x = torch.rand(2, 5)
    tagged = TaggedTensor.logits(x)
    assert torch.sum(tagged).equal(x.sum()) and torch.cat([tagged, x]).shape == (4, 5)
    assert (tagged.shape, tagged.dtype, tagged.device, tagged.size(1)) == (x.shape, x.dtype, x.device, 5)
    assert TaggedTensor.indices(x).type == TensorType.INDICES
    with pytest.raises(AttributeError):
        tagged.data = x


def test_rules_and_checks_of_the_callers():
    class Both(Op):
        IN, OUT = LOGITS, PROBS

        def run(self, tensor, runtime):
            return tensor * 0

    rule = FusionRule((LogitsTopKOp, SoftmaxOp), lambda ops: True, lambda ops: Both(), prio=5)
    pipe = LogitsPipe([TopK(), Softmax(), TopP(), Sample()], input_type=LOGITS, custom_fusion_rules=[rule])
    assert [op.name for op in pipe.compiled_ops] == ["Both", "FusedProbsTopPSampleOp"]

    def refuse(ops):
        raise CompileError("not today")

    with pytest.raises(ValueError, match="not today"):
        LogitsPipe([Softmax()], custom_validity_checks=[refuse])
    with pytest.raises(CompileError, match="at most one"):
        compile_pipeline([SoftmaxOp(), SoftmaxOp()])
    with pytest.raises(LegalizationError):
        legalize_processors([])
    joint = LogitsPipe([TopK(joint_topk_topp=True), TopP(), Sample(deterministic=False)], input_type=PROBS)
    (fused,) = joint.compiled_ops
    assert isinstance(fused, FusedProbsTopKTopPSampleOp) and fused.params["deterministic"] is False


class Shifted(ParameterizedOp):
    """A step of a user's, with a parameter of its own."""

    IN, OUT = LOGITS, LOGITS

    def run(self, tensor, runtime):
        return tensor + self.parameter("bias", runtime)


class Tagged(Op):
    """A step that defines ``__call__`` and no ``run``, as FlashInfer's users write it."""

    IN, OUT = LOGITS, LOGITS

    def __call__(self, tensor, **runtime):
        return TaggedTensor(tensor.data * runtime["by"], self.OUT)


class Bias(LogitsProcessor):
    """A processor without ``INPUTS``; ``legalize`` says what it takes."""

    def __init__(self, step=Shifted, **params):
        super().__init__(**params)
        self.step = step

    def legalize(self, input_type):
        if input_type != LOGITS:
            raise LegalizationError("takes logits")
        return [self.step(**self.params)]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_processor_of_the_users(as_tensor, device):
    logits = torch.randn(3, 40, device=device)
    bias = torch.randn(40, device=device) if as_tensor else -2.5
    pipe = LogitsPipe([Bias(), Bias(Tagged), Softmax(), TopP(), Sample()])
    assert pipe.initial_type == LOGITS
    assert [op.name for op in pipe.ops] == ["Shifted", "Tagged", "SoftmaxOp", "TopPOp", "ProbsSampleOp"]
    assert [op.name for op in pipe.compiled_ops] == ["Shifted", "Tagged", "FusedSoftmaxFilterSampleOp"]
    want = sampling.top_p_sampling_from_probs(sampling.softmax((logits + bias) * 0.5), 0.6, **RANDOM)
    assert pipe(logits, bias=bias, by=0.5, top_p=0.6, **RANDOM).equal(want)
    assert LogitsPipe([Bias(bias=bias)])(logits).equal(logits + bias)
    with pytest.raises(ValueError, match=r"Error executing operator 0 \(Shifted\): .*bias: got None"):
        pipe(logits, by=0.5, top_p=0.6)
    with pytest.raises(ValueError, match="Shifted: bias: got str, wanted a number or a tensor"):
        pipe(logits, bias="much", by=0.5, top_p=0.6)


def test_errors_of_custom_processors():
    class Nothing(Op):
        IN, OUT = LOGITS, LOGITS

    class Bare(Nothing):
        def __call__(self, tensor, **runtime):
            return tensor.data

    class Anything(LogitsProcessor):
        def legalize(self, input_type):
            return [LogitsTopKOp() if input_type == LOGITS else ProbsTopKOp()]

    class Steps(LogitsProcessor):
        INPUTS = (LOGITS,)

        def __init__(self, steps):
            super().__init__()
            self.steps = steps

        def legalize(self, input_type):
            return self.steps

    x = torch.randn(2, 9)
    with pytest.raises(ValueError, match=r"operator 0 \(Nothing\): Nothing: got a class without run or __call__"):
        LogitsPipe([Steps([Nothing()])])(x)
    with pytest.raises(ValueError, match=r"operator 0 \(Bare\): .*result: got Tensor, wanted a TaggedTensor of LOGITS"):
        LogitsPipe([Steps([Bare()])])(x)
    for steps in ([], None, Nothing(), [3]):
        with pytest.raises(ValueError, match="wanted a list of Op"):
            LogitsPipe([Steps(steps)])
    with pytest.raises(ValueError, match="Cannot infer input type: Anything takes LOGITS and PROBS, wanted input_type"):
        LogitsPipe([Anything()])
    assert LogitsPipe([Softmax(), Anything()]).ops[1].name == "ProbsTopKOp"
    with pytest.raises(ValueError, match=r"processor 1 \(Bias\): got PROBS, wanted LOGITS"):
        LogitsPipe([Softmax(), Bias()])
    with pytest.raises(TypeError, match="abstract"):
        LogitsProcessor()


def test_legalize_processors_returns_a_list():
    ops = legalize_processors([Temperature(), Softmax(), TopP()])
    assert isinstance(ops, list) and [op.name for op in ops] == ["TemperatureOp", "SoftmaxOp", "TopPOp"]
    assert [op.name for op in legalize_processors([TopK()], PROBS)] == ["ProbsTopKOp"]
    assert [op.name for op in compile_pipeline(ops)] == ["FusedTemperatureSoftmaxOp", "TopPOp"]
    with pytest.raises(LegalizationError, match="Cannot infer input type"):
        legalize_processors([TopK()])


def test_checks_and_rules_of_compile():
    seen = []

    def refuse(ops):
        seen.append([op.name for op in ops])
        raise CompileError("not today")

    pipe = LogitsPipe([Temperature(), Softmax()], compile=False)
    with pytest.raises(CompileError, match="not today"):
        pipe.compile(custom_validity_checks=[refuse])
    assert seen == [["TemperatureOp", "SoftmaxOp"]] and pipe.compiled_ops is None
    rule = FusionRule((TemperatureOp, SoftmaxOp), lambda ops: True, lambda ops: Tagged(), prio=1000)
    pipe.compile(custom_fusion_rules=[rule], custom_validity_checks=[])
    assert [op.name for op in pipe.compiled_ops] == ["Tagged"]
    compiler = Compiler()
    with pytest.raises(CompileError, match="not today"):
        compiler.compile(pipe.ops, custom_validity_checks=[refuse])
    assert [op.name for op in compiler.compile(pipe.ops)] == ["FusedTemperatureSoftmaxOp"]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    "processors, name",
    [
        ([Temperature()], "temperature"),
        ([Temperature(), Softmax()], "temperature"),
        ([Softmax(), MinP()], "min_p"),
        ([Softmax(), TopP()], "top_p"),
        ([TopK()], "top_k"),
        ([Softmax(), MinP(), Sample()], "min_p"),
        ([Temperature(), Softmax(), MinP(), Sample()], "temperature"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:this LogitsPipe is not compiled")
def test_parameters_of_a_wrong_length_are_named(processors, name, compiled, device):
    pipe = LogitsPipe(processors, compile=compiled, input_type=LOGITS)
    x, rows = torch.randn(4, 20, device=device), torch.tensor([0, 0, 3, 1, 2], device=device)
    fine = {"temperature": 0.7, "min_p": 0.1}
    for given in (dict(), dict(indices=rows)) if isinstance(processors[-1], Sample) else (dict(),):
        for shape in ((3,), (7,), (4, 1)):
            wrong = torch.ones(shape, device=device).to(torch.int32 if name == "top_k" else torch.float32)
            with pytest.raises(ValueError, match=r"Error executing operator \d"):
                pipe(x, **{**fine, name: wrong}, **given)
    if device != "cpu" and name == "temperature":
        with pytest.raises(ValueError, match="cpu"):
            pipe(x, **{**fine, name: torch.ones(4)})
