"""Test capture and replay: which kernels are launched, and that results equal a full call."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import lik_ops
from lik_ops import backends
from lik_ops.ops.fast_path import eager

from ..support.common import INTERPRETING

pytest.importorskip("triton", reason="only the Triton backend replays")

from lik_ops.core.segments import DenseArgs, PackedArgs, RaggedArgs
from lik_ops.families.head import gpu as head_gpu
from lik_ops.families.head.portable import HiddenArgs
from lik_ops.gpu import backend as cuda
from lik_ops.gpu.backward import dense as gpu_backward
from lik_ops.gpu.backward import packed as packed_backward
from lik_ops.gpu.forward import packed as packed_forward
from lik_ops.gpu.forward.plans import DensePlan
from lik_ops.gpu.runtime import capture, launcher, memory
from lik_ops.gpu.tuning import architectures

from ..support import replaying

without_kernels = pytest.mark.skipif(INTERPRETING, reason="stands for a GPU's launches")
# The last one has enough query rows for each token of a document to split fp32 rows.
SHAPES = ((8, 8, 32, 64, 64), (3, 5, 2, 40, 24), (2, 3, 1300, 70, 16), (17, 2, 9, 2000, 40), (40, 5, 32, 50, 48))
NEEDS = ([True, True, True], [True, False, False], [False, True, False], [True, True, False])


class Bound(launcher.CompiledKernel):
    """Stand-in for a compiled kernel. It logs launches and keeps their tensors alive so that pointers differ."""

    __slots__ = ("kernel", "log")

    def __init__(self, kernel, log):
        self.kernel, self.log = kernel, log

    def direct(self, x, y, z, stream, values):
        self.log.append((self.kernel.__name__, (x, y, z), values))

    def launch(self, grid, args, values):
        self.log.append((self.kernel.__name__, (*grid, 1, 1)[:3], values, args))

    def encoded(self, n, descriptor):
        shape = tuple(descriptor.shape), tuple(descriptor.strides), tuple(descriptor.block_shape)
        return ("descriptor", descriptor.base.data_ptr(), *shape)


@pytest.fixture
def log(monkeypatch):
    """Log launches of the Triton backend on CPU tensors: name, grid, arguments, and tensors of full launches."""
    found, alive = [], []

    def bind(kernel, args, options):
        return Bound(kernel, found), launcher.describe_args(kernel, args)[1]

    def new_memory(*call):
        alive.append(torch.empty_strided(*call[:2], dtype=call[2]).fill_(7))
        return alive[-1]

    monkeypatch.setattr(launcher, "get_compiled_kernel", bind)
    monkeypatch.setattr(memory, "allocate_cuda", None)
    monkeypatch.setattr(capture, "makers", lambda device: (new_memory, new_memory))
    monkeypatch.setattr(capture, "current_device", lambda: None)
    monkeypatch.setattr(capture, "raw_stream", lambda index: 0)
    cuda.forget()
    yield found
    cuda.forget()


def flat(values):
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from flat(value)
        else:
            yield value


def encode_descriptor(value):
    """Return a descriptor in the form of a direct launch."""
    if not launcher.is_descriptor(value):
        return value
    shape = tuple(value.shape), tuple(value.strides), tuple(value.block_shape)
    return ["descriptor", value.base.data_ptr(), *shape]


def comparable(launches, given):
    """Return launches with pointers named by the given tensor, or numbered by first occurrence."""
    spans = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in given if t is not None]
    names = {}

    def named(value):
        if not isinstance(value, int) or value < 2**32:
            return value
        for n, (begin, end) in enumerate(spans):
            if begin <= value < end:
                return f"given {n} at {value - begin}"
        return names.setdefault(value, f"memory {len(names)}")

    return [(launch[0], launch[1], [named(v) for v in flat(map(encode_descriptor, launch[2]))]) for launch in launches]


def draw_inputs(shape, candidates, masks, dtype, device="cpu", seed=0):
    Nq, K, Lq, Ld, d = shape
    g = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(size, generator=g).to(device)

    def kept(*size):
        return (torch.rand(size, generator=g) < 0.7).to(device) if masks else None

    owner = (Nq,) if candidates else ()
    Q, D = draw(Nq, Lq, d).to(dtype), draw(*owner, K, Ld, d).to(dtype)
    return Q, D, kept(Nq, Lq), kept(*owner, K, Ld), draw(Nq, Lq).abs() if masks else None


def gradients(x, name, winners, normalize, needs, seed=0):
    Q, D, *rest = x
    g = torch.Generator().manual_seed(seed)
    Nq, K = Q.shape[0], D.shape[-3]
    upstream = torch.randn(Nq, K, generator=g).to(Q.device)
    needs = [*needs[:2], needs[2] and rest[2] is not None]
    return getattr(cuda, f"backward_{name}")(upstream, Q, D, winners, *rest, normalize, needs), upstream


def draw_argmax(x, seed=0):
    Q, D = x[:2]
    shape = (Q.shape[0], D.shape[1], Q.shape[1]) if D.dim() == 4 else (D.shape[0], *Q.shape[:2])
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-1, D.shape[-2], shape, generator=g, dtype=torch.int16).to(Q.device)


CASES = [
    pytest.param(*case, id="-".join(map(str, case[:1])) + f"-{n}")
    for n, case in enumerate(itertools.product(("lowmem", "unified"), SHAPES, (False, True), (False, True), NEEDS))
]


@without_kernels
@pytest.mark.parametrize(("name", "shape", "candidates", "plain", "needs"), CASES)
def test_replay_launches_match_full_backward(name, shape, candidates, plain, needs, log):
    dtype = torch.bfloat16 if plain else torch.float32
    x = draw_inputs(shape, candidates, not plain, dtype)
    winners, found, alive = draw_argmax(x), [], []
    for _ in range(3):
        log.clear()
        results, upstream = gradients(x, name, winners, not plain, needs)
        alive.append((results, upstream, [launch[3:] for launch in log]))
        found.append((comparable(log, (*x, winners, upstream)), [len(launch) == 4 for launch in log]))
        log.clear()
    (full, general), (recorded, _), (replayed, still) = found
    assert full == recorded == replayed and len(full) > 0
    assert all(general) and not any(still)
    kinds = [[(t.shape, t.stride(), t.dtype) for t in a[0]] for a in alive]
    assert kinds[0] == kinds[2]


@without_kernels
@pytest.mark.parametrize("name", ["lowmem", "unified"])
@pytest.mark.parametrize("candidates", [False, True])
def test_replay_launches_match_full_backward_of_int8_documents(name, candidates, log):
    """The scale of int8 documents has a slot like other tensors. Calls without int8 have separate captures."""
    x = draw_inputs(SHAPES[1], candidates, False, torch.bfloat16)
    winners, found, kept, run = draw_argmax(x), [], [], getattr(cuda, f"backward_{name}")
    for _ in range(3):
        made = lik_ops.quantize(torch.randn(x[1].shape))
        upstream = torch.randn(x[0].shape[0], x[1].shape[-3])
        log.clear()
        kept.append((run(upstream, x[0], made.data, winners, None, None, None, True, [True] * 3, made.scale), made))
        found.append((comparable(log, (x[0], made.data, made.scale, winners, upstream)), [len(y) == 4 for y in log]))
    (full, general), (recorded, _), (replayed, still) = found
    assert full == recorded == replayed and len(full) > 0
    assert all(general) and not any(still)
    assert [g.dtype for g in kept[2][0]] == [torch.bfloat16, torch.bfloat16, torch.float32]
    log.clear()
    gradients(x, name, winners, True, NEEDS[3])
    assert all(len(launch) == 4 for launch in log)


def packed(layout, device, dtype, seed=0):
    """Return arguments of a packed call of 5 queries and 7 documents. `seed` changes values but not sizes."""
    g = torch.Generator().manual_seed(seed)
    cu_q, cu_d = (torch.tensor([0, *n]).cumsum(0).to(device) for n in ([3, 0, 9, 4, 1], [30, 2, 0, 7, 70, 1, 5]))
    Q, D = (torch.randn(n, 24, generator=g).to(device, dtype) for n in (17, 115))
    pairs = torch.randint(0, 5, (11, 2), generator=g).to(device)
    chosen = torch.randint(0, 7, (5, 3), generator=g).to(device)
    weight = torch.rand(17, generator=g).to(device)
    d_mask = (torch.rand(115, generator=g) < 0.7).to(device)
    where = {
        "cross": (cu_d[:-1].contiguous(), cu_d.diff(), None),
        "pairs": (cu_d[:-1].contiguous(), cu_d.diff(), pairs),
    }
    where["candidates"] = cu_d[chosen], cu_d.diff()[chosen], None
    return RaggedArgs(Q, D, cu_q, *where[layout], None, d_mask, weight)


@without_kernels
@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("layout", ["cross", "candidates", "pairs"])
def test_replay_launches_match_full_packed_backward(layout, unified, log):
    r = packed(layout, "cpu", torch.bfloat16)
    c = PackedArgs.from_tensors(r, 17)
    argmax = torch.zeros(c.argmax_shape(), dtype=torch.int16)
    upstream, found, alive = torch.randn(c.scores_shape()), [], []
    for _ in range(3):
        log.clear()
        alive.append((cuda.backward_cut(upstream, c, argmax, True, [True] * 3, unified), [x[3:] for x in log]))
        found.append((comparable(log, (upstream, argmax, *c.tensors)), [len(launch) == 4 for launch in log]))
    (full, general), (recorded, _), (replayed, still) = found
    assert full == recorded == replayed and len(full) > 0
    assert all(general) and not any(still)


@without_kernels
@pytest.mark.parametrize("argmax_dtype", [None, torch.int16])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("format", ["int8", "uint8", "binary", "residual"])
def test_replay_launches_match_full_quantized_forward(format, normalize, argmax_dtype, log, monkeypatch):
    """The number of documents is equal. Candidates, whose sizes seldom repeat, have separate launches."""
    monkeypatch.setattr(packed_forward, "current_device", lambda: None)
    monkeypatch.setattr(packed_forward, "raw_stream", lambda index: 0)
    r = packed("cross", "cpu", torch.bfloat16)
    tokens = r.D[:, :20].contiguous()  # no descriptor reads rows of 20 bytes
    codec = lik_ops.ResidualCodec.train(tokens.float(), 2, 4) if format == "residual" else format
    found, alive = [], []
    for _ in range(3):
        made = lik_ops.quantize(tokens + 1, codec)
        c = PackedArgs.from_tensors(r._replace(Q=r.Q[:, :20].contiguous(), D=made.to_encoded().data), 17)
        given = [x for x in (*c.tensors, *made.to_encoded()) if torch.is_tensor(x)]
        log.clear()
        alive.append((cuda.forward_quantized_cut(c, made.to_encoded(), normalize, argmax_dtype), c, made))
        alive.append([launch[3:] for launch in log])
        found.append((comparable(log, given), [len(y) == 4 for y in log]))
    (full, general), (recorded, _), (replayed, still) = found
    assert full == recorded == replayed and len(full) > 0
    assert all(general) and not any(still)
    assert (alive[4][0][1] is None) == (argmax_dtype is None)


@without_kernels
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("temperature", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_replay_launches_match_full_soft_forward(temperature, keep, log):
    """A tensor temperature is read at each replay, and another number has another dispatch key."""
    x = DenseArgs(
        *draw_inputs((*SHAPES[1][:4], 20), False, True, torch.bfloat16)
    )  # no descriptor reads rows of 40 bytes
    found, alive = [], []
    for _ in range(3):
        tau = temperature if isinstance(temperature, float) else temperature.clone()
        log.clear()
        alive.append((cuda.forward_soft(x, tau, True, keep), tau, [launch[3:] for launch in log]))
        found.append((comparable(log, (*x, tau) if torch.is_tensor(tau) else x), [len(y) == 4 for y in log]))
    (full, general), (recorded, _), (replayed, still) = found
    assert full == recorded == replayed and len(full) > 0
    assert all(general) and not any(still)
    log.clear()
    cuda.forward_soft(x, 0.2, True, keep)
    assert all(len(launch) == 4 for launch in log)


@without_kernels
def test_unaligned_or_recorded_calls_are_not_replayed(log):
    x = draw_inputs(SHAPES[0], False, False, torch.bfloat16)
    winners = draw_argmax(x)
    for _ in range(2):
        gradients(x, "lowmem", winners, False, NEEDS[3])
    room = torch.empty(x[0].numel() + 1, dtype=x[0].dtype)
    odd = room[1:].view_as(x[0]).copy_(x[0]), *x[1:]
    log.clear()
    gradients(odd, "lowmem", winners, False, NEEDS[3])
    assert log and all(len(launch) == 4 for launch in log)
    log.clear()
    gradients(x, "lowmem", winners, False, NEEDS[3])
    assert log and all(len(launch) == 3 for launch in log)
    log.clear()
    with capture.RecordingMode(()):
        gradients(x, "lowmem", winners, False, NEEDS[3])
    assert log and all(len(launch) == 4 for launch in log)
    cuda.forget()  # if other calls with this key are captured first, the next such call replays
    for given in (x, odd, x):
        gradients(given, "lowmem", winners, False, NEEDS[3])
    log.clear()
    gradients(x, "lowmem", winners, False, NEEDS[3])
    assert log and all(len(launch) == 3 for launch in log)


@without_kernels
def test_self_similarity_calls_are_not_captured(log):
    """A self-similarity is not captured, because a later call with this key may have two tensors and is captured."""
    x = draw_inputs((8, 8, 32, 32, 64), False, False, torch.bfloat16)
    for same, launched in ((True, 4), (True, 4), (True, 4), (False, 4), (False, 3), (True, 3)):
        given = x[0], x[0] if same else x[1], *x[2:]
        log.clear()
        winners = draw_argmax(given)
        _, upstream = gradients(given, "lowmem", winners, False, NEEDS[3])
        assert log and all(len(launch) == launched for launch in log)
        found = [name for launch in comparable(log, (*given[:2], winners, upstream)) for name in map(str, launch[2])]
        assert {name for name in found if name.startswith("given")} == {
            f"given {n} at 0" for n in ((0, 2, 3) if same else (0, 1, 2, 3))
        }


def record(given, function):
    with capture.RecordingMode(given) as recorder:
        results = function()
    return recorder, recorder.replay(results, torch.device("cpu"))


@without_kernels
def test_unsupported_operations_are_not_replayed(log):
    Q, other = torch.randn(4, 16), torch.randn(3)

    def launch(*tensors):
        launcher.launch(kernel_of(len(tensors) + 1), (1,), (*tensors, 3), {})

    for what, function in {
        "clone": lambda: [launch(Q.clone())],
        "copy": lambda: [launch(torch.empty(4, 16).copy_(Q))],
        "fills a part": lambda: [torch.empty(4, 16)[1:].zero_(), launch(Q)],
        "fills what was given": lambda: [Q.zero_(), launch(Q)],
        "another's memory": lambda: [launch(other)],
        "no launch": lambda: [torch.empty(3)],
    }.items():
        recorder, found = record((Q,), lambda f=function: [f() and None][:0])
        assert found is None and recorder.obstacle, what
    recorder, found = record((Q,), lambda: [launch(Q[1:], torch.empty(3))][:0])
    assert found is not None
    recorder, found = record((Q,), lambda: [launch(Q), Q][1:])
    assert found is None and "has no memory of its own" in recorder.obstacle


def kernel_of(parameters):
    """Stand-in for a kernel with this many tensor and integer parameters."""
    from lik_ops.csrc_triton.search.topk import maxsim_best

    class Kernel(type(maxsim_best)):  # a type that `launcher.launch` binds
        def __init__(self):
            self.__name__ = "any"
            self.params = [SimpleNamespace(is_constexpr=False, do_not_specialize=False)] * parameters

    return Kernel()


@without_kernels
def test_replay_refills_memory(log):
    Q = torch.randn(4, 16)

    def call():
        zeros, ones = torch.zeros(4, 3), torch.empty(5).fill_(1)
        launcher.launch(kernel_of(3), (1,), (Q, zeros, ones), {})
        return zeros, ones

    _, found = record((Q,), call)
    zeros, ones = found((Q,))
    assert torch.equal(zeros, torch.zeros(4, 3)) and torch.equal(ones, torch.ones(5))


@without_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("argmax_dtype", [None, torch.int16])
def test_replay_launches_match_sliced_scores_of_hidden_states(argmax_dtype, dtype, log, monkeypatch):
    """All slices are one captured call, and descriptors of later slices begin within the hidden states."""
    token_bytes = 2 * 40 * 16 * dtype.itemsize
    monkeypatch.setattr(head_gpu, "_HEAD_PARTS", head_gpu._HEAD_PARTS._replace(token_bytes=token_bytes))
    monkeypatch.setattr(head_gpu, "architecture", lambda device: architectures.ARCHITECTURES["sm_90"])
    found, slices, alive = [], 3, []
    for seed in range(3):
        Q, H, q_mask, d_mask, q_weight = draw_inputs((70, 5, 32, 40, 64), False, True, dtype, seed=seed)
        x = HiddenArgs(Q[..., :16].contiguous(), H, torch.randn(16, 64).to(dtype), None, q_mask, d_mask, q_weight)
        log.clear()
        alive.append((head_gpu.forward_head(x, True, argmax_dtype), x, [launch[3:] for launch in log]))
        found.append((comparable(log, x), [len(launch) == 4 for launch in log]))
    (full, general), (recorded, _), (replayed, still) = found
    names = [name for name, *_ in full]
    tokens = [name for name in names if name in ("maxsim_split_weights", "maxsim_head_tokens")]
    split = ["maxsim_split_weights"] if dtype == torch.float32 else []
    assert tokens == [*split, "maxsim_head_tokens"] * slices
    assert len(names) == len(tokens) + slices or dtype == torch.float32  # fp32 scores may need a second launch
    assert full == recorded == replayed
    assert all(general) and not any(still)


@without_kernels
def test_replay_code_is_shared_between_sizes(log):
    """The generated replay code is compiled once for all calls of a kind, because sizes are not part of it."""
    found = []
    for shape in ((8, 8, 32, 64, 64), (8, 9, 32, 72, 32)):
        x = draw_inputs(shape, False, False, torch.bfloat16)
        gpu_backward.captured_calls.forget()
        for _ in range(3):
            gradients(x, "lowmem", draw_argmax(x), False, NEEDS[3])
        (recorded,) = gpu_backward.captured_calls._found.values()
        found.append(recorded.__code__)
    assert found[0] is found[1]


@pytest.mark.skipif(not INTERPRETING, reason="runs the kernels in Triton's interpreter: see test_interpreter.py")
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("layout", ["cross", "candidates"])
def test_replays_match_full_calls_in_interpreter(layout, normalize, monkeypatch):
    """Pointers end where the tensors were, and the replay has other values in other memory."""
    for module, name in ((launcher, "launch"), (capture, "current_device"), (capture, "raw_stream")):
        monkeypatch.setattr(module, name, getattr(replaying, name))
    before = replaying.replayed.count

    def everything(seed):
        x = draw_inputs(SHAPES[1], layout == "candidates", normalize, torch.float16, seed=seed)
        winners = draw_argmax(x, seed)
        found = [gradients(x, name, winners, normalize, NEEDS[0], seed)[0] for name in ("lowmem", "unified")]
        r = packed("pairs" if layout == "candidates" else layout, "cpu", torch.float16, seed)
        argmax = cuda.forward_ragged(r, normalize, torch.int16, 9)[1]
        shape = PackedArgs.from_tensors(r, 9).scores_shape()
        upstream = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return *found[0], *found[1], *cuda.backward_ragged(upstream, r, argmax, normalize, [True] * 3, False)

    torch.use_deterministic_algorithms(False)  # atomic adds have one order here
    expected = []
    for seed in range(2):
        cuda.forget()
        expected.append(everything(seed))
    cuda.forget()
    for seed in (0, 1, 0, 1):
        for a, b in zip(everything(seed), expected[seed], strict=True):
            assert torch.equal(a, b)
    assert replaying.replayed.count - before >= 12


@pytest.mark.gpu
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("candidates", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [*SHAPES, (16, 200, 32, 300, 128), (32, 9, 100, 150, 320)])
def test_replays_have_the_bits_of_full_calls(shape, dtype, candidates, masks, normalize):
    """Test the forward with and without argmax, and both gradients, on other values than were captured."""

    def everything(seed):
        x = draw_inputs(shape, candidates, masks, dtype, "cuda", seed)
        scores, argmax = cuda.forward(*x, normalize, torch.int16)
        alone, _ = cuda.forward(*x, normalize, None)
        lowmem, _ = gradients(x, "lowmem", argmax, normalize, NEEDS[0], seed)
        found_again, _ = gradients(x, "lowmem", None, normalize, NEEDS[0], seed)
        unified, _ = gradients(x, "unified", argmax, normalize, NEEDS[0], seed)
        return (scores, argmax, alone, *lowmem, *found_again), unified

    cuda.forget()
    expected = [everything(seed) for seed in range(3)]
    cuda.forget()
    for _ in range(2):
        for seed in range(3):
            exact, near = everything(seed)
            for a, b in zip(exact, expected[seed][0], strict=True):
                assert torch.equal(a, b)
            for a, b in zip(near, expected[seed][1], strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-2 * float(b.abs().amax()) if b.numel() else 0)
    replayed = [kind for kind in gpu_backward.captured_calls._found.values() if callable(kind)]
    assert len(replayed) >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["cross", "candidates", "pairs"])
def test_packed_replays_have_the_bits_of_full_calls(layout, dtype, normalize):
    def everything(seed):
        r = packed(layout, "cuda", dtype, seed)
        scores, argmax = cuda.forward_ragged(r, normalize, torch.int16, 9)
        upstream = torch.randn(scores.shape, generator=torch.Generator().manual_seed(seed)).cuda()
        return scores, argmax, *cuda.backward_ragged(upstream, r, argmax, normalize, [True] * 3, False)

    cuda.forget()
    expected = [everything(seed) for seed in range(2)]
    cuda.forget()
    for _ in range(2):
        for seed in range(2):
            for a, b in zip(everything(seed), expected[seed], strict=True):
                assert torch.equal(a, b)
    assert any(callable(kind) for kind in packed_backward.captured_calls._found.values())


@pytest.mark.gpu
def test_replayed_backward_does_not_increase_peak_memory():
    """Workspace is freed after its last launch, before memory for other gradients is allocated."""
    x = draw_inputs((64, 512, 32, 180, 128), False, False, torch.bfloat16, "cuda")
    argmax = cuda.forward(*x, False, torch.int16)[1]
    peaks = []
    cuda.forget()
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        gradients(x, "lowmem", argmax, False, NEEDS[3])
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[2] <= peaks[0]
    assert any(callable(kind) for kind in gpu_backward.captured_calls._found.values())


@pytest.mark.gpu
def test_number_of_cached_replays_is_bounded():
    for n in range(1, capture._MAX_CALLS + 50):
        Q, D = torch.randn(1, 2, 8, device="cuda", dtype=torch.half), torch.randn(1, n, 8, device="cuda").half()
        gradients((Q, D, None, None, None), "lowmem", draw_argmax((Q, D)), False, NEEDS[3])
    assert len(gpu_backward.captured_calls._found) <= capture._MAX_CALLS


@pytest.mark.parametrize("Nq", [0, 2])
@pytest.mark.parametrize("K", [0, 5])
@pytest.mark.parametrize("Lq", [0, 3])
@pytest.mark.parametrize("candidates", [False, True])
def test_plan_memory_has_torch_strides(Nq, K, Lq, candidates):
    plan = DensePlan(torch.zeros(Nq, Lq, 4), torch.zeros(*([Nq] if candidates else []), K, 6, 4), torch.int16)
    assert plan.score_strides[2] == torch.empty(plan.scores_shape).stride()
    assert plan.allocate_argmax().stride() == torch.empty(plan.argmax_shape).stride()


@without_kernels
def test_saved_tensors_with_other_strides_are_not_replayed(log, monkeypatch):
    """A hook may pass contiguous copies of saved tensors to a backward, as `save_on_cpu` does."""
    monkeypatch.setattr(backends, "select_backend", lambda device, dtype: cuda)
    Q = torch.randn(32, 8, 64).half().transpose(0, 1).requires_grad_()
    D = torch.randn(8, 64, 64).half().requires_grad_()
    upstream = torch.ones(8, 8)

    def strides_of_queries():
        scores = lik_ops.maxsim(Q, D)
        log.clear()
        torch.autograd.grad(scores, (Q, D), upstream)
        (values,) = (launch[2] for launch in log if launch[0] == "maxsim_grad_queries")
        return list(values[0][1:3])

    eager.clear_call_caches()
    assert all(strides_of_queries() == list(Q.stride()[:2]) for _ in range(4))
    with torch.autograd.graph.saved_tensors_hooks(Tensor.contiguous, lambda t: t):
        assert strides_of_queries() == [32 * 64, 64]
    eager.clear_call_caches()
